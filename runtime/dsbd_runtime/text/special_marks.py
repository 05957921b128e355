r"""Text with a mark in the place of every special token, for stop strings that name such tokens.

A text leaves special tokens out. In a marked text each is a mark, which no other text contains:

    "Hi", <|im_end|>, "\n"   text "Hi\n", marked "Hi" + mark_of(151645) + "\n"

So a stop string that the tokenizer writes with special tokens is found in it like any other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsbd_runtime.text.stream_decoder import TextWindow
from dsbd_runtime.text.tokenizer import Tokenizer

# Lone surrogates, which decoded text never has and options refuse.
_BEGIN, _END = "\ud800", "\udfff"
_MARK = re.compile(f"{_BEGIN}[0-9]+{_END}")


def mark_of(token_id: int) -> str:
    """Return the mark of a special token."""
    return f"{_BEGIN}{token_id}{_END}"


def marked(text: str, tokenizer: Tokenizer) -> str:
    """Return a text with marks for its special tokens; unchanged if ``decode`` spells those."""
    if not tokenizer.skips_special_tokens:
        return text
    parts = tokenizer.split_at_special_tokens(text)
    return "".join(part if isinstance(part, str) else mark_of(part) for part in parts)


def without_marks(text: str) -> str:
    """Return the text of a marked text."""
    return _MARK.sub("", text)


@dataclass(frozen=True)
class MarkedWindow:
    """A TextWindow that returns marked text.

    waiting: marks that are not returned yet, each with the number of uncertain characters before
        it; ascending.
    """

    window: TextWindow
    waiting: tuple[tuple[int, str], ...] = ()

    def extended(self, token_ids: Sequence[int]) -> tuple[MarkedWindow, str]:
        """See TextWindow.extended."""
        pieces, marked = [], self
        for token_id in map(int, token_ids):
            if token_id in self.window.tokenizer.special_token_ids:
                marked, piece = marked._with_mark(mark_of(token_id))
            else:
                marked, piece = marked._with_text(*marked.window.extended((token_id,)))
            pieces.append(piece)
        return marked, "".join(pieces)

    def rest(self) -> str:
        """See TextWindow.rest."""
        _, text = self._with_text(self.window, self.window.rest(), ends=True)
        return text

    def end_of_rest(self, num_characters: int) -> str:
        """See TextWindow.end_of_rest; the whole rest if it has marks."""
        return self.rest() if self.waiting else self.window.end_of_rest(num_characters)

    def _with_mark(self, mark: str) -> tuple[MarkedWindow, str]:
        num_before = len(self.window.rest())
        if not num_before and not self.waiting:
            return self, mark
        num_before = max([num_before, *(number for number, _ in self.waiting[-1:])])
        return replace(self, waiting=(*self.waiting, (num_before, mark))), ""

    def _with_text(
        self, window: TextWindow, text: str, *, ends: bool = False
    ) -> tuple[MarkedWindow, str]:
        """Return the next window, and its text with the marks that belong into it.

        ends: whether no text follows; then all marks belong into it. So they do if all text is
            certain.
        """
        if not self.waiting:
            return replace(self, window=window), text
        marked, begin, waiting = "", 0, []
        for number, mark in self.waiting:
            if number <= len(text) or ends or window.is_certain:
                marked += text[begin:number] + mark
                begin = min(number, len(text))
            else:
                waiting.append((number - len(text), mark))
        return MarkedWindow(window, tuple(waiting)), marked + text[begin:]
