"""One program per tool, run by the Python of the tool's own environment."""
