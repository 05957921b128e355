"""Speed beside quality, on twins."""
