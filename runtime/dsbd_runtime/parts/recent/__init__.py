"""Recent rows: states of layers that read the last rows of a path, or a sum of all."""
