"""Engines as the algorithm uses them: calls, checks, and the providers that run them."""
