"""One module per command: the only place where algorithm, runtime and export meet."""
