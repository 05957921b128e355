"""Advice: the gain of a draft on this machine, and the change that would help most.

Calls of both engines are timed for several numbers of rows. Then every strategy answers the prompts
without and with the draft, whose policy uses these times. Two speed-ups are reported. *Expected* is
the time of all engine calls without the draft over that with the draft, both computed from the
measured times. *Measured* is the ratio of the times of the same answers after their first tokens.
It also includes the decoding loop, longer contexts and other work of the machine.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dsbd_ort.benchmark.bench_run import BenchmarkError
from dsbd_ort.benchmark.forecast import PricedCalls
from dsbd_ort.decoding import DecodingStats
from dsbd_ort.decoding.drafting.cost_curve import (
    MEASURED_ROWS,
    CostCurve,
    EngineCosts,
    measure_costs,
)
from dsbd_ort.pipeline import Pipeline

NUM_PROMPTS = 4
NEW_TOKENS = 128  # 48 would not pay for a draft that reads 250 tokens of a prompt
_SAMPLED: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95}
_SEARCH = "speculative-beam-search"
_STRATEGIES: dict[tuple[str, int], tuple[dict[str, Any], dict[str, Any]]] = {
    # name, beams: options without and with a draft
    ("greedy", 1): ({"strategy": "greedy"}, {"strategy": _SEARCH, "num_beams": 1}),
    ("sample", 1): ({"strategy": "sample"} | _SAMPLED, {"strategy": "speculative"} | _SAMPLED),
    **{
        ("dsbd", beams): (
            {"strategy": "beam-sample", "num_beams": beams} | _SAMPLED,
            {"strategy": "dsbd", "num_beams": beams} | _SAMPLED,
        )
        for beams in (2, 4)
    },
    ("beam search", 4): (
        {"strategy": "beam-search", "num_beams": 4},
        {"strategy": _SEARCH, "num_beams": 4},
    ),
}
_FIXED_LAYER: dict[str, Any] = {"draft_policy": "fixed", "draft_length": 1, "draft_beams": 1}
NUM_STEPS = len(_STRATEGIES) + 4  # calls of ``on_step`` in ``advise``
_LEAST_GAIN = 0.03  # least gain that is worth a line


@dataclass(frozen=True)
class Gain:
    """A strategy's expected and measured speed-up, and its mean tokens per iteration."""

    strategy: str
    num_beams: int
    expected: float
    measured: float
    tokens_per_iteration: float


@dataclass(frozen=True)
class Advice:
    """The measurements of a pair.

    costs: seconds of calls by their rows.
    agreement: in greedy answers, the share of drafted tokens that equal the target's.
    gains: one for each strategy.
    greedy_at_half: expected speed-up of ``greedy`` if calls of the draft took half of their time.
    greedy_by_ngrams: the same if n-grams draft wherever the text repeats itself.
    """

    costs: EngineCosts
    agreement: float
    gains: tuple[Gain, ...]
    greedy_at_half: float
    greedy_by_ngrams: float

    @property
    def price(self) -> float:
        """The time of a draft call of one row over the time of such a target call."""
        return self.costs.draft.seconds[0] / self.costs.target.seconds[0]


def measured_costs(pipeline: Pipeline) -> EngineCosts:
    """Time calls of both engines for several numbers of rows.

    BenchmarkError: the bundle has no draft, is an encoder-decoder, or its context is too short.
    """
    if not pipeline.has_draft:
        raise BenchmarkError(
            f"{pipeline.bundle.path} has no draft that could be judged; add one with dsbd-export "
            "--bundle"
        )
    if pipeline.bundle.context_length < MEASURED_ROWS[-1]:
        raise BenchmarkError(
            f"{pipeline.bundle.path} has a context of {pipeline.bundle.context_length} tokens, the "
            f"costs of calls are measured with up to {MEASURED_ROWS[-1]} rows"
        )
    if pipeline.prompts.encoder is not None:
        raise BenchmarkError(
            f"{pipeline.bundle.path} is an encoder-decoder, which answers sources, not prompts; "
            "time your own requests"
        )
    with pipeline.models.engines() as (target, draft):
        return measure_costs(target, draft, time.perf_counter)


def advise(
    pipeline: Pipeline, prompts: Sequence[str], on_step: Callable[[], None] = lambda: None
) -> Advice:
    """Measure the draft of a pipeline; ``on_step`` is called ``NUM_STEPS`` times.

    Raises the errors of ``measured_costs``.
    """
    costs = measured_costs(pipeline)
    on_step()
    agreement = agreement_of(pipeline, prompts)
    on_step()
    gains = []
    for (name, num_beams), (plain, drafted) in _STRATEGIES.items():
        plain_seconds = sum(map(_seconds_after_first, _answers(pipeline, prompts, plain)))
        expected, stats = _expected(pipeline, prompts, costs, num_beams, drafted)
        num_iterations = sum(each.num_iterations for each in stats)
        num_accepted = sum(each.num_accepted_layers for each in stats)
        measured = plain_seconds / sum(map(_seconds_after_first, stats))
        per_iteration = 1.0 + num_accepted / num_iterations
        gains.append(Gain(name, num_beams, expected, measured, per_iteration))
        on_step()
    half = CostCurve(costs.draft.rows, tuple(0.5 * each for each in costs.draft.seconds))
    cheaper = EngineCosts(costs.target, half)
    greedy_at_half = greedy_gain(pipeline, prompts, cheaper)
    on_step()
    greedy_by_ngrams = greedy_gain(pipeline, prompts, costs, drafter="model+ngram")
    on_step()
    return Advice(costs, agreement, tuple(gains), greedy_at_half, greedy_by_ngrams)


