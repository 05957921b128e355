"""Stop strings: where a path's text contains one, what is cut, what may be shown before that.

The text of a path is that of its new tokens, special tokens left out. It ends with the token that
completes a stop string for the first time; its text is cut where the earliest stop string begins.
That text is what ``decode`` says of the tokens so far, also where a later token could change it:
the path ends, no later token follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dsbd_runtime.stream_decoder import TextWindow
from dsbd_runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class StopSearch:
    """A decoding.StopState: looks for stop strings in the text of one path.

    Attributes:
        tokenizer: of the bundle.
        stop_texts: what ends a path; none is empty.
        has_ended: whether one was found.
        window: the end of the path's tokens.
        tail: the end of its certain text, in which a stop string may have begun.
    """

    tokenizer: Tokenizer
    stop_texts: tuple[str, ...]
    has_ended: bool = False
    window: TextWindow = field(default_factory=TextWindow)
    tail: str = ""

    def extended(self, token: int) -> StopSearch:
        """See StopState.extended."""
        if self.has_ended:
            return self
        window, piece = self.window.extended(self.tokenizer, (token,))
        text = self.tail + piece
        most = max(map(len, self.stop_texts)) - 1
        tail = text[max(len(text) - most, 0) :]
        uncertain = window.end_of_rest(self.tokenizer, most + 1)
        at_the_end = uncertain if len(uncertain) > most else tail + uncertain
        has_ended = any(stop in text or stop in at_the_end for stop in self.stop_texts)
        return StopSearch(self.tokenizer, self.stop_texts, has_ended, window, tail)


def text_before_stop(text: str, stop_texts: Sequence[str]) -> str:
    """Return ``text`` up to where its earliest stop string begins."""
    return text[: min((text.find(stop) for stop in stop_texts if stop in text), default=None)]


class StopFilter:
    """Lets text through piece by piece, but never a part of a stop string or what follows one."""

    def __init__(self, stop_texts: Sequence[str]) -> None:
        self._stop_texts = stop_texts
        self._held = ""
        self._is_over = False

    def push(self, piece: str) -> str:
        """Take the next piece; return what cannot belong to a stop string any more."""
        if self._is_over:
            return ""
        text = self._held + piece
        shown = text_before_stop(text, self._stop_texts)
        self._is_over = len(shown) < len(text)
        num_held = 0 if self._is_over else self._num_begun(text)
        self._held = text[len(text) - num_held :]
        return shown[: len(shown) - num_held]

    def finish(self) -> str:
        """Return the rest: it began like a stop string, but no more text came."""
        rest = "" if self._is_over else self._held
        self._held, self._is_over = "", False
        return rest

    def _num_begun(self, text: str) -> int:
        """Return how many last characters of ``text`` begin a stop string."""
        return max(
            (
                length
                for stop in self._stop_texts
                for length in range(1, min(len(stop) - 1, len(text)) + 1)
                if text.endswith(stop[:length])
            ),
            default=0,
        )
