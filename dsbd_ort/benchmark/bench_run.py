"""Runs of a benchmark: a strategy with its options, its baseline, and the default list."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dsbd_ort.benchmark.prompts import BenchmarkError
from dsbd_ort.decoding import STRATEGIES, DecodingConfig
from dsbd_ort.decoding.strategies import Strategy

DEFAULT_STRATEGIES = (
    "sample",
    "speculative",
    "beam-sample",
    "dsbd",
    "beam-search",
    "speculative-beam-search",
)
NO_BASELINE = "none"
BASELINES = {  # strategy: the same distribution without a draft (or without joint tokens)
    "dsbd": "beam-sample",
    "speculative": "sample",
    "tree-speculative": "sample",
    "speculative-beam-search": "beam-search",
    "mjsd": "greedy",
    "mjgd": "greedy",
}
_DRAWING = ("temperature", "top_k", "top_p")
_DRAFTING = ("draft_length", "draft_beams", "draft_policy", "width_policy")
_SET_BY_BENCHMARK = ("seed", "eos_token_id")


@dataclass(frozen=True, kw_only=True)
class BenchRun:
    """A strategy and its options."""

    # given fields of DecodingConfig, the strategy among them
    options: dict[str, Any] = field(hash=False)
    given_name: str | None = None  # the name of the run; None names it after its options
    # name of the run to compare with; None: the same distribution without a draft; ``NO_BASELINE``:
    # nothing
    baseline: str | None = None
    has_draft: bool = True

    def __post_init__(self) -> None:
        for name in _SET_BY_BENCHMARK:
            if name in self.options:
                raise BenchmarkError(
                    f"{name} is set to {self.options[name]!r} in a run, but the benchmark sets "
                    "it, the same for all runs; leave it out"
                )
        _ = self.config  # refuses invalid options before anything is measured

    @property
    def config(self) -> DecodingConfig:
        """The resolved options."""
        config = DecodingConfig(**self.options)
        return config.settled(costs_are_known=True, has_draft=self.has_draft)

    @property
    def name(self) -> str:
        """The given name, or one made of the options that differ: "dsbd W=4 fixed 4x4"."""
        if self.given_name is not None:
            return self.given_name
        config = self.config
        words = [str(config.strategy)]
        if config.row.has_beams:
            words.append(f"W={config.num_beams}")
        if config.strategy == "dsbd":
            words.append(config.width_policy or "")
        if config.row.has_draft:
            widths = sorted(set(config.layer_widths))
            shape = "/".join(map(str, config.layer_widths)) if len(widths) > 1 else widths[0]
            if config.draft_policy == "throughput":
                words.append(config.draft_policy)
            words.append(f"{config.draft_length}x{shape}")
        shown = {"strategy", "num_beams", "max_new_tokens", "top_k", *_DRAFTING}
        words += [f"{key}={value}" for key, value in self.options.items() if key not in shown]
        return " ".join(words)


def with_baselines(runs: list[BenchRun]) -> list[BenchRun]:
    """Return the runs with all baselines, named; raise BenchmarkError for invalid names."""
    complete: list[BenchRun] = []
    for run in runs:
        implied = _implied_baseline(run) if run.baseline is None else None
        if implied is None:
            complete.append(run)
            continue
        known = [other for other in [*runs, *complete] if other.config == implied.config]
        if not known:
            complete.append(implied)
        name = (known or [implied])[0].name
        complete.append(dataclasses.replace(run, baseline=name))
    _check_names(complete)
    return complete


def _implied_baseline(run: BenchRun) -> BenchRun | None:
    """Return the undrafted run of the same distribution, None for a baseline."""
    strategy = BASELINES.get(str(run.config.strategy))
    if strategy is None:
        return None
    row = STRATEGIES[strategy]
    kept = ["max_new_tokens", "num_return_sequences", "length_penalty"]
    kept += _DRAWING if row.rule == "sample" else ()
    kept += ["num_beams", "early_stopping"] if row.has_beams else []
    kept += ["replacement"] if row.has_beams and row.rule == "sample" else []
    options = {name: run.options[name] for name in kept if name in run.options}
    return BenchRun(options={"strategy": strategy, **options})


def _check_names(runs: list[BenchRun]) -> None:
    counts = Counter(run.name for run in runs)
    name, count = counts.most_common(1)[0]
    if count > 1:
        raise BenchmarkError(
            f"{count} runs are called {name!r}; remove one, or tell them apart with name=..."
        )
    for run in runs:
        if run.baseline not in (None, NO_BASELINE, *counts):
            raise BenchmarkError(
                f"run {run.name!r} has baseline {run.baseline!r}, which is not a run; the runs are "
                f"{', '.join(counts)}"
            )


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """Options of every run whose strategy has them, unless the run sets its own."""

    num_beams: Sequence[int] = (2, 4)
    # draft_length, draft_beams: None leaves them to DecodingConfig
    draft_length: int | None = None
    draft_beams: int | Sequence[int] | None = None
    top_k: int = 20
    max_new_tokens: int = 64

    def options_of(self, strategy: str) -> dict[str, Any]:
        """Return the options that apply to a strategy, except the width."""
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
