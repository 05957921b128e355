"""Attention rows: keys and values of every row of a cache."""
