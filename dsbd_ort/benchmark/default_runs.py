"""The runs of a list of strategies under common settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsbd_ort.benchmark.bench_run import BenchRun
from dsbd_ort.benchmark.errors import BenchmarkError
from dsbd_ort.decoding import STRATEGIES
from dsbd_ort.decoding.strategies import Strategy

DEFAULT_STRATEGIES = (
    "sample",
    "speculative",
    "beam-sample",
    "dsbd",
    "beam-search",
    "speculative-beam-search",
)


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """Options for every run whose strategy has them and that does not name its own.

    Attributes:
        num_beams: widths; a strategy with beams runs once for each.
        draft_length, draft_beams: None leaves them to DecodingConfig.
        top_k: of strategies that sample.
        max_new_tokens: of all.
    """

    num_beams: Sequence[int] = (2, 4)
    draft_length: int | None = None
    draft_beams: int | Sequence[int] | None = None
    top_k: int = 20
    max_new_tokens: int = 64

    def options_of(self, strategy: str) -> dict[str, Any]:
        """Return what applies to a strategy, the width left out."""
        row = _row(strategy)
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens}
        if row.rule == "sample":
            options["top_k"] = self.top_k
        if row.has_draft and self.draft_length is not None:
            options["draft_length"] = self.draft_length
        if row.has_draft_tree and self.draft_beams is not None:
            options["draft_beams"] = self.draft_beams
        if row.rule in ("joint", "joint-greedy"):
            options["temperature"] = 0.0
        return options


def runs_of(strategies: Sequence[str], common: CommonSettings) -> list[BenchRun]:
    """Return a run for every strategy and width; dsbd with both of its width policies."""
    runs = []
    for strategy in strategies:
        row = _row(strategy)
        options = {"strategy": strategy, **common.options_of(strategy)}
        policies = ("fixed", "threshold") if strategy == "dsbd" else (None,)
        for width in common.num_beams if row.has_beams else (None,):
            for policy in policies:
                of_run = {"num_beams": width, "width_policy": policy}
                given = {name: value for name, value in of_run.items() if value is not None}
                runs.append(BenchRun(options={**options, **given}))
    return runs


def _row(strategy: str) -> Strategy:
    if strategy not in STRATEGIES:
        raise BenchmarkError(f"strategy is {strategy!r}; expected one of {', '.join(STRATEGIES)}")
    return STRATEGIES[strategy]
