"""Rewrites of a captured graph that keep its values."""
