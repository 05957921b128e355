"""The text that each token of a sequence adds."""

from __future__ import annotations

from collections.abc import Sequence

from dsbd_ort.openai_server.answer_shape import TokenPieces
from dsbd_runtime.stream_decoder import TextWindow
from dsbd_runtime.tokenizer import Tokenizer


class TokenTexts:
    """Texts of a growing sequence's tokens; together they are its text.

    A character of several tokens belongs to the one that completes it, the others add nothing.
    Tokens wait until their text is certain (see ``stream_decoder``).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window = TextWindow()
        self._texts: list[str] = []
        self._logprobs: list[float] = []
        self._run: list[tuple[int, bool]] = []

    def push(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> TokenPieces | None:
        """Take the next tokens; return those whose text is certain now, None without any."""
        num_certain = 0
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            self._add(token_id, logprob)
            if self._window.is_certain:
                num_certain = len(self._texts)
        return self._taken(num_certain)

    def finish(self) -> TokenPieces | None:
        """Return the tokens that waited, the last with the rest of the text; None without any."""
        rest = self._window.rest(self._tokenizer)
        rest = self._of_run(rest, is_text=not self._window.unfinished)
        if rest:
            self._texts[-1] += rest
        self._window = TextWindow()
        return self._taken(len(self._texts))

    def _taken(self, num_tokens: int) -> TokenPieces | None:
        """Return the first of the tokens that waited; None where it is none."""
        if not num_tokens:
            return None
        pieces = TokenPieces(self._texts[:num_tokens], self._logprobs[:num_tokens])
        self._texts, self._logprobs = self._texts[num_tokens:], self._logprobs[num_tokens:]
        self._run = [(index - num_tokens, completes) for index, completes in self._run]
        return pieces

    def _add(self, token_id: int, logprob: float) -> None:
        before = self._window
        self._window, text = before.extended(self._tokenizer, (token_id,))
        if len(self._window.run) > len(before.run):
            self._run.append((len(self._texts), not self._window.unfinished))
        elif before.run and not self._window.run:
            is_text = not (before.unfinished or self._window.invalid)
            text = self._of_run(text, is_text=is_text)
        self._texts.append(text)
        self._logprobs.append(logprob)

    def _of_run(self, text: str, *, is_text: bool) -> str:
        """Give the byte tokens of a run that ended their characters of ``text``; return the rest.

        ``is_text``: whether the run was UTF-8; else each of its bytes is one character.
        """
        begin = 0
        for index, completes_character in self._run:
            end = begin + int(completes_character or not is_text)
            self._texts[index] += text[begin:end]
            begin = end
        self._run = []
        return text[begin:]