def agreement_of(pipeline: Pipeline, prompts: Sequence[str]) -> float:
    """Return how often, in greedy answers, draft and target have the same most probable token."""
    options = {**_STRATEGIES["greedy", 1][1], **_FIXED_LAYER}
    stats = _answers(pipeline, prompts, options)
    num_drafted = sum(each.num_draft_tokens for each in stats)
    return sum(each.num_accepted_tokens for each in stats) / max(num_drafted, 1)


def greedy_gain(
    pipeline: Pipeline, prompts: Sequence[str], costs: EngineCosts, drafter: str = "model"
) -> float:
    """Return the speed-up of greedy answers by a drafter, computed from these costs."""
    options = {**_STRATEGIES["greedy", 1][1], "drafter": drafter}
    return _expected(pipeline, prompts, costs, 1, options)[0]


def _expected(
    pipeline: Pipeline,
    prompts: Sequence[str],
    costs: EngineCosts,
    num_beams: int,
    options: dict[str, Any],
) -> tuple[float, list[DecodingStats]]:
    """Return the speed-up computed from these costs, and the statistics of the answers.

    The draft policy uses the costs; from answer to answer it learns how often drafts are accepted.
    """
    learned, calls = pipeline.models.costs, PricedCalls(costs)
    pipeline.models.costs = calls
    try:
        stats = _answers(pipeline, prompts, options)
    finally:
        pipeline.models.costs = learned
    num_layers = sum(each.num_iterations + each.num_accepted_layers for each in stats)
    return num_layers * float(costs.target.up_to(num_beams)[num_beams]) / calls.seconds, stats


def _answers(
    pipeline: Pipeline, prompts: Sequence[str], options: dict[str, Any]
) -> list[DecodingStats]:
    num_tokens = min(NEW_TOKENS, pipeline.bundle.context_length // 2)
    common: dict[str, Any] = {"max_new_tokens": num_tokens, "eos_token_id": (), **options}
    return [
        pipeline.generate(prompt, seed=seed, **common).stats
        for seed, prompt in enumerate(prompts[:NUM_PROMPTS])
    ]


def _seconds_after_first(stats: DecodingStats) -> float:
    return stats.draft_s + stats.target_s + stats.host_s - stats.time_to_first_token_s


def sentences(advice: Advice, *, is_cheapest: bool) -> list[str]:
    """Return the measurements in sentences; is_cheapest: no export makes the draft cheaper."""
    by_kind = {(gain.strategy, gain.num_beams): gain for gain in advice.gains}
    greedy = by_kind["greedy", 1].expected
    lines = [
        f"The draft agrees in {advice.agreement:.0%} of the tokens; one of its calls costs "
        f"{advice.price:.2f} of a call of the target."
    ]
    if not is_cheapest and advice.greedy_at_half > greedy * (1.0 + _LEAST_GAIN):
        lines.append(
            f"At half of that price greedy is expected to gain {advice.greedy_at_half:.2f} instead "
            f"of {greedy:.2f}: try dsbd-export --bundle BUNDLE --draft DRAFT "
            "--draft-quantize auto --draft-vocab 32768"
        )
    if advice.greedy_by_ngrams > greedy * (1.0 + _LEAST_GAIN):
        lines.append(
            f"With n-grams before the draft greedy is expected to gain "
            f"{advice.greedy_by_ngrams:.2f} instead of {greedy:.2f}: try --drafter model+ngram"
        )
    rows = advice.costs.target.up_to(16)
    for (name, num_beams), gain in by_kind.items():
        if gain.expected < 1.0 + _LEAST_GAIN:
            times = float(rows[4 * num_beams] / rows[num_beams])
            lines.append(
                f"{name} with {num_beams} beams gains nothing here: {4 * num_beams} rows of the "
                f"target cost {times:.1f} times as much as {num_beams}."
                if num_beams > 1
                else f"{name} gains nothing here."
            )
    paying = [gain for gain in advice.gains if gain.expected >= 1.0 + _LEAST_GAIN]
    if paying:
        best = max(paying, key=lambda gain: gain.expected)
        beams = f" with {best.num_beams} beams" if best.num_beams > 1 else ""
        lines.append(f"It pays most for {best.strategy}{beams}: {best.expected:.2f}.")
    else:
        lines.append("No strategy gains: serve this target without this draft.")
    return lines
