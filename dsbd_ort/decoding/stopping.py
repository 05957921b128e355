"""The seam for stop strings: what ends a sequence without being an end-of-sequence token."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Protocol


class StopState(Protocol):
    """What the new tokens of one path say about its end.

    Immutable: every node of the forest has its own, made from its parent's. A path that has ended
    is absorbing, as one whose last token ends the sequence.
    """

    @property
    def has_ended(self) -> bool:
        """Whether the path has ended, with its last token or before."""

    def extended(self, token: int) -> StopState:
        """Return the state of the path with one more token."""


def state_after(start: StopState, token_ids: Iterable[int]) -> StopState:
    """Return the state of the path of ``token_ids``."""
    return reduce(lambda state, token: state.extended(token), token_ids, start)
