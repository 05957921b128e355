"""One program a tool, run by the Python of that tool's own environment."""
