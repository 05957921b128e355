"""A draft reads a prompt just before its first node, once for all that share it, or never."""

import dataclasses
import itertools

import numpy as np
import pytest

from dsbd_ort.decoding import DecodeResult, DecodingConfig, TableModel
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.drafting.acceptance import AcceptanceEstimator
from dsbd_ort.decoding.drafting.cost_curve import CostCurve, EngineCosts
from tests.decoding.tables import all_tokens, decoded, request_on, run
from tests.decoding.test_batched_decoder import DRAFT, TARGET, VOCAB, Asked

LATE = {
    "strategy": "dsbd",
    "num_beams": 2,
    "max_new_tokens": 40,
    "eos_token_id": None,
    "draft_policy": "throughput",
}
"""A request whose draft reads the prompt once it is worth it."""


class LateCosts:
    """Costs with which drafting pays only after some calls of the target."""

    def __init__(self, num_calls: int) -> None:
        self._num_left = num_calls

    def now(self) -> EngineCosts:
        draft = 1.0 if self._num_left > 0 else 1e-6
        return EngineCosts(CostCurve((1, 8), (1e-2, 1.1e-2)), CostCurve((1, 8), (draft, draft)))

    def observe(self, role: str, num_rows: int, seconds: float) -> None:
        self._num_left -= role == "target"


def late_samples(preempts: bool, num_calls: tuple[int, ...]) -> tuple[list[Asked], TableModel]:
    """Return samples of one prompt, decoded together, and the draft."""
    prompt = tuple(np.random.default_rng(7).integers(5, size=40).tolist())
    samples = [Asked(LATE, prompt, seed) for seed in range(len(num_calls))]
    draft = TableModel(VOCAB, DRAFT)
    decoder = BatchedDecoder(TableModel(VOCAB, TARGET), draft)
    asked_by_member, costs = {}, [LateCosts(number) for number in num_calls]
    for sample, its_costs in zip(samples, costs, strict=True):
        request = dataclasses.replace(sample.request(), costs=its_costs)
        asked_by_member[decoder.join(request)] = sample
    for iteration in itertools.count():
        if not decoder.num_live:
            return samples, draft
        for each in costs:
            each.observe("target", 1, 1e-2)
        if preempts and iteration % 3 == 1:
            member = next(m for m, sample in asked_by_member.items() if sample.result is None)
            decoder.preempt(member)
            decoder.resume(member)
        for progress in decoder.iterate():
            if isinstance(progress.event, DecodeResult):
                asked_by_member[progress.live].result = progress.event


@pytest.mark.parametrize("preempts", [False, True])
def test_a_prompt_that_the_draft_reads_late_is_read_once(preempts: bool) -> None:
    samples, draft = late_samples(preempts, (5, 30, 1000))  # not in one iteration: both would read
    for sample in samples:
        config = dataclasses.replace(sample.config, draft_policy="fixed")
        expected = run(config, TARGET, DRAFT, VOCAB, sample.seed, sample.prompt)
        assert sample.result is not None and all_tokens(sample.result) == all_tokens(expected)
    early, late, never = (sample.result.stats for sample in samples if sample.result)
    assert early.num_draft_tokens > 0 and late.num_draft_tokens > 0
    assert never.draft_calls == never.draft_rows == 0
    prefixes = [path for path in draft.computed_paths if len(path) < 40]
    if not preempts:
        assert len(prefixes) == len(set(prefixes)) == 39


@pytest.mark.parametrize("agreement", [None, 0.7, 0.95])
def test_a_prompt_is_read_if_the_measured_agreement_promises_twice_its_price(
    agreement: float | None,
) -> None:
    """160 tokens, a tenth of a target's call each; without a measurement drafts are tried."""
    curve = CostCurve((1, 8), (1e-3, 8e-3))
    costs = EngineCosts(CostCurve((1, 8), (1e-2, 1.1e-2)), curve)
    num_new = 60 if agreement != 0.95 else 120
    config = DecodingConfig(**{**LATE, "max_new_tokens": num_new})  # type: ignore[arg-type]
    prompt = tuple(np.random.default_rng(7).integers(5, size=160).tolist())
    estimator = AcceptanceEstimator.of_pair(agreement)
    given = request_on(config, prompt, costs=costs, estimator=estimator)
    result = decoded(given, TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT))
    assert (result.stats.draft_rows > 0) == (agreement != 0.7)
