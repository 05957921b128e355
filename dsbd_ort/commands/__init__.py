"""One module a command: the only place where algorithm, runtime and export meet."""
