"""One module per command. Only here are algorithm, runtime and export imported together."""
