"""Streaming decoder: the text of a growing token sequence in pieces that stay unchanged.

The text of a continuation is the text that its tokens add to the tokens before them: words are
joined by a space that is absent at the beginning of a text (``Strip``, ``Metaspace``,
``WordPiece``). So a decoder begins with the ``TextWindow`` after the prompt:

    decode(prompt + tokens) == whole_text(tokenizer, prompt) + text of the continuation

A character that the prompt begins belongs to the token that completes it: ``whole_text`` is
``decode`` without an incomplete character at its end.

The pieces together are that text, for any tokens in any grouping. A piece is text that no later
token can change, which depends on how the tokenizer joins tokens (see ``tokenizer.TextJoints``):

* Byte-level tokenizers (GPT-2, Llama 3, Qwen): all text except a U+FFFD at its end, which may be an
  incomplete character.
* Byte-fallback tokenizers (Llama 2, Mistral, Gemma): a run of byte tokens is held back until it
  ends, because one invalid byte turns all of it, including whole characters, into one U+FFFD per
  byte. Once the run cannot become UTF-8 anymore, each of its bytes is returned at once.
* All others that work token by token (WordPiece, Metaspace, a suffix at the end of words): all.
* A decoder that looks for text across tokens: nothing before the end.

Each token is decoded at most a constant number of times, for any length of the text or of a run of
bytes; only in the last case above a search for stop strings decodes all of it again.

``tokenizers.decoders.DecodeStream`` is not used: it raises an exception if a valid run of byte
tokens becomes invalid, decodes all held tokens again with every token, and cannot be finished.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dsbd_runtime.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_MOST_BYTES = 4  # in a UTF-8 character
# Tokens that later text can depend on. The bytes of an unfinished character are in at most three
# of them, and one of four has text that no Strip removes (tokenizer.MOST_STRIPPED).
_NUM_CONTEXT = 4
_MOST_TOKENS = 2 * _NUM_CONTEXT


@dataclass(frozen=True)
class TextWindow:
    """The end of a token sequence: all of it that further text depends on.

    Immutable, so that paths with a common beginning can share it. Without tokens it is the start of
    a text.

    tokens: the last tokens before ``run``.
    num_given: how many characters of the text of ``tokens`` were returned.
    num_held: how many characters after those were not returned, because they can still change.
    run: byte tokens at the end that are UTF-8 so far; none of their text was returned.
    unfinished: the last bytes of ``run`` if they are the beginning of a character.
    invalid: the bytes that made the run at the end of ``tokens`` invalid; empty without such a run.
    """

    tokenizer: Tokenizer = field(repr=False)
    tokens: tuple[int, ...] = ()
    num_given: int = 0
    num_held: int = 0
    run: tuple[int, ...] = ()
    unfinished: bytes = b""
    invalid: tuple[int, ...] = ()

    @classmethod
    def after(cls, tokenizer: Tokenizer, token_ids: Sequence[int]) -> TextWindow:
        """Return the window after a prompt, whose ``whole_text`` counts as returned."""
        window, _ = cls(tokenizer).extended(_end_of(tokenizer, token_ids))
        if window.run:
            return window._with_characters_of_run_given()
        text = tokenizer.decode(window.tokens)
        num_held = _num_unfinished(tokenizer, window.tokens, text)
        return replace(window, num_given=len(text) - num_held, num_held=num_held)

    @property
    def is_certain(self) -> bool:
        """Whether all text was returned."""
        return not self.run and not self.num_held

    @property
    def num_dropped_spaces(self) -> int:
        """Number of spaces dropped here: 0 except at the beginning of a text."""
        has_text = self.tokens or self.run
        return 0 if has_text else self.tokenizer.joints.num_dropped_spaces

    def text_of(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode((*self.tokens, *self.run, *token_ids))[self.num_given :]

    def extended(self, token_ids: Sequence[int]) -> tuple[TextWindow, str]:
        """Take the next tokens; return the text that is certain now and was not returned yet."""
        window, tokenizer = self, self.tokenizer
        for token_id in map(int, token_ids):
            if tokenizer.adds_text(token_id):
                window = window._with_token(token_id, tokenizer.byte_of(token_id))
        if len(window.tokens) == len(self.tokens):
            return window, ""
        return window._with_text_given()

    def rest(self) -> str:
        """Return the text that is not certain yet, an unfinished character as U+FFFD."""
        return "" if self.is_certain else self.text_of(())

    def end_of_rest(self, num_characters: int) -> str:
        """Return the end of the uncertain text, at least ``num_characters`` if it is that long.

        Unlike ``rest``, the work does not grow with the run. An incomplete character, and a whole
        run that ends in one, are left out.
        """
        if not self.tokenizer.joints.is_local:
            return self.rest()
        if not self.run or self.unfinished:
            return ""
        start = max(len(self.run) - _MOST_BYTES * num_characters, 0)
        while _continues_character(self.tokenizer.byte_of(self.run[start])):
            start += 1
        return self.tokenizer.decode((*self.tokens, *self.run[start:]))[self.num_given :]

    def _with_token(self, token_id: int, byte: int | None) -> TextWindow:
        """Add a token; ``byte`` is that of a byte token."""
        if byte is None:
            tokens = (*self.tokens, *self.run, token_id)
            return TextWindow(self.tokenizer, tokens, self.num_given, self.num_held)
        if self.invalid:
            return replace(self, tokens=(*self.tokens, token_id))
        run, character = (*self.run, token_id), self.unfinished + bytes([byte])
        try:
            _, num_finished = codecs.utf_8_decode(character, "strict", False)
        except UnicodeDecodeError:
            tokens, invalid = (*self.tokens, *run), run[-len(character) :]
            window = TextWindow(self.tokenizer, tokens, self.num_given, self.num_held)
            return replace(window, invalid=invalid)
        return replace(self, run=run, unfinished=character[num_finished:])

    def _with_text_given(self) -> tuple[TextWindow, str]:
        """Return the certain text of ``tokens``; keep those that later text depends on."""
        tokenizer, tokens = self.tokenizer, self.tokens
        if not tokenizer.joints.is_local:
            return replace(self, num_held=1), ""
        text = tokenizer.decode(tokens)
        num_held = int(tokenizer.joints.joins_bytes and text.endswith(REPLACEMENT))
        num_given = max(len(text) - num_held, self.num_given)
        piece = text[self.num_given : num_given]
        if len(tokens) > _MOST_TOKENS:
            tokens = self.invalid or tokens[-_NUM_CONTEXT:]
            num_given = len(tokenizer.decode(tokens)) - num_held
        return replace(self, tokens=tokens, num_given=num_given, num_held=num_held), piece

    def _with_characters_of_run_given(self) -> TextWindow:
        """Mark complete characters of ``run`` as returned: a letter replaces them."""
        num_finished = len(self.run) - len(self.unfinished)
        if not num_finished:
            return self
        letter = (self.tokenizer.letter,)
        num_given = len(self.tokenizer.decode(letter))
        return replace(self, tokens=letter, num_given=num_given, run=self.run[num_finished:])


def whole_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the text of tokens without an incomplete character at the end."""
    window = TextWindow.after(tokenizer, token_ids)
    end, num_unfinished = len(token_ids), len(window.run)
    while num_unfinished:
        end -= 1
        num_unfinished -= tokenizer.adds_text(int(token_ids[end]))
    text = tokenizer.decode(token_ids[:end])
    return text[: len(text) - window.num_held]


