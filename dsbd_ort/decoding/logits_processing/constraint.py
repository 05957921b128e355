"""Constraints: which tokens may follow a path (docs/algorithm.md 3.8).

Tries, grammars and a user's own constraints implement this seam (``dsbd_ort.constraints``). A
constraint is immutable and may serve many requests at once. Each node of the forest has a *state*,
made from its parent's; states of many nodes are one array: integers, or objects (dtype object).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

States = NDArray[Any]
"""(n,) states of a constraint, of one dtype of its choice."""


@dataclass(frozen=True, slots=True)
class TokenLists:
    """Allowed tokens as compressed rows, for constraints that allow few tokens.

    The sets {5, 7}, {} and {9} are the tokens [5, 7, 9] with the counts [2, 0, 1].

    Attributes:
        tokens: (num_tokens,) int64. Row by row, increasing within a row.
        counts: (n,) int64. Tokens of every row.
    """

    tokens: NDArray[np.int64]
    counts: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Allowed tokens as bits, for constraints that may allow most of the vocabulary.

    Attributes:
        bits: (n, ceil(vocab_size / 32)) int32. Bit t % 32 of word t // 32 says whether token t is
            allowed; those beyond the vocabulary are 0.
    """

    bits: NDArray[np.int32]


AllowedTokens = TokenLists | TokenMasks


class Constraint(Protocol):
    """Says which tokens may follow a path, and where a path may end.

    A path that accepts may be followed by an end-of-sequence token: the decoder allows these
    itself, exactly there, so a constraint never lists them. A path that has ended accepts, and
    nothing may follow, not even such a token.

    Optional: a method ``ends_next(states)``: whether every listed token ends the path, (n,) bool:
    below such a path nothing is drafted; and an attribute ``most_tokens``, of its longest path,
    with the end-of-sequence token that has to follow.
    """

    @property
    def name(self) -> str:
        """A short description for messages, such as "the regex '[0-9]+'"."""

    def start(self, prompt_ids: Sequence[int]) -> States:
        """Return the state of the empty continuation of a prompt, (1,)."""

    def advance(self, states: States, tokens: NDArray[np.int64]) -> States:
        """Return the states of these paths with one more allowed token each, (n,).

        Args:
            states: (n,). Not changed.
            tokens: (n,) int64. Never an end-of-sequence token that the constraint does not list.
        """

    def allowed(self, states: States) -> AllowedTokens:
        """Return the tokens that may follow each of these paths, n rows; none of an ended one."""

    def accepts(self, states: States) -> NDArray[np.bool_]:
        """Return which paths are complete, so that the sequence may end there: (n,) bool."""

    def has_ended(self, states: States) -> NDArray[np.bool_]:
        """Return which paths end as they are, without an end-of-sequence token: (n,) bool."""
