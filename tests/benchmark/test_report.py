"""Summaries of measurements, computed by hand: estimates, intervals and the figure."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from dsbd_ort.batch.job import open_journal
from dsbd_ort.benchmark import plots
from dsbd_ort.benchmark.bench_run import (
    DEFAULT_STRATEGIES,
    BenchRun,
    CommonSettings,
    Measurement,
    runs_of,
    with_baselines,
)
from dsbd_ort.benchmark.bootstrap import Spread, bootstrap, spread
from dsbd_ort.benchmark.report import compare, summarize
from dsbd_ort.commands.bench_table import VALUE_COLUMNS, verdict_line
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
    nothing = {"num_draft_tokens": 0, "draft_acceptance_rate": None, "draft_rows": 0}
    undrafted = measurement(run.name, 1.0, kv_bytes_peak=None, **nothing)
    (summary,) = summarize([run], [undrafted])
    assert summary.kv_bytes_peak is None and summary.energy_joules_per_token is None
    assert summary.draft_acceptance_rate is None and summary.draft_rows_per_iteration == 0.0


def test_legends_lie_off_the_plots_and_within_the_figure(tmp_path, monkeypatch):
    runs = with_baselines(runs_of(DEFAULT_STRATEGIES, CommonSettings()))
    measured = [measurement(run.name, 1.0, pair) for run in runs for pair in PAIRS]
    figures: list[Figure] = []
    monkeypatch.setattr(
        plots, "Figure", lambda **options: figures.append(Figure(**options)) or figures[-1]
    )
    plots.plot(summarize(runs, measured), "title", tmp_path / "bench.png")
    (figure,) = figures
    legends = [axes.get_legend() for part in figure.subfigs for axes in part.axes]
    assert len(legends) == 4
    for legend in legends:
        box = legend.get_window_extent()
        assert not any(box.overlaps(a.bbox) for part in figure.subfigs for a in part.axes)
        assert all(figure.bbox.contains(*corner) for corner in box.corners())


def test_a_plot_that_another_process_writes_is_left_as_it_is(tmp_path):
    runs = with_baselines(runs_of(DEFAULT_STRATEGIES[:1], CommonSettings()))
    summaries = summarize(runs, [measurement(runs[0].name, 1.0, pair) for pair in PAIRS])
    file = tmp_path / "bench.png"
    with open_journal(file) as journal:
        journal.append({"version": 1})
        with pytest.raises(OSError, match="another process is writing to it"):
            plots.plot(summaries, "title", file)
    assert file.read_text() == '{"version": 1}\n'


def test_spreads_and_intervals_of_values():
    assert spread([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(3.0, 2.0, 4.0)
    values = np.random.default_rng(1).normal(2.0, 0.1, 40).tolist()
    assert bootstrap(values, "median") == bootstrap(values, "median")
    estimate = bootstrap([1.5] * 7, "median")
    assert (estimate.value, estimate.low, estimate.high) == (1.5, 1.5, 1.5)


def test_median_is_not_moved_by_one_disturbed_pair_and_the_mean_is():
    values = [2.0] * 9 + [200.0]
    assert bootstrap(values, "median").value == 2.0
    assert bootstrap(values, "mean").value == pytest.approx(21.8)


def test_interval_of_a_mean_is_near_the_normal_one_and_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(3)
    num_trials, num_values, num_covered = 200, 40, 0
    for _ in range(num_trials):
        estimate = bootstrap(rng.normal(1.0, 0.5, num_values).tolist(), "mean")
        num_covered += estimate.low <= 1.0 <= estimate.high
        assert 0.15 < estimate.high - estimate.low < 0.50  # 2 * 1.96 * 0.5 / sqrt(40) = 0.31
    assert 0.88 <= num_covered / num_trials <= 0.99


NO_DRAFT = {"num_draft_tokens": 0, "num_accepted_tokens": 0, "draft_acceptance_rate": None}


@pytest.mark.parametrize(
    ("seconds", "num_pairs", "changes", "speedup", "interval", "verdict"),
    [
        (0.5, 5, {}, "2.00", "2.00 to 2.00", "pays: mine 2.00"),
        (2.0, 5, {}, "0.50", "0.50 to 0.50", "loses: mine 0.50"),
        (1.0, 5, {}, "1.00", "1.00 to 1.00", "no difference shown: mine 1.00"),
        (0.5, 4, {}, "2.00", "-", "no difference shown: mine 2.00"),
        (0.5, 5, NO_DRAFT, "not drafted", "-", "not drafted: mine"),
    ],
)
def test_the_verdict_needs_a_draft_and_enough_pairs(
    seconds, num_pairs, changes, speedup, interval, verdict
):
    options = {"strategy": "speculative", "max_new_tokens": 4}
    runs = with_baselines([BenchRun(options=options, given_name="mine")])
    pairs = [(index, 0) for index in range(num_pairs)]
    of_plain = [measurement("sample", 1.0, pair, **NO_DRAFT) for pair in pairs]
    drafted = [measurement("mine", seconds, pair, **changes) for pair in pairs]
    plain, mine = summarize(runs, of_plain + drafted)
    assert VALUE_COLUMNS["speed-up"](mine) == speedup
    assert VALUE_COLUMNS["95 %"](mine) == interval
    assert verdict_line([plain, mine]) == verdict and verdict_line([plain]) == ""
