"""What an engine's cache still holds of the last request: the longest common prefix is reused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class CachedPrefix:
    """The tokens whose rows an engine's cache begins with; kept from request to request.

    True at any time between two requests, also after one that was given up half-way: the rows of
    a prompt stay where they are while the forest behind them changes.
    """

    tokens: list[int] = field(default_factory=list)

    def num_common(self, token_ids: Sequence[int]) -> int:
        """Return how many first tokens of ``token_ids`` the cache holds."""
        num_common = 0
        for ours, theirs in zip(self.tokens, token_ids, strict=False):
            if ours != theirs:
                break
            num_common += 1
        return num_common
