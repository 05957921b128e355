"""One setting under measurement, and the setting that it is compared with."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from dsbd_ort.benchmark.errors import BenchmarkError
from dsbd_ort.decoding import STRATEGIES, DecodingConfig

NO_BASELINE = "none"
BASELINES = {  # strategy: the one without a draft (or without joint tokens) of the same law
    "dsbd": "beam-sample",
    "speculative": "sample",
    "tree-speculative": "sample",
    "speculative-beam-search": "beam-search",
    "mjsd": "greedy",
    "mjgd": "greedy",
}
_DRAWING = ("temperature", "top_k", "top_p")
_SEARCHING = ("early_stopping",)
_DRAFTING = ("draft_length", "draft_beams", "draft_policy", "width_policy")
_SET_BY_BENCHMARK = ("seed", "eos_token_id")


@dataclass(frozen=True, kw_only=True)
class BenchRun:
    """A strategy and its options.

    Attributes:
        options: fields of DecodingConfig that were given, the strategy among them.
        given_name: what to call the run; None names it after its options.
        baseline: name of the run to compare with; None: the same law without a draft;
            ``NO_BASELINE``: nothing.
    """

    options: dict[str, Any] = field(hash=False)
    given_name: str | None = None
    baseline: str | None = None

    def __post_init__(self) -> None:
        for name in _SET_BY_BENCHMARK:
            if name in self.options:
                raise BenchmarkError(
                    f"{name} is set to {self.options[name]!r} in a run, but the benchmark sets "
                    "it, the same for all runs; leave it out"
                )
        _ = self.config  # refuses senseless options before anything is measured

    @property
    def config(self) -> DecodingConfig:
        """The resolved options."""
        return DecodingConfig.from_options(self.options)

    @property
    def name(self) -> str:
        """The given name, or one made of what sets runs apart: "dsbd W=4 fixed 4x4"."""
        if self.given_name is not None:
            return self.given_name
        config = self.config
        words = [config.strategy]
        if config.row.has_beams:
            words.append(f"W={config.width}")
        if config.strategy == "dsbd":
            words.append(config.width_policy or "")
        if config.row.has_draft:
            widths = sorted(set(config.layer_widths))
            shape = "/".join(map(str, config.layer_widths)) if len(widths) > 1 else widths[0]
            if config.draft_policy != "fixed":
                words.append(config.draft_policy)
            words.append(f"{config.draft_length}x{shape}")
        said = {"strategy", "num_beams", "max_new_tokens", "top_k", *_DRAFTING}
        words += [f"{key}={value}" for key, value in self.options.items() if key not in said]
        return " ".join(words)


def with_baselines(runs: list[BenchRun]) -> list[BenchRun]:
    """Return the runs with every baseline named, missing ones put before their first use.

    Raises:
        BenchmarkError: two runs of one name, or a baseline that is no run.
    """
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
    """Return the run of the same law that ``run`` is made to beat, None for a baseline."""
    strategy = BASELINES.get(run.config.strategy)
    if strategy is None:
        return None
    row = STRATEGIES[strategy]
    kept = ["max_new_tokens", "num_return_sequences", "length_penalty"]
    kept += _DRAWING if row.rule == "sample" else _SEARCHING
    kept += ["num_beams"] if row.has_beams else []
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
                f"run {run.name!r} has baseline {run.baseline!r}, which is no run; the runs are "
                f"{', '.join(counts)}"
            )
