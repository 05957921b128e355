"""Texts of single tokens, and of the most probable tokens at their positions."""

from collections.abc import Sequence

from dsbd_ort.decoding.top_tokens import TokenLogprobs
from dsbd_ort.openai_server.protocol import ScoredToken, TokenPieces
from dsbd_runtime.text.stream_decoder import TextWindow

LEAST_LOGPROB = -9999.0
"""Log-probability of an impossible token, as OpenAI returns it: JSON has no infinity."""

Tops = Sequence[TokenLogprobs | None]
Scored = tuple[Sequence[int], Sequence[float | None], Tops | None]
"""Tokens, their log-probabilities, and the most probable tokens at their positions."""


class TokenTexts:
    """Texts of a growing sequence's tokens; concatenated they are the text of the sequence.

    A character of several tokens belongs to the last of them; the texts of the others are empty.
    Tokens are held back until their text is final (see ``stream_decoder``).
    """

    def __init__(self, start: TextWindow) -> None:
        """Begin at ``start``: after the prompt, or before it if it is echoed."""
        self._window = start
        self._texts: list[str] = []
        self._tokens: list[ScoredToken] = []
        self._tops: list[list[ScoredToken] | None] = []
        self._run: list[tuple[int, bool]] = []

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[float | None], tops: Tops | None = None
    ) -> TokenPieces | None:
        """Append tokens; return the tokens whose text is final now, None if there are none."""
        num_certain = 0
        of_each = [None] * len(token_ids) if tops is None else tops
        for token_id, logprob, top in zip(token_ids, logprobs, of_each, strict=True):
            self._add(token_id)
            self._tokens.append(self._scored(token_id, logprob))
            self._tops.append(None if top is None else [self._scored(*each) for each in top])
            if self._window.is_certain:
                num_certain = len(self._texts)
        return self._take(num_certain)

    def finish(self) -> TokenPieces | None:
        """Return the tokens held back, the last one with the rest of the text; None for none."""
        rest = self._end_run(self._window.rest(), is_text=not self._window.unfinished)
        if self._texts:
            self._texts[-1] += rest
        return self._take(len(self._texts))

    def _take(self, num_tokens: int) -> TokenPieces | None:
        """Return the first ``num_tokens`` of the tokens held back; None for 0."""
        if not num_tokens:
            return None
        columns = self._texts, self._tokens, self._tops
        pieces = TokenPieces(*(column[:num_tokens] for column in columns))  # type: ignore[arg-type]
        for column in columns:
            del column[:num_tokens]
        self._run = [(index - num_tokens, completes) for index, completes in self._run]
        return pieces

    def _add(self, token_id: int) -> None:
        before = self._window
        self._window, text = before.extended((token_id,))
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

    def _scored(self, token_id: int, logprob: float | None) -> ScoredToken:
        tokenizer = self._window.tokenizer
        logprob = None if logprob is None else max(logprob, LEAST_LOGPROB)
        return ScoredToken(tokenizer.name_of(token_id), tokenizer.bytes_of(token_id), logprob)


def pieces_of(start: TextWindow, *parts: Scored) -> TokenPieces:
    """Return the tokens of a whole text, which begins at ``start``, given in parts."""
    texts = TokenTexts(start)
    pieces = [*(texts.push(*part) for part in parts), texts.finish()]
    found = [each for each in pieces if each is not None]
    return TokenPieces(
        [text for each in found for text in each.texts],
        [token for each in found for token in each.tokens],
        [top for each in found for top in each.tops],
    )
