"""The forecast of a pair, on table models and made-up costs."""

import dataclasses

import numpy as np
import pytest

from dsbd_ort.benchmark.bench_run import BenchmarkError
from dsbd_ort.benchmark.forecast import WIDTHS, PricedCalls, forecast, forecasts
from dsbd_ort.decoding import TableModel
from dsbd_ort.decoding.drafting.cost_curve import FREE, CostCurve, EngineCosts
from dsbd_runtime.bundle_files.bundle import open_bundle
from tests.decoding.tables import random_table
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle

VOCAB_SIZE, NEW_TOKENS = 12, 30
ANY_ROWS = CostCurve((1, 2), (1.0, 1.0))  # one second a call
REQUESTS = [(None, ids) for ids in [(1, 2, 3), (4, 5), (6, 7, 8, 9)]]


def forecasts_of(draft_seed, costs):
    target = TableModel(VOCAB_SIZE, random_table(0, VOCAB_SIZE))
    draft = TableModel(VOCAB_SIZE, random_table(draft_seed, VOCAB_SIZE))
    return list(forecasts(target, draft, costs, REQUESTS, NEW_TOKENS))


def test_with_free_drafts_and_rows_the_speed_up_is_the_tokens_an_iteration():
    for draft_seed in (0, 1):
        found = forecasts_of(draft_seed, EngineCosts(ANY_ROWS, FREE))
        assert [speed.num_beams for speed in found] == list(WIDTHS)
        for speed in found:
            assert speed.speedup == pytest.approx(speed.tokens_per_iteration)


def test_the_target_as_its_own_draft_is_always_accepted():
    """At most 8 drafted layers and one more; 30 tokens are 9 + 9 + 9 + 3."""
    single, *_ = forecasts_of(0, EngineCosts(ANY_ROWS, FREE))
    assert single.tokens_per_iteration == pytest.approx(30 / 4)


def test_an_expensive_draft_is_not_worth_it():
    for speed in forecasts_of(1, EngineCosts(ANY_ROWS, ANY_ROWS)):
        assert speed.speedup <= 1.0 and speed.tokens_per_iteration < 1.5


def test_a_draft_that_knows_nothing_gives_less_than_one_that_knows_all():
    costs = EngineCosts(ANY_ROWS, CostCurve((1, 2), (0.05, 0.05)))
    for good, bad in zip(forecasts_of(0, costs), forecasts_of(1, costs), strict=True):
        assert good.speedup > 2.0 > 1.5 > bad.speedup > 0.7


def test_calls_are_priced_by_their_rows():
    calls = PricedCalls(EngineCosts(CostCurve((1, 3), (1.0, 2.0)), CostCurve((1, 2), (0.1, 0.2))))
    calls.observe("target", 2, 99.0)
    calls.observe("draft", 4, 99.0)
    assert calls.seconds == pytest.approx(1.5 + 0.4)


def test_a_context_too_short_to_measure_is_refused(tmp_path):
    short = TinyModel(context_length=40)
    write_tiny_bundle(tmp_path / "short", target=short, draft=short)
    with pytest.raises(BenchmarkError, match=r"context of 40 tokens, .* 48 rows; leave the speed"):
        forecast(open_bundle(tmp_path / "short"), REQUESTS)


def test_the_engines_of_a_bundle(tiny_bundle):
    prompts = np.random.default_rng(0).integers(0, 256, (3, 10)).tolist()
    found = forecast(open_bundle(tiny_bundle.path), [(None, ids) for ids in prompts])
    assert [speed.num_beams for speed in found] == [1, 2, 4]
    assert all(speed.speedup > 0 and 1 <= speed.tokens_per_iteration <= 9 for speed in found)


def test_chats_are_forecast_as_people_use_them_sampled_and_greedy():
    target, draft = (TableModel(VOCAB_SIZE, random_table(0, VOCAB_SIZE)) for _ in range(2))
    costs = EngineCosts(ANY_ROWS, FREE)
    found = list(forecasts(target, draft, costs, REQUESTS, NEW_TOKENS, are_chats=True))
    kinds = [(speed.num_beams, speed.is_greedy) for speed in found]
    assert kinds == [(1, False), (2, False), (4, False), (1, True), (4, True)]
    for speed in found:
        assert speed.tokens_per_iteration > 2.0
        assert speed.speedup == pytest.approx(speed.tokens_per_iteration)


def test_sources_are_given_to_the_engines_and_ends_end_a_target():
    num_rows = {}
    for ends in ((), range(6)):
        seen = []

        class Reader(TableModel):
            def forward(self, forward, seen=seen):
                seen.append((forward.source, forward.num_new))
                return super().forward(forward)

        models = [Reader(VOCAB_SIZE, random_table(0, VOCAB_SIZE)) for _ in range(2)]
        for model in models:
            model.spec = dataclasses.replace(model.spec, reads_source=True)
        found = forecasts(
            *models,
            EngineCosts(ANY_ROWS, FREE),
            [((source,), [0]) for source in range(4)],
            NEW_TOKENS,
            are_chats=True,
            ends=ends,
        )
        assert all(speed.tokens_per_iteration >= 1.0 for speed in found)
        assert {source for source, _ in seen} == {(source,) for source in range(4)}
        num_rows[len(ends)] = sum(number for _, number in seen)
    assert num_rows[6] < num_rows[0] / 2
