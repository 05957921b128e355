"""Comparison with other tools on the same checkpoints, measured in one run."""
