"""Bits that depend on how something is computed, counted: requests, and logits of one path."""
