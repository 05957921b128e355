"""Text of a growing token sequence, piece by piece: nothing is split and nothing taken back."""

from __future__ import annotations

from collections.abc import Sequence

from dsbd_runtime.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A UTF-8 character has at most four bytes, so at most three of one are still unfinished.
_MAX_UNFINISHED = 3


class StreamDecoder:
    """Decodes tokens as they come.

    The pieces together are ``decode`` of all tokens, given that their bytes are UTF-8. Byte
    tokens of an unfinished character decode to U+FFFD; those are held back until the character
    is whole or cannot be any more. The work per push does not grow with the text: only tokens
    from a window are decoded again.

    Glossary: window = the tokens of the last piece (their context decides about a leading space)
    and the tokens since; num_given = how many characters of the window's text were returned.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_context = 0  # tokens at the head of the window, before the piece in progress
        self._num_given = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that is certain now and was not returned yet."""
        self._window.extend(int(i) for i in token_ids)
        text = self._tokenizer.decode(self._window)
        certain = len(text) - _num_unfinished(text)
        piece = text[self._num_given : certain]
        self._num_given = max(self._num_given, certain)
        if piece and certain == len(text):
            self._start_window_after_context()
        return piece

    def finish(self) -> str:
        """Return the rest, an unfinished character as U+FFFD, and start afresh."""
        rest = self._tokenizer.decode(self._window)[self._num_given :]
        self._window, self._num_context, self._num_given = [], 0, 0
        return rest

    def _start_window_after_context(self) -> None:
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._num_given = len(self._tokenizer.decode(self._window))


def _num_unfinished(text: str) -> int:
    """Return how many U+FFFD at the end of ``text`` may still become a character: 0 to 3."""
    return min(len(text) - len(text.rstrip(REPLACEMENT)), _MAX_UNFINISHED)
