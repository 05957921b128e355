"""Streaming decoder: the text of a growing token sequence in pieces that later tokens keep.

The pieces together are ``Tokenizer.decode`` of all tokens, whatever the tokens are and however
they are grouped. A piece is text that no later token can change, which depends on how the
tokenizer joins tokens (see ``tokenizer.TextJoints``):

* Byte-level tokenizers (GPT-2, Llama 3, Qwen): all text but a U+FFFD at its end, which may be a
  character that is not finished.
* Byte-fallback tokenizers (Llama 2, Mistral, Gemma): a run of byte tokens is held back until it
  ends, since one invalid byte turns all of it, whole characters as well, into one U+FFFD a byte.
  Once the run can never become UTF-8 again, each of its bytes is given at once.
* All others that work token by token (WordPiece, Metaspace, a suffix at the end of words): all.
* A decoder that looks for text across tokens: nothing before the end.

Each token is decoded at most a constant number of times, however long the text, the run of bytes
or the invalid bytes; only in the last case above a search for stop strings decodes all of it again.

``tokenizers.decoders.DecodeStream`` is not used: it raises an exception when a run of byte tokens
that began valid becomes invalid, decodes all held tokens again with every token, and has no end.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsbd_runtime.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_MOST_BYTES = 4  # of a UTF-8 character
# Tokens that later text can depend on. The bytes of an unfinished character are in three of them
# at most, and one of four has text that no Strip removes (tokenizer.MOST_STRIPPED).
_NUM_CONTEXT = 4
_MOST_TOKENS = 2 * _NUM_CONTEXT


@dataclass(frozen=True)
class TextWindow:
    """The end of a token sequence: all of it that further text depends on.

    Immutable, so that paths with a common beginning can share it.

    Attributes:
        tokens: the last tokens before ``run``.
        num_given: how many characters of the text of ``tokens`` were returned.
        num_held: how many after those were not: they can still change.
        run: byte tokens at the end that are UTF-8 so far; none of their text was returned.
        unfinished: the last bytes of ``run``, where they begin a character.
        invalid: the bytes that made the run at the end of ``tokens`` invalid; empty without one.
    """

    tokens: tuple[int, ...] = ()
    num_given: int = 0
    num_held: int = 0
    run: tuple[int, ...] = ()
    unfinished: bytes = b""
    invalid: tuple[int, ...] = ()

    @property
    def is_certain(self) -> bool:
        """Whether all text was returned."""
        return not self.run and not self.num_held

    def extended(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> tuple[TextWindow, str]:
        """Take the next tokens; return the text that is certain now and was not returned yet."""
        window = self
        for token_id in map(int, token_ids):
            if tokenizer.adds_text(token_id):
                window = window._with_token(token_id, tokenizer.byte_of(token_id))
        if len(window.tokens) == len(self.tokens):
            return window, ""
        return window._with_text_given(tokenizer)

    def rest(self, tokenizer: Tokenizer) -> str:
        """Return the text that is not certain yet, an unfinished character as U+FFFD."""
        if self.is_certain:
            return ""
        return tokenizer.decode((*self.tokens, *self.run))[self.num_given :]

    def end_of_rest(self, tokenizer: Tokenizer, num_characters: int) -> str:
        """Return the last of the uncertain text, at least ``num_characters`` where it has them.

        Unlike ``rest``, the work does not grow with the run. A character that is not finished,
        and all of a run that ends in one, is left out.
        """
        if not tokenizer.joints.is_local:
            return self.rest(tokenizer)
        if not self.run or self.unfinished:
            return ""
        start = max(len(self.run) - _MOST_BYTES * num_characters, 0)
        while _continues_character(tokenizer.byte_of(self.run[start])):
            start += 1
        return tokenizer.decode((*self.tokens, *self.run[start:]))[self.num_given :]

    def _with_token(self, token_id: int, byte: int | None) -> TextWindow:
        """Add a token; ``byte`` is that of a byte token."""
        if byte is None:
            return TextWindow((*self.tokens, *self.run, token_id), self.num_given, self.num_held)
        if self.invalid:
            return replace(self, tokens=(*self.tokens, token_id))
        run, character = (*self.run, token_id), self.unfinished + bytes([byte])
        try:
            _, num_finished = codecs.utf_8_decode(character, "strict", False)
        except UnicodeDecodeError:
            return TextWindow(
                (*self.tokens, *run),
                self.num_given,
                self.num_held,
                invalid=run[-len(character) :],
            )
        return replace(self, run=run, unfinished=character[num_finished:])

    def _with_text_given(self, tokenizer: Tokenizer) -> tuple[TextWindow, str]:
        """Return the certain text of ``tokens``; keep those that later text depends on."""
        if not tokenizer.joints.is_local:
            return replace(self, num_held=1), ""
        text = tokenizer.decode(self.tokens)
        num_held = int(tokenizer.joints.joins_bytes and text.endswith(REPLACEMENT))
        num_given = max(len(text) - num_held, self.num_given)
        piece = text[self.num_given : num_given]
        tokens = self.tokens
        if len(tokens) > _MOST_TOKENS:
            tokens = self.invalid or tokens[-_NUM_CONTEXT:]
            num_given = len(tokenizer.decode(tokens)) - num_held
        return replace(self, tokens=tokens, num_given=num_given, num_held=num_held), piece


class StreamDecoder:
    """Incremental decoder of tokens; the module says which text is certain."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window = TextWindow()

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that is certain now and was not returned yet."""
        self._window, piece = self._window.extended(self._tokenizer, token_ids)
        return piece

    def finish(self) -> str:
        """Return the rest, an unfinished character as U+FFFD, and reset."""
        rest = self._window.rest(self._tokenizer)
        self._window = TextWindow()
        return rest


def _continues_character(byte: int | None) -> bool:
    return byte is not None and 0x80 <= byte < 0xC0
