"""Costs of constraints: tries of millions of sequences, grammars over a large vocabulary."""
