"""Grammars in the tokenizer's own spelling: no text in tokens that it would not write it in.

A grammar allows every spelling of its texts. Where a model has begun a word in a short token, as
``t``, the rest, ``rue``, is all that may follow, though the tokenizer writes ``true`` as one token:
more tokens, and a text that the model has hardly ever seen spelled so.

Of the tokens that may follow, those are left that the tokenizer writes behind the last one, and
behind which it writes one of the tokens that may come next. Two tokens are looked at, not the whole
text, and only where few tokens may follow: in keys, enumerations, numbers and punctuation, not
inside of free strings. Where none is left all stay, so that a text can always be ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.constraints.position import object_states
from dsbd_ort.decoding.logits_processing.constraint import Constraint, States, TokenMasks

_FEW = 64  # tokens that may follow, where spellings are looked at
_MOST_PAIRS = 1 << 16  # that a tokenizer remembers
_NO_TOKEN = -1


class ByteTokenizer(Protocol):
    """What a spelling needs of a tokenizer."""

    def decode_bytes(self, tokens: list[int]) -> bytes:
        """Return what tokens stand for."""

    def tokenize_bytes(self, text: bytes) -> list[int]:
        """Return the tokens that it writes a text in."""


class Spelling:
    """Whether a tokenizer writes two tokens one behind the other. Safe to use from threads."""

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        """Take a tokenizer."""

        @lru_cache(_MOST_PAIRS)
        def writes(first: int, second: int) -> bool:
            text = tokenizer.decode_bytes([first, second])
            try:
                text.decode()
            except UnicodeDecodeError:
                return True  # a part of a character says nothing
            return tokenizer.tokenize_bytes(text) == [first, second]

        self._writes = writes

    def behind(self, first: int, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of some tokens that the tokenizer writes behind ``first``."""
        if first == _NO_TOKEN:
            return tokens
        return tokens[[self._writes(first, token) for token in tokens.tolist()]]


class MaskedConstraint(Constraint, Protocol):
    """A constraint that says by bits what may follow, as grammars do."""

    def allowed(self, states: States) -> TokenMasks:
        """See Constraint."""


@dataclass(slots=True, eq=False)
class _State:
    """State of a path: the grammar's state, and the last token; its mask once it is needed."""

    of_grammar: object
    token: int
    bits: NDArray[np.int32] | None = None


class CanonicalConstraint:
    """A constraint to the texts of a grammar in the tokenizer's own spelling."""

    def __init__(self, grammar: MaskedConstraint, spelling: Spelling) -> None:
        """Take the constraint to the grammar."""
        self._grammar = grammar
        self._spelling = spelling

    @property
    def name(self) -> str:
        """What errors call the grammar."""
        return self._grammar.name

    def start(self, prompt_ids: Sequence[int]) -> States:
        """Return the beginning of a text, (1,) objects."""
        (state,) = self._grammar.start(prompt_ids)
        return object_states([_State(state, _NO_TOKEN)])

    def advance(self, states: States, tokens: NDArray[np.int64]) -> States:
        """Return the states of these paths with one more token each, (n,) objects."""
        advanced = self._grammar.advance(_of_grammar(states), tokens)
        pairs = zip(advanced, tokens.tolist(), strict=True)
        return object_states([_State(state, token) for state, token in pairs])

    def allowed(self, states: States) -> TokenMasks:
        """Return what the grammar allows, without the spellings of others."""
        masks = self._grammar.allowed(_of_grammar(states)).bits
        for state, bits in zip(states, masks, strict=True):
            if state.bits is None:
                state.bits = self._canonical(state, bits)
            bits[:] = state.bits
        return TokenMasks(masks)

    def accepts(self, states: States) -> NDArray[np.bool_]:
        """Return where the text is whole."""
        return self._grammar.accepts(_of_grammar(states))

    def has_ended(self, states: States) -> NDArray[np.bool_]:
        """Return where the text is whole and nothing may follow."""
        return self._grammar.has_ended(_of_grammar(states))

    def _canonical(self, state: _State, bits: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the mask, (words,) int32, of those tokens of a mask that are spelled right."""
        tokens = _tokens_of(bits)
        if not 1 < len(tokens) <= _FEW:
            return bits.copy()
        kept = self._spelling.behind(state.token, tokens)
        if not len(kept):
            return bits.copy()
        goes_on = self._goes_on(state, kept)
        return _bits_of(kept[goes_on] if goes_on.any() else kept, len(bits))

    def _goes_on(self, state: _State, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return behind which tokens the text may end, or go on as the tokenizer writes it."""
        behind = object_states([state.of_grammar] * len(tokens))
        states = self._grammar.advance(behind, tokens)
        found = self._grammar.accepts(states)
        for place, bits in enumerate(self._grammar.allowed(states).bits):
            following = _tokens_of(bits)
            is_free = len(following) > _FEW
            found[place] |= is_free or len(self._spelling.behind(int(tokens[place]), following)) > 0
        return found


def _of_grammar(states: States) -> States:
    return object_states([state.of_grammar for state in states])


def _tokens_of(bits: NDArray[np.int32]) -> NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))


def _bits_of(tokens: NDArray[np.int64], num_words: int) -> NDArray[np.int32]:
    is_set = np.zeros(32 * num_words, dtype=np.bool_)
    is_set[tokens] = True
    return np.packbits(is_set, bitorder="little").view("<i4").astype(np.int32)
