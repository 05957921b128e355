"""Table of strategies: every decoder is the same loop with another row (docs/algorithm.md 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Strategy:
    """What a decoder differs in from the others.

    Attributes:
        rule: how layers are selected; a key of ``rules``.
        has_draft: whether a draft model proposes a forest.
        has_beams: whether ``num_beams`` may exceed 1.
        has_draft_tree: whether ``draft_beams`` may exceed 1.
    """

    rule: Literal["sample", "search", "joint", "joint-greedy"]
    has_draft: bool
    has_beams: bool
    has_draft_tree: bool


STRATEGIES = {
    "dsbd": Strategy("sample", has_draft=True, has_beams=True, has_draft_tree=True),
    "beam-sample": Strategy("sample", has_draft=False, has_beams=True, has_draft_tree=False),
    "speculative": Strategy("sample", has_draft=True, has_beams=False, has_draft_tree=False),
    "tree-speculative": Strategy("sample", has_draft=True, has_beams=False, has_draft_tree=True),
    "sample": Strategy("sample", has_draft=False, has_beams=False, has_draft_tree=False),
    "speculative-beam-search": Strategy(
        "search", has_draft=True, has_beams=True, has_draft_tree=True
    ),
    "beam-search": Strategy("search", has_draft=False, has_beams=True, has_draft_tree=False),
    "greedy": Strategy("search", has_draft=False, has_beams=False, has_draft_tree=False),
    "mjsd": Strategy("joint", has_draft=True, has_beams=False, has_draft_tree=True),
    "mjgd": Strategy("joint-greedy", has_draft=False, has_beams=False, has_draft_tree=False),
}
