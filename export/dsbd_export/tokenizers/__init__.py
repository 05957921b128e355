"""Tokenizers of checkpoints, written for the bundle and compared."""
