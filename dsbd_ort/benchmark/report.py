"""Summary of a benchmark's measurements, and the JSON report of ``dsbd-bench --json``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from dsbd_ort.benchmark.bench_run import NO_BASELINE, BenchRun, Measurement
from dsbd_ort.benchmark.bootstrap import Estimate, Spread, bootstrap, spread
from dsbd_ort.benchmark.machine import Machine
from dsbd_ort.decoding import STRATEGIES
from dsbd_runtime.bundle_files.manifest import ModelEntry, quantize_option

SCHEMA_VERSION = 1

FEWEST_PAIRS = 5
"""With fewer pairs the bootstrap interval of a median is too narrow, so it is not shown."""


def precision_name(engine: ModelEntry | EngineInfo) -> str:
    """Return an engine's precision as the options name it, such as fp32 or int8-blocks."""
    quantized = quantize_option(engine.quantization)
    return engine.dtype if quantized == "none" else quantized


@dataclass(frozen=True, kw_only=True)
class TimeSplit:
    """Seconds per new token of the best sequence, over all requests, including the prompts."""

    draft: float
    target: float
    host: float


class Verdict(Enum):
    """Whether the draft of a run pays, compared with the same distribution without a draft."""

    PAYS = "pays"
    LOSES = "loses"
    UNDECIDED = "no difference shown"
    NOT_DRAFTED = "not drafted"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run against its baseline, pair by pair (same prompt, repetition and seed)."""

    baseline: str
    speedup: Estimate  # median ratio of tokens per second
    logprob_difference: Estimate  # mean log-probability per token, minus the baseline's
    num_pairs: int
    num_identical: int  # pairs with identical tokens
    is_identical: bool

    @property
    def has_interval(self) -> bool:
        return self.num_pairs >= FEWEST_PAIRS


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run."""

    name: str
    settings: dict[str, Any]  # the resolved DecodingConfig; its seed is not the used one
    tokens_per_s: Spread
    time_to_first_token_s: Spread
    logprob_per_token: float  # mean over requests, of the best sequence under the target
    seconds_per_token: TimeSplit
    host_us_per_iteration: float  # microseconds outside engine calls
    mean_acceptance_length: float  # layers committed per iteration, over all iterations
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]  # [j] iterations that accepted j layers
    mean_beam_width: float  # beams kept per committed layer
    # target_rows_per_iteration, draft_rows_per_iteration: rows computed, without those of the
    # prompt (its last row, the root of the first forest, is included)
    target_rows_per_iteration: float
    draft_rows_per_iteration: float
    kv_bytes_peak: int | None
    energy_joules_per_token: float | None
    comparison: Comparison | None  # None for a baseline

    @property
    def drafted_nothing(self) -> bool:
        """Whether a strategy that can draft never drafted: its speed is then the baseline's."""
        has_draft = STRATEGIES[self.settings["strategy"]].has_draft
        return has_draft and self.draft_acceptance_rate is None

    @property
    def verdict(self) -> Verdict | None:
        """Whether the draft pays; None for a run without a draft or without a baseline."""
        if self.comparison is None or not STRATEGIES[self.settings["strategy"]].has_draft:
            return None
        if self.drafted_nothing:
            return Verdict.NOT_DRAFTED
        speedup = self.comparison.speedup
        if not self.comparison.has_interval or speedup.low <= 1.0 <= speedup.high:
            return Verdict.UNDECIDED
        return Verdict.PAYS if speedup.low > 1.0 else Verdict.LOSES


def summarize(runs: Sequence[BenchRun], measurements: Sequence[Measurement]) -> list[RunSummary]:
    """Return a summary per run, in the order of the runs."""
    by_run = {run.name: [m for m in measurements if m.run == run.name] for run in runs}
    summaries = []
    for run in runs:
        comparison = None
        if run.baseline not in (None, NO_BASELINE):
            comparison = compare(by_run[run.name], by_run[run.baseline])
        summaries.append(_summarize_run(run, by_run[run.name], comparison))
    return summaries


