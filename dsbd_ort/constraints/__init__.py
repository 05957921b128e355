"""Constraints that keep a generation to valid token sequences, grammars or a user's own rule."""

from dsbd_ort.constraints.token_trie import TokenTrie

__all__ = ["TokenTrie"]
