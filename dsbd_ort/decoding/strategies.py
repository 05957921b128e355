"""Table of strategies: every decoder is the same loop with another row (docs/algorithm.md 3)."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Strategy:
    """The row of one strategy.

    Attributes:
        rule: how layers are selected; ``set_up`` makes one of each.
        has_draft: whether a draft model proposes a forest.
        has_beams: whether ``num_beams`` may exceed 1.
        has_draft_tree: whether ``draft_beams`` may exceed 1.
        at_zero: its counterpart at temperature 0: as many beams, nothing drawn. None: itself.
    """

    rule: Literal["sample", "search", "joint", "joint-greedy"]
    has_draft: bool = False
    has_beams: bool = False
    has_draft_tree: bool = False
    at_zero: str | None = None


_SEARCH = "speculative-beam-search"
STRATEGIES = {
    "dsbd": Strategy(
        "sample", has_draft=True, has_beams=True, has_draft_tree=True, at_zero=_SEARCH
    ),
    "beam-sample": Strategy("sample", has_beams=True, at_zero="beam-search"),
    "speculative": Strategy("sample", has_draft=True, at_zero=_SEARCH),
    "tree-speculative": Strategy("sample", has_draft=True, has_draft_tree=True, at_zero=_SEARCH),
    "sample": Strategy("sample", at_zero="greedy"),
    _SEARCH: Strategy("search", has_draft=True, has_beams=True, has_draft_tree=True),
    "beam-search": Strategy("search", has_beams=True),
    "greedy": Strategy("search"),
    "mjsd": Strategy("joint", has_draft=True, has_draft_tree=True),
    "mjgd": Strategy("joint-greedy"),
}


def named_strategy(default: str, *, is_cold: bool) -> str:
    """Return the strategy of a request that names none; ``is_cold``: its temperature is 0."""
    return (STRATEGIES[default].at_zero if is_cold else None) or default
