"""Models captured as graphs over a forest of tokens."""
