"""The kinds of state that an engine keeps or reads, one module or two for each."""
