"""Constraints and processors: what may follow a path, and with what probability."""
