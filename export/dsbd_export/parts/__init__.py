"""Kinds of state of an engine: each in the graph, beside it, and in the manifest."""
