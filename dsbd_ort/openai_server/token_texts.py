"""Texts of single tokens, and of the most probable tokens in their places."""

from __future__ import annotations

from collections.abc import Sequence

from dsbd_ort.decoding.top_tokens import TokenLogprobs
from dsbd_ort.openai_server.protocol import TokenPieces
from dsbd_runtime.errors import InputError
from dsbd_runtime.stream_decoder import REPLACEMENT, TextWindow
from dsbd_runtime.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""What OpenAI returns for a token that is impossible: JSON has no infinity."""

Tops = Sequence[TokenLogprobs | None]


class TokenTexts:
    """Texts of a growing sequence's tokens; concatenated they are the text of the sequence.

    A character of several tokens belongs to the last of them, the others have an empty text.
    Tokens are held back until their text is final (see ``stream_decoder``).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window = TextWindow()
        self._texts: list[str] = []
        self._logprobs: list[float | None] = []
        self._tops: list[list[tuple[str, float]] | None] = []
        self._spellings: list[str] = []
        self._run: list[tuple[int, bool]] = []

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[float | None], tops: Tops | None = None
    ) -> TokenPieces | None:
        """Append tokens; return those whose text is final now, None if there are none."""
        num_certain = 0
        of_each = [None] * len(token_ids) if tops is None else tops
        for token_id, logprob, top in zip(token_ids, logprobs, of_each, strict=True):
            self._add(token_id)
            self._logprobs.append(None if logprob is None else max(logprob, LEAST_LOGPROB))
            self._spellings.append("" if top is None else self._spelling(token_id))
            self._tops.append(None if top is None else self._spelled(top))
            if self._window.is_certain:
                num_certain = len(self._texts)
        return self._take(num_certain)

    def finish(self) -> TokenPieces | None:
        """Return the tokens held back, the last with the rest of the text; None if none are."""
        rest = self._window.rest(self._tokenizer)
        rest = self._end_run(rest, is_text=not self._window.unfinished)
        if rest:
            self._texts[-1] += rest
        self._window = TextWindow()
        return self._take(len(self._texts))

    def _take(self, num_tokens: int) -> TokenPieces | None:
        """Return the first ``num_tokens`` of the tokens held back; None for 0."""
        if not num_tokens:
            return None
        columns = self._texts, self._logprobs, self._tops, self._spellings
        pieces = TokenPieces(*(column[:num_tokens] for column in columns))  # type: ignore[arg-type]
        for column in columns:
            del column[:num_tokens]
        self._run = [(index - num_tokens, completes) for index, completes in self._run]
        return pieces

    def _add(self, token_id: int) -> None:
        before = self._window
        self._window, text = before.extended(self._tokenizer, (token_id,))
        if len(self._window.run) > len(before.run):
            self._run.append((len(self._texts), not self._window.unfinished))
        elif before.run and not self._window.run:
            is_text = not (before.unfinished or self._window.invalid)
            text = self._end_run(text, is_text=is_text)
        self._texts.append(text)

    def _end_run(self, text: str, *, is_text: bool) -> str:
        """Give the byte tokens of an ended run their characters of ``text``; return the rest.

        ``is_text``: whether the run was valid UTF-8; else each of its bytes is one character.
        """
        begin = 0
        for index, completes_character in self._run:
            end = begin + int(completes_character or not is_text)
            self._texts[index] += text[begin:end]
            begin = end
        self._run = []
        return text[begin:]

    def _spelling(self, token_id: int) -> str:
        """Return a token by itself: its text, or as the vocabulary has it where it is no text."""
        try:
            text = self._tokenizer.with_special_tokens.decode((token_id,))
        except InputError:  # a decoder that needs other tokens beside it
            text = ""
        return text if text and REPLACEMENT not in text else self._tokenizer.piece(token_id)

    def _spelled(self, top: TokenLogprobs) -> list[tuple[str, float]]:
        return [(self._spelling(token), max(logprob, LEAST_LOGPROB)) for token, logprob in top]


def pieces_of(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Tops | None,
) -> TokenPieces:
    """Return the tokens of a whole text with their texts."""
    texts = TokenTexts(tokenizer)
    parts = (texts.push(token_ids, logprobs, tops), texts.finish())
    return joined([part for part in parts if part is not None])


def joined(parts: Sequence[TokenPieces]) -> TokenPieces:
    """Return consecutive parts as one."""
    return TokenPieces(
        [text for part in parts for text in part.texts],
        [logprob for part in parts for logprob in part.logprobs],
        [top for part in parts for top in part.tops],
        [spelling for part in parts for spelling in part.spellings],
    )
