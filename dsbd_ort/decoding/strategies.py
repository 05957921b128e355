"""Table of strategies: every decoder is the same loop with another row (docs/algorithm.md 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Strategy:
    """What a decoder differs in from the others.

    Attributes:
        rule: how layers are selected; ``set_up`` makes one of each.
        has_draft: whether a draft model proposes a forest.
        has_beams: whether ``num_beams`` may exceed 1.
        has_draft_tree: whether ``draft_beams`` may exceed 1.
        at_zero: the strategy of a request that has temperature 0 and names no strategy, where
            this one is the default: as many beams, nothing drawn. None: this one, which takes it.
    """

    rule: Literal["sample", "search", "joint", "joint-greedy"]
    has_draft: bool
    has_beams: bool
    has_draft_tree: bool
    at_zero: str | None = None


STRATEGIES = {
    "dsbd": Strategy(
        "sample",
        has_draft=True,
        has_beams=True,
        has_draft_tree=True,
        at_zero="speculative-beam-search",
    ),
    "beam-sample": Strategy(
        "sample", has_draft=False, has_beams=True, has_draft_tree=False, at_zero="beam-search"
    ),
    "speculative": Strategy(
        "sample",
        has_draft=True,
        has_beams=False,
        has_draft_tree=False,
        at_zero="speculative-beam-search",
    ),
    "tree-speculative": Strategy(
        "sample",
        has_draft=True,
        has_beams=False,
        has_draft_tree=True,
        at_zero="speculative-beam-search",
    ),
    "sample": Strategy(
        "sample", has_draft=False, has_beams=False, has_draft_tree=False, at_zero="greedy"
    ),
    "speculative-beam-search": Strategy(
        "search", has_draft=True, has_beams=True, has_draft_tree=True
    ),
    "beam-search": Strategy("search", has_draft=False, has_beams=True, has_draft_tree=False),
    "greedy": Strategy("search", has_draft=False, has_beams=False, has_draft_tree=False),
    "mjsd": Strategy("joint", has_draft=True, has_beams=False, has_draft_tree=True),
    "mjgd": Strategy("joint-greedy", has_draft=False, has_beams=False, has_draft_tree=False),
}


def unnamed_strategy(default: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return strategy and num_beams of a request that names no strategy; the rest is as it was.

    default: the strategy where temperature is not 0; with 0 its ``at_zero``, of the same width.
    """
    row = STRATEGIES[default]
    if row.at_zero is None or options.get("temperature") != 0:
        return {**options, "strategy": default}
    width = {} if row.has_beams or not STRATEGIES[row.at_zero].has_beams else {"num_beams": 1}
    return {**width, **options, "strategy": row.at_zero}
