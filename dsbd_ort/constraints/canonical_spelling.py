"""Grammars in the tokenizer's own spelling: tokens that the tokenizer itself would write.

A grammar allows every spelling of its texts. If a model begins ``true`` with the token ``t``, it
must go on with ``rue``, although the tokenizer has one token for the whole word. The result has
more tokens, in a spelling that the model has hardly ever seen.

This constraint keeps an allowed token if the tokenizer would write it after the last token, and
would write one of the tokens allowed next after it. It checks pairs of tokens, not the whole text,
and only if few tokens are allowed: in keys, enumerations, numbers and punctuation, not inside free
strings. If no token passes, all allowed tokens stay, so that a text can always be completed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.constraints.position import object_states
from dsbd_ort.decoding.logits_processing.constraint import Constraint, States, TokenMasks

if TYPE_CHECKING:
    import llguidance

_FEW = 64  # allowed tokens; with more, spellings are not checked
_MOST_PAIRS = 1 << 16  # size of the cache
_NO_TOKEN = -1

Spelling = Callable[[int, NDArray[np.int64]], NDArray[np.int64]]
"""Called with a token and candidates, (n,) int64: returns those that it writes after the token."""


def spelling_of(tokenizer: llguidance.LLTokenizer) -> Spelling:
    """Return a Spelling of a tokenizer. Safe to use from several threads."""

    @lru_cache(_MOST_PAIRS)
    def writes(first: int, second: int) -> bool:
        text = tokenizer.decode_bytes([first, second])
        try:
            text.decode()
        except UnicodeDecodeError:
            return True  # a part of a character cannot be checked
        return tokenizer.tokenize_bytes(text) == [first, second]

    def written_after(first: int, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        if first == _NO_TOKEN:
            return tokens
        return tokens[[writes(first, token) for token in tokens.tolist()]]

    return written_after


class MaskedConstraint(Constraint, Protocol):
    """A constraint that gives token masks, such as a grammar."""

    def allowed(self, states: States) -> TokenMasks:
        """See Constraint."""


@dataclass(slots=True, eq=False)
class _State:
    of_grammar: object
    token: int
    bits: NDArray[np.int32] | None = None


class CanonicalConstraint:
    """A constraint to the texts of a grammar in the tokenizer's own spelling."""

    def __init__(self, grammar: MaskedConstraint, spelling: Spelling) -> None:
        self._grammar = grammar
        self._spelling = spelling

    @property
    def name(self) -> str:
        return self._grammar.name

    def start(self, prompt_ids: Sequence[int]) -> States:
        (state,) = self._grammar.start(prompt_ids)
        return object_states([_State(state, _NO_TOKEN)])

    def advance(self, states: States, tokens: NDArray[np.int64]) -> States:
        advanced = self._grammar.advance(_of_grammar(states), tokens)
        pairs = zip(advanced, tokens.tolist(), strict=True)
        return object_states([_State(state, token) for state, token in pairs])

    def allowed(self, states: States) -> TokenMasks:
        masks = self._grammar.allowed(_of_grammar(states)).bits
        for state, bits in zip(states, masks, strict=True):
            if state.bits is None:
                state.bits = self._canonical(state, bits)
            bits[:] = state.bits
        return TokenMasks(masks)

    def accepts(self, states: States) -> NDArray[np.bool_]:
        return self._grammar.accepts(_of_grammar(states))

    def has_ended(self, states: States) -> NDArray[np.bool_]:
        return self._grammar.has_ended(_of_grammar(states))

    def _canonical(self, state: _State, bits: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return a mask, (words,) int32, of the tokens in ``bits`` that are spelled canonically."""
        tokens = _tokens_of(bits)
        if not 1 < len(tokens) <= _FEW:
            return bits.copy()
        kept = self._spelling(state.token, tokens)
        if not len(kept):
            return bits.copy()
        goes_on = self._goes_on(state, kept)
        return bits_of(kept[goes_on] if goes_on.any() else kept, len(bits))

    def _goes_on(self, state: _State, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for each token, (n,), if the text may end or go on canonically after it."""
        copies = object_states([state.of_grammar] * len(tokens))
        states = self._grammar.advance(copies, tokens)
        passes = self._grammar.accepts(states)
        for place, bits in enumerate(self._grammar.allowed(states).bits):
            following = _tokens_of(bits)
            is_free = len(following) > _FEW
            passes[place] |= is_free or len(self._spelling(int(tokens[place]), following)) > 0
        return passes


def _of_grammar(states: States) -> States:
    return object_states([state.of_grammar for state in states])


def _tokens_of(bits: NDArray[np.int32]) -> NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))


def bits_of(tokens: NDArray[np.int64], num_words: int) -> NDArray[np.int32]:
    """Return tokens as a mask, (num_words,) int32: token t is bit t % 32 of word t // 32."""
    is_set = np.zeros(32 * num_words, dtype=np.bool_)
    is_set[tokens] = True
    return np.packbits(is_set, bitorder="little").view("<i4").astype(np.int32)