def compare(measurements: Sequence[Measurement], baseline: Sequence[Measurement]) -> Comparison:
    """Compare two runs pair by pair."""
    by_pair = {(m.prompt_index, m.repetition): m for m in baseline}
    pairs = [(m, by_pair[m.prompt_index, m.repetition]) for m in measurements]
    num_identical = sum(a.token_ids == b.token_ids for a, b in pairs)
    return Comparison(
        baseline=baseline[0].run,
        speedup=bootstrap([a.tokens_per_s / b.tokens_per_s for a, b in pairs], "median"),
        logprob_difference=bootstrap(
            [a.logprob_per_token - b.logprob_per_token for a, b in pairs], "mean"
        ),
        num_pairs=len(pairs),
        num_identical=num_identical,
        is_identical=num_identical == len(pairs),
    )


def _summarize_run(
    run: BenchRun, measurements: Sequence[Measurement], comparison: Comparison | None
) -> RunSummary:
    stats = [m.stats for m in measurements]
    num_tokens = sum(len(m.token_ids) for m in measurements)
    num_iterations = sum(s.num_iterations for s in stats)
    num_drafted = sum(s.num_draft_tokens for s in stats)
    num_accepted = sum(s.num_accepted_tokens for s in stats)
    layers = [s.num_iterations + s.num_accepted_layers for s in stats]
    num_prompt_rows = sum(s.num_prompt_tokens - 1 for s in stats)  # the last row is a node
    draft_rows = sum(s.draft_rows for s in stats)
    kv_bytes = [s.kv_bytes_peak for s in stats if s.kv_bytes_peak is not None]
    joules = [m.energy_joules for m in measurements if m.energy_joules is not None]
    host_s = sum(s.host_s for s in stats)
    return RunSummary(
        name=run.name,
        settings=dataclasses.asdict(run.config),
        tokens_per_s=spread([m.tokens_per_s for m in measurements]),
        time_to_first_token_s=spread([s.time_to_first_token_s for s in stats]),
        logprob_per_token=float(np.mean([m.logprob_per_token for m in measurements])),
        seconds_per_token=TimeSplit(
            draft=sum(s.draft_s for s in stats) / num_tokens,
            target=sum(s.target_s for s in stats) / num_tokens,
            host=host_s / num_tokens,
        ),
        host_us_per_iteration=1e6 * host_s / num_iterations,
        mean_acceptance_length=sum(layers) / num_iterations,
        draft_acceptance_rate=num_accepted / num_drafted if num_drafted else None,
        acceptance_histogram=_summed([s.acceptance_histogram for s in stats]),
        mean_beam_width=float(np.average([s.mean_beam_width for s in stats], weights=layers)),
        target_rows_per_iteration=(sum(s.target_rows for s in stats) - num_prompt_rows)
        / num_iterations,
        draft_rows_per_iteration=(draft_rows - num_prompt_rows) / num_iterations
        if draft_rows
        else 0.0,
        kv_bytes_peak=max(kv_bytes) if kv_bytes else None,
        energy_joules_per_token=sum(joules) / num_tokens if joules else None,
        comparison=comparison,
    )


def _summed(histograms: Sequence[Sequence[int]]) -> list[int]:
    total = np.zeros(max(map(len, histograms)), dtype=np.int64)
    for histogram in histograms:
        total[: len(histogram)] += histogram
    return [int(count) for count in total]


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """An engine of the bundle, from its manifest: family, precision and context."""

    family: str
    dtype: str
    quantization: str
    logits: str
    context_length: int


@dataclass(frozen=True, kw_only=True)
class BundleInfo:
    """The bundle."""

    path: str
    manifest_sha256: str  # hash of dsbd.json, which has the hashes of all other files
    target: EngineInfo
    draft: EngineInfo | None  # None in a bundle without a draft


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """The JSON report; docs/performance.md describes it."""

    schema_version: int  # raised when a field is removed or changes its meaning
    created: str  # when the benchmark began, ISO 8601, UTC
    bundle: BundleInfo
    machine: Machine
    versions: dict[str, str]
    provider: str
    draft_provider: str
    threads: int | None  # threads of both engines; None: ONNX Runtime's choice
    cuda_graphs: bool  # whether calls were captured once and replayed
    energy_counters: list[str]  # sources of ``energy_joules``, which is null without counters
    repetitions: int
    seed: int
    prompts: list[str]  # ``prompt_index`` of a measurement is an index into this list
    runs: list[RunSummary]
    measurements: list[Measurement]  # in the order they were made
