"""Speed and quality, on twins."""
