"""Text of a growing token sequence, piece by piece: nothing is split and nothing taken back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsbd_runtime.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A UTF-8 character has at most four bytes, so at most three of one are still unfinished.
_MAX_UNFINISHED = 3


@dataclass(frozen=True)
class TextWindow:
    """The end of a token sequence: all of it that further text depends on.

    Immutable, so that paths with a common beginning can share it.

    Attributes:
        tokens: those of the last piece (their context decides about a leading space) and since.
        num_context: tokens at the head of the window, before the piece in progress.
        num_given: how many characters of the window's text were returned.
    """

    tokens: tuple[int, ...] = ()
    num_context: int = 0
    num_given: int = 0

    def extended(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> tuple[TextWindow, str]:
        """Take the next tokens; return the text that is certain now and was not returned yet."""
        tokens = (*self.tokens, *map(int, token_ids))
        text = tokenizer.decode(tokens)
        certain = len(text) - _num_unfinished(text)
        piece = text[self.num_given : certain]
        if piece and certain == len(text):
            context = tokens[self.num_context :]
            return TextWindow(context, len(context), len(tokenizer.decode(context))), piece
        return TextWindow(tokens, self.num_context, max(self.num_given, certain)), piece

    def rest(self, tokenizer: Tokenizer) -> str:
        """Return the text that is not certain yet, an unfinished character as U+FFFD."""
        return tokenizer.decode(self.tokens)[self.num_given :]


class StreamDecoder:
    """Decodes tokens as they come.

    The pieces together are ``decode`` of all tokens, given that their bytes are UTF-8. Byte
    tokens of an unfinished character decode to U+FFFD; those are held back until the character
    is whole or cannot be any more. The work per push does not grow with the text: only tokens
    from a window are decoded again.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window = TextWindow()

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that is certain now and was not returned yet."""
        self._window, piece = self._window.extended(self._tokenizer, token_ids)
        return piece

    def finish(self) -> str:
        """Return the rest, an unfinished character as U+FFFD, and start afresh."""
        rest = self._window.rest(self._tokenizer)
        self._window = TextWindow()
        return rest


def _num_unfinished(text: str) -> int:
    """Return how many U+FFFD at the end of ``text`` may still become a character: 0 to 3."""
    return min(len(text) - len(text.rstrip(REPLACEMENT)), _MAX_UNFINISHED)
