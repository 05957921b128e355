"""Weights and products in 8 and 4 bits."""
