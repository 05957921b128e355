"""A server under mixed load."""
