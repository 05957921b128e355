"""Kinds of state of an engine: each in the graph, in further files and in the manifest."""
