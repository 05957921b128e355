"""Comparison with other tools, on the same checkpoints, in one run."""
