"""Statistics of requests one after another, as one."""

import dataclasses

import numpy as np
import pytest

from dsbd_ort.decoding import DecodingConfig, DecodingStats, TableModel, decode
from dsbd_ort.decoding.stats import summed_stats
from tests.benchmark.fakes import stats

FIRST = stats(
    num_iterations=3,
    num_accepted_layers=3,
    num_draft_tokens=10,
    num_accepted_tokens=4,
    acceptance_histogram=[1, 1, 1],
    mean_beam_width=2.0,
    num_output_tokens=6,
    target_s=1.0,
    draft_s=0.5,
    host_s=0.5,
    time_to_first_token_s=0.25,
    kv_bytes_peak=100,
)
SECOND = dataclasses.replace(
    FIRST,
    num_iterations=4,
    num_accepted_layers=0,
    num_draft_tokens=0,
    num_accepted_tokens=0,
    acceptance_histogram=[4],
    mean_beam_width=1.0,
    num_output_tokens=4,
    target_s=2.0,
    time_to_first_token_s=9.0,
    kv_bytes_peak=300,
)


def test_one_is_itself() -> None:
    rng = np.random.default_rng(0)
    table = rng.normal(size=(8, 8)).astype(np.float32)
    model = TableModel(8, lambda path: table[path[-1]])
    config = DecodingConfig(num_beams=2, draft_length=2, max_new_tokens=6)
    one = decode(model, TableModel(8, lambda path: table[path[-1]]), [1], config, rng).stats
    for name, value in dataclasses.asdict(summed_stats([one])).items():
        assert value == pytest.approx(getattr(one, name)), name


def test_rates_are_those_of_the_sums() -> None:
    both = summed_stats([FIRST, SECOND])
    assert (both.num_iterations, both.num_output_tokens) == (7, 10)
    assert both.mean_acceptance_length == pytest.approx(1 + 3 / 7)
    assert both.draft_acceptance_rate == pytest.approx(0.4)
    assert both.acceptance_histogram == [5, 1, 1]
    assert both.mean_beam_width == pytest.approx((6 * 2.0 + 4 * 1.0) / 10)
    assert both.time_to_first_token_s == 0.25
    assert both.tokens_per_s == pytest.approx(10 / 5.0)
    assert both.time_per_output_token_s == pytest.approx((5.0 - 0.25) / 9)
    assert both.kv_bytes_peak == 300


def test_every_field_is_counted() -> None:
    """A statistic that is added must be summed, too."""
    changed = {field.name for field in dataclasses.fields(DecodingStats)}
    assert set(dataclasses.asdict(summed_stats([FIRST]))) == changed
