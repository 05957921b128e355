"""Timed requests: every run on every prompt, interleaved, in several repetitions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Unpack

from dsbd_ort.benchmark.bench_run import BenchRun
from dsbd_ort.benchmark.machine import EnergyMeter
from dsbd_ort.decoding import DecodingOptions, DecodingStats
from dsbd_ort.results import GenerationResult

Clock = Callable[[], float]


class Generates(Protocol):
    """Answers prompts: a Pipeline."""

    def generate(self, prompt: str, **options: Unpack[DecodingOptions]) -> GenerationResult:
        """See Pipeline.generate."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One request."""

    run: str
    # prompt_index, repetition: they pair it with the measurements of the other runs
    prompt_index: int
    repetition: int
    seed: int  # of the request, the same for all runs of a pair
    seconds: float  # wall time of the whole request, tokenizer included
    token_ids: list[int]  # new tokens of the best sequence; logprob: their sum under the target
    logprob: float
    energy_joules: float | None  # of the machine while the request ran, None without a counter
    stats: DecodingStats

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the best sequence per second of the request."""
        return len(self.token_ids) / self.seconds

    @property
    def logprob_per_token(self) -> float:
        """Mean target log-probability of the best sequence's tokens."""
        return self.logprob / len(self.token_ids)


def warm_up(pipeline: Generates, runs: Sequence[BenchRun], prompts: Sequence[str]) -> Iterator[str]:
    """Run everything once on the longest prompt, as first calls allocate; yield each run's name."""
    longest = max(prompts, key=len)
    for run in runs:
        pipeline.generate(longest, seed=0, **run.options)
        yield run.name


def measure(
    pipeline: Generates,
    runs: Sequence[BenchRun],
    prompts: Sequence[str],
    *,
    repetitions: int,
    seed: int,
    clock: Clock,
    energy: EnergyMeter,
) -> Iterator[Measurement]:
    """Yield a measurement for every repetition, prompt and run.

    The order of runs alternates, so that a machine that slows down slows all. 3 prompts from seed
    10 have the seeds 10, 11, 12; then 13, 14, 15.
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
