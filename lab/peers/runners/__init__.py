"""One program per tool, run by the Python of that tool's own environment."""
