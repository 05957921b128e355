"""A constraint given by a function of the path, for tests: as lists or as bits."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.logits_processing.constraint import (
    AllowedTokens,
    States,
    TokenLists,
    TokenMasks,
)

Path = tuple[int, ...]


@dataclass(frozen=True)
class PathConstraint:
    """Allows after a path, prompt included, the tokens that ``allowed_after`` returns.

    An end-of-sequence id among them means that the path accepts. A path accepted by
    ``ends_after`` ends as it is.
    """

    vocab_size: int
    allowed_after: Callable[[Path], Collection[int]]
    eos: tuple[int, ...] = ()
    as_bits: bool = False
    ends_after: Callable[[Path], bool] = lambda path: False

    @property
    def name(self) -> str:
        return "the test's constraint"

    def start(self, prompt_ids: Sequence[int]) -> States:
        states = np.empty(1, dtype=object)
        states[0] = tuple(int(token) for token in prompt_ids)
        return states

    def advance(self, states: States, tokens: NDArray[np.int64]) -> States:
        advanced = np.empty(len(states), dtype=object)
        for index, (path, token) in enumerate(zip(states, tokens.tolist(), strict=True)):
            assert token in self.allowed_after(path), "advanced by a token that is not allowed"
            advanced[index] = (*path, token)
        return advanced

    def allowed(self, states: States) -> AllowedTokens:
        rows = [
            sorted(
                set(self.allowed_after(path)) - set(self.eos) if not self.ends_after(path) else ()
            )
            for path in states
        ]
        if not self.as_bits:
            tokens = np.array([token for row in rows for token in row], dtype=np.int64)
            return TokenLists(tokens, np.array([len(row) for row in rows], dtype=np.int64))
        bits = np.zeros((len(rows), -(-self.vocab_size // 32)), dtype=np.uint32)
        for index, row in enumerate(rows):
            for token in row:
                bits[index, token // 32] |= np.uint32(1 << token % 32)
        return TokenMasks(bits.view(np.int32))

    def accepts(self, states: States) -> NDArray[np.bool_]:
        return np.array(
            [
                self.ends_after(path) or bool(set(self.eos) & set(self.allowed_after(path)))
                for path in states
            ],
            dtype=np.bool_,
        )

    def has_ended(self, states: States) -> NDArray[np.bool_]:
        return np.array([self.ends_after(path) for path in states], dtype=np.bool_)

    def ends_next(self, states: States) -> NDArray[np.bool_]:
        rows = [set(self.allowed_after(path)) - set(self.eos) for path in states]
        return np.array(
            [
                all(self.ends_after((*path, token)) for token in row)
                for path, row in zip(states, rows, strict=True)
            ],
            dtype=np.bool_,
        )


def some_tokens(vocab_size: int, always: Collection[int] = ()) -> Callable[[Path], set[int]]:
    """Return an ``allowed_after`` that allows about half of the vocabulary, by path."""

    def allowed_after(path: Path) -> set[int]:
        rng = np.random.default_rng([len(path), *path])
        some = rng.choice(vocab_size, size=1 + vocab_size // 2, replace=False)
        return set(some.tolist()) | set(always)

    return allowed_after


def chains(vocab_size: int, always: Collection[int] = ()) -> Callable[[Path], set[int]]:
    """Return an ``allowed_after`` that allows one token after most paths, two after the others.

    Of ``always``, the end-of-sequence ids, all or none: a constraint accepts for all of them.
    """

    def allowed_after(path: Path) -> set[int]:
        rng = np.random.default_rng([1, len(path), *path])
        number = 2 if len(path) % 3 == 0 else 1
        some = set(rng.choice(vocab_size, size=min(number, vocab_size), replace=False).tolist())
        some -= set(always)
        return some if some and len(path) % 4 else some | set(always)

    return allowed_after
