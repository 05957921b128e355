"""Summaries of measurements, computed by hand."""

from __future__ import annotations

import pytest

from dsbd_ort.benchmark.bench_run import BenchRun, Measurement, with_baselines
from dsbd_ort.benchmark.report import compare, summarize
from tests.benchmark.fakes import stats


def measurement(run, seconds, pair=(0, 0), token_ids=(1, 2, 3, 4), logprob=-2.0, **changes):
    return Measurement(
        run=run,
        prompt_index=pair[0],
        repetition=pair[1],
        seed=0,
        seconds=seconds,
        token_ids=list(token_ids),
        logprob=logprob,
        energy_joules=changes.pop("energy_joules", None),
        stats=stats(**changes),
    )


PAIRS = [(0, 0), (1, 0), (0, 1)]


def test_speedup_is_the_median_ratio_of_pairs_not_the_ratio_of_medians():
    base = [measurement("b", s, p) for s, p in zip([1.0, 10.0, 4.0], PAIRS, strict=True)]
    own = [measurement("o", s, p) for s, p in zip([0.5, 4.0, 4.0], PAIRS, strict=True)]
    comparison = compare(own[::-1], base)  # the order is not what pairs them
    assert comparison.speedup.value == 2.0  # of 2, 2.5 and 1; medians would say 1
    assert comparison.num_pairs == 3 and comparison.is_identical


def test_speedup_is_of_tokens_per_second_when_lengths_differ():
    comparison = compare(
        [measurement("o", 1.0, token_ids=(1, 2))], [measurement("b", 1.0, token_ids=(1, 2, 3, 4))]
    )
    assert comparison.speedup.value == 0.5
    assert comparison.num_identical == 0 and not comparison.is_identical


def test_one_other_token_in_one_pair_is_seen():
    base = [measurement("b", 1.0, pair) for pair in PAIRS]
    own = [*base[:2], measurement("o", 1.0, PAIRS[2], token_ids=(1, 2, 3, 5), logprob=-1.4)]
    comparison = compare(own, base)
    assert (comparison.num_identical, comparison.is_identical) == (2, False)
    assert comparison.logprob_difference.value == pytest.approx(0.05)  # 0.6 / 4 tokens / 3 pairs


def test_a_run_is_summed_over_its_requests():
    runs = with_baselines([BenchRun(options={"strategy": "dsbd"})])
    baseline, dsbd = runs
    of_baseline = measurement(baseline.name, 2.0, energy_joules=8.0)
    of_dsbd = [
        measurement(dsbd.name, 1.0, energy_joules=8.0),
        measurement(
            dsbd.name,
            1.0,
            num_iterations=6,
            num_draft_tokens=64,
            num_accepted_tokens=22,
            num_draft_layers=16,
            num_accepted_layers=8,
            acceptance_histogram=[2, 2, 1, 0, 1],
            mean_beam_width=1.0,
            target_rows=30,
            draft_rows=20,
            kv_bytes_peak=3000,
            host_s=0.06,
            energy_joules=4.0,
        ),
    ]
    first, second = summarize(runs, [of_baseline, *of_dsbd])
    assert first.comparison is None and second.comparison.baseline == baseline.name
    assert second.settings["strategy"] == "dsbd" and second.settings["draft_beams"] == (16,) * 8
    assert second.tokens_per_s.median == 4.0
    assert second.mean_acceptance_length == 18 / 8
    assert second.draft_acceptance_rate == 30 / 80
    assert second.acceptance_histogram == [3, 2, 2, 0, 1]
    assert second.mean_beam_width == pytest.approx((4 * 3.0 + 14 * 1.0) / 18)
    assert second.target_rows_per_iteration == (40 - 2 * 4) / 8
    assert second.draft_rows_per_iteration == (28 - 2 * 4) / 8
    assert second.seconds_per_token.target == pytest.approx(0.4 / 8)
    assert second.host_us_per_iteration == pytest.approx(1e6 * 0.08 / 8)
    assert second.kv_bytes_peak == 3000
    assert second.energy_joules_per_token == 12.0 / 8


def test_what_nothing_measures_is_none():
    run = BenchRun(options={"strategy": "sample"})
    undrafted = measurement(
        run.name, 1.0, num_draft_tokens=0, draft_acceptance_rate=None, draft_rows=0,
        kv_bytes_peak=None,
    )  # fmt: skip
    (summary,) = summarize([run], [undrafted])
    assert summary.kv_bytes_peak is None and summary.energy_joules_per_token is None
    assert summary.draft_acceptance_rate is None and summary.draft_rows_per_iteration == 0.0
