"""Runs of a benchmark: strategies with options and baselines, prompts, timed requests."""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsbd_errors import DsbdError
from dsbd_errors.text_files import text_of
from dsbd_ort.benchmark.machine import EnergyMeter
from dsbd_ort.decoding import STRATEGIES, DecodingConfig, DecodingStats
from dsbd_ort.decoding.strategies import Strategy
from dsbd_ort.pipeline import Pipeline

# Each prompt ends at the end of a token. A cut inside a word or an indent would leave half a token,
# which the model never saw in training.
PROMPTS = (
    "def read_json(path):",
    "def find_files(root, pattern):",
    "class Connection:\n    def __init__(self, host, port):",
    "def merge_sorted(left, right):",
    "import os\nimport sys\n\ndef main(argv=None):",
    "def parse_header(line):",
    "async def fetch(self, url, timeout=None):",
    "def test_empty_string(self):",
)


class BenchmarkError(DsbdError, ValueError):
    """Runs or prompts that cannot be measured, files that cannot be written, a missing package."""


def read_prompts(file: Path) -> list[str]:
    """Return the prompts of a file: ``*.jsonl`` has objects with "prompt", others one per line."""
    try:
        lines = [line for line in text_of(file.read_bytes()).splitlines() if line.strip()]
    except (OSError, UnicodeError) as error:
        raise BenchmarkError(f"{file} cannot be read as UTF-8 text: {error}") from error
    if not lines:
        raise BenchmarkError(f"{file} has no prompt; write one per line")
    if file.suffix != ".jsonl":
        return lines
    return [_prompt_of(line, f"{file}, line {number}") for number, line in enumerate(lines, 1)]


def _prompt_of(line: str, where: str) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BenchmarkError(
            f"{where} is invalid JSON ({error}); write one object per line"
        ) from error
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise BenchmarkError(f'{where} has no text under "prompt"; write {{"prompt": "..."}}')
    return prompt


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

    # given fields of DecodingConfig, including the strategy
    options: dict[str, Any] = field(hash=False)
    given_name: str | None = None  # the name of the run; None names it after its options
    # name of the run to compare with; None: a run of the same distribution without a draft;
    # ``NO_BASELINE``: no comparison
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
        config = DecodingConfig(**self.options)
        return config.settled(costs_are_known=True, has_draft=self.has_draft)

    @property
    def name(self) -> str:
        """The given name, or one made from the options, such as "dsbd W=4 fixed 4x4"."""
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
        runs_like_it = [other for other in [*runs, *complete] if other.config == implied.config]
        if not runs_like_it:
            complete.append(implied)
        name = (runs_like_it or [implied])[0].name
        complete.append(dataclasses.replace(run, baseline=name))
    _check_names(complete)
    return complete


def _implied_baseline(run: BenchRun) -> BenchRun | None:
    """Return the run of the same distribution without a draft; None if the run is a baseline."""
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
    """Options for every run whose strategy has them, unless the run sets them itself."""

    num_beams: Sequence[int] = (2, 4)
    # draft_length, draft_beams: None leaves them to DecodingConfig
    draft_length: int | None = None
    draft_beams: int | Sequence[int] | None = None
    top_k: int = 20
    max_new_tokens: int = 64

    def options_of(self, strategy: str) -> dict[str, Any]:
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
    """Return a run for every strategy and width; for dsbd one with each of its width policies."""
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


Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One request."""

    run: str
    # prompt_index, repetition: measurements of different runs with the same values form a pair
    prompt_index: int
    repetition: int
    seed: int  # the request's seed, the same in all runs
    seconds: float  # wall time of the whole request, including the tokenizer
    token_ids: list[int]  # new tokens of the best sequence
    logprob: float  # sum of their log-probabilities under the target
    energy_joules: float | None  # the machine's energy during the request; None without a counter
    stats: DecodingStats

    @property
    def tokens_per_s(self) -> float:
        return len(self.token_ids) / self.seconds

    @property
    def logprob_per_token(self) -> float:
        return self.logprob / len(self.token_ids)


def warm_up(pipeline: Pipeline, runs: Sequence[BenchRun], prompts: Sequence[str]) -> Iterator[str]:
    """Run each run once on the longest prompt, because first calls allocate; yield its name."""
    longest = max(prompts, key=len)
    for run in runs:
        pipeline.generate(longest, seed=0, **run.options)
        yield run.name


def measure(
    pipeline: Pipeline,
    runs: Sequence[BenchRun],
    prompts: Sequence[str],
    *,
    repetitions: int,
    seed: int,
    clock: Clock,
    energy: EnergyMeter,
) -> Iterator[Measurement]:
    """Yield a measurement for every repetition, prompt and run.

    The order of the runs alternates, so that a machine that slows down affects all of them. With 3
    prompts and seed 10, the seeds are 10, 11, 12 in the first repetition, then 13, 14, 15.
    """
    for repetition in range(repetitions):
        order = runs if repetition % 2 == 0 else runs[::-1]
        for index, prompt in enumerate(prompts):
            request_seed = seed + repetition * len(prompts) + index
            for run in order:
                joules_before = energy.joules()
                began = clock()
                result = pipeline.generate(prompt, seed=request_seed, **run.options)
                seconds = clock() - began
                joules_used = energy.joules_since(joules_before)
                best = result.sequences[0]
                yield Measurement(
                    run=run.name,
                    prompt_index=index,
                    repetition=repetition,
                    seed=request_seed,
                    seconds=seconds,
                    token_ids=best.token_ids,
                    logprob=best.logprob,
                    energy_joules=joules_used,
                    stats=result.stats,
                )
