"""Check that outputs do not depend on how they are computed, by comparing pairs of settings.

If the bundle's engines are bit-exact, a request has the same tokens and log-probabilities with and
without a draft, together with other requests and alone, with and without cached rows of an earlier
prompt, and on one thread and on several.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dsbd_ort.benchmark.bench_run import CommonSettings
from dsbd_ort.decoding import STRATEGIES
from dsbd_ort.engine import Service, ServiceLimits
from dsbd_ort.pipeline import Pipeline, PipelineSettings
from dsbd_ort.requests.results import GenerationResult

STRATEGY_PAIRS = (
    ("dsbd", "beam-sample"),
    ("speculative", "sample"),
    ("speculative-beam-search", "beam-search"),
)
AT_A_TIME = 8
_THREADS = (1, 2)
_NUM_OTHERS = 2

Output = list[tuple[Sequence[Any], Sequence[float | None]]]
"""For each returned sequence, its tokens (ids, or texts) and their log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class PairCount:
    """The requests that were made with two settings, and how many of their outputs differ."""

    name: str  # the pair, as "dsbd W=4 / beam-sample"
    num_requests: int
    num_other_tokens: int  # requests with other tokens in any sequence
    num_other_logprobs: int  # requests with other tokens or log-probabilities in any sequence

    def __add__(self, other: PairCount) -> PairCount:
        assert self.name == other.name
        return PairCount(
            name=self.name,
            num_requests=self.num_requests + other.num_requests,
            num_other_tokens=self.num_other_tokens + other.num_other_tokens,
            num_other_logprobs=self.num_other_logprobs + other.num_other_logprobs,
        )


@dataclass(frozen=True)
class CheckedRequest:
    """One prompt and its options."""

    prompt: str
    options: dict[str, Any]

    def output(self, pipeline: Pipeline) -> Output:
        return output_of(pipeline.generate(self.prompt, **self.options))


Answer = Callable[[CheckedRequest], Output]


def output_of(result: GenerationResult) -> Output:
    """Return the compared part of a result."""
    return [(sequence.token_ids, sequence.token_logprobs) for sequence in result.sequences]


def pair_count(name: str, pairs: Iterable[tuple[Output, Output]]) -> PairCount:
    """Return how many pairs of outputs differ."""
    compared = list(pairs)
    return PairCount(
        name=name,
        num_requests=len(compared),
        num_other_tokens=sum(
            [tokens for tokens, _ in one] != [tokens for tokens, _ in other]
            for one, other in compared
        ),
        num_other_logprobs=sum(one != other for one, other in compared),
    )


def check_invariance(
    settings: PipelineSettings,
    prompts: Sequence[str],
    common: CommonSettings,
    *,
    repetitions: int,
    seed: int,
) -> Iterator[PairCount]:
    """Yield the count of each pair of settings as soon as it is done; first seed: ``seed``."""
    requests = CheckedRequests(prompts, common, repetitions, seed)
    plain = dataclasses.replace(settings, prefix_cache=False)
    with plain.open() as pipeline:
        alone = _answer(pipeline)
        has_draft = pipeline.bundle.manifest.draft is not None
        for drafted, baseline in STRATEGY_PAIRS if has_draft else ():
            for width in common.num_beams if STRATEGIES[drafted].has_beams else (1,):
                name = f"{drafted} W={width} / {baseline}"
                pairs = zip(requests.of(drafted, width), requests.of(baseline, width), strict=True)
                yield pair_count(name, ((alone(mine), alone(its)) for mine, its in pairs))
        same = requests.of("dsbd" if has_draft else "beam-sample", common.num_beams[0])
        yield _compared("with others / alone", same, _with_others(pipeline, prompts), alone)
        with dataclasses.replace(settings, prefix_cache=True).open() as keeping:
            name = "rows kept from an earlier prompt / computed anew"
            yield _compared(name, same, _after_a_shorter_prompt(keeping), alone)
            mixed = requests.mixed(has_draft=has_draft)
            name = f"{AT_A_TIME} at a time, of mixed strategies / alone"
            outputs = [alone(request) for request in mixed]
            yield pair_count(name, zip(_at_a_time(keeping, mixed), outputs, strict=True))
    counts = sorted({*_THREADS, settings.num_threads or _THREADS[-1]})
    with (
        dataclasses.replace(plain, num_threads=counts[0]).open() as first,
        dataclasses.replace(plain, num_threads=counts[-1]).open() as second,
    ):
        name = f"{counts[0]} / {counts[-1]} threads"
        yield _compared(name, same, _answer(first), _answer(second))


@dataclass(frozen=True)
class CheckedRequests:
    """Makes the requests of a strategy: each prompt ``repetitions`` times, each with a new seed."""

    prompts: Sequence[str]
    common: CommonSettings
    repetitions: int
    seed: int

    def of(self, strategy: str, width: int) -> list[CheckedRequest]:
        options: dict[str, Any] = {"strategy": strategy, **self.common.options_of(strategy)}
        if STRATEGIES[strategy].has_beams:
            options["num_beams"] = width
        if strategy == "dsbd":
            options["width_policy"] = "fixed"
        prompts = list(self.prompts) * self.repetitions
        return [
            CheckedRequest(prompt, {**options, "seed": self.seed + index})
            for index, prompt in enumerate(prompts)
        ]

    def mixed(self, *, has_draft: bool) -> list[CheckedRequest]:
        strategies = [drafted if has_draft else baseline for drafted, baseline in STRATEGY_PAIRS]
        of_each = [self.of(strategy, self.common.num_beams[0]) for strategy in strategies]
        return [
            alternatives[index % len(alternatives)]
            for index, alternatives in enumerate(zip(*of_each, strict=True))
        ]


def _answer(pipeline: Pipeline) -> Answer:
    return lambda request: request.output(pipeline)


def _with_others(pipeline: Pipeline, prompts: Sequence[str]) -> Answer:
    """Return a function that answers a request in the engine calls of other prompts."""
    others = list(prompts[:_NUM_OTHERS])
    return lambda request: output_of(
        pipeline.generate([*others, request.prompt], **request.options)[-1]
    )


def _after_a_shorter_prompt(pipeline: Pipeline) -> Answer:
    def answer(request: CheckedRequest) -> Output:
        half = request.prompt[: len(request.prompt) // 2] or request.prompt
        pipeline.generate(half, **request.options)
        return request.output(pipeline)

    return answer


def _at_a_time(pipeline: Pipeline, requests: Sequence[CheckedRequest]) -> list[Output]:
    limits = ServiceLimits(max_requests=AT_A_TIME)
    with Service(pipeline, limits) as service, ThreadPoolExecutor(AT_A_TIME) as threads:
        results = threads.map(
            lambda request: service.generate(request.prompt, **request.options), requests
        )
        return [output_of(result) for result in results]


def _compared(
    name: str, requests: Sequence[CheckedRequest], one: Answer, other: Answer
) -> PairCount:
    return pair_count(name, ((one(request), other(request)) for request in requests))