class StreamDecoder:
    """Incremental decoder of tokens; the module says which text is certain."""

    def __init__(self, start: TextWindow) -> None:
        """``start``: ``TextWindow.after`` a prompt, or ``TextWindow(tokenizer)``, a new text."""
        self._start = self._window = start

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that is certain now and was not returned yet."""
        self._window, piece = self._window.extended(token_ids)
        return piece

    def finish(self) -> str:
        """Return the rest, an unfinished character as U+FFFD, and begin again."""
        rest = self._window.rest()
        self._window = self._start
        return rest


def _end_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> Sequence[int]:
    """Return the last tokens, on which the text of further tokens depends."""
    if not tokenizer.joints.is_local:
        return token_ids
    reversed_tokens: list[int] = []
    num_before_run = 0
    for token_id in map(int, reversed(token_ids)):
        if not tokenizer.adds_text(token_id):
            continue
        reversed_tokens.append(token_id)
        if num_before_run or tokenizer.byte_of(token_id) is None:
            num_before_run += 1
        if num_before_run == _NUM_CONTEXT:
            break
    return reversed_tokens[::-1]


def _num_unfinished(tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> int:
    """Return how many characters at the end of a text belong to an incomplete character."""
    if not tokenizer.joints.is_local:  # which bytes they are is not known
        return len(text) - len(text.rstrip(REPLACEMENT))
    if not tokenizer.joints.joins_bytes:
        return 0
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(map(tokenizer.bytes_of, tokens)))
    begun, _ = decoder.getstate()
    return int(bool(begun))


def _continues_character(byte: int | None) -> bool:
    return byte is not None and 0x80 <= byte < 0xC0
