"""The figure of a benchmark: no legend lies over bars or lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from dsbd_ort.batch.job import open_journal
from dsbd_ort.benchmark import plots
from dsbd_ort.benchmark.bench_run import DEFAULT_STRATEGIES, CommonSettings, runs_of, with_baselines
from dsbd_ort.benchmark.report import summarize
from tests.benchmark.test_report import PAIRS, measurement


def test_legends_lie_off_the_plots_and_within_the_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_plot_that_another_process_writes_is_left_as_it_is(tmp_path: Path) -> None:
    runs = with_baselines(runs_of(DEFAULT_STRATEGIES[:1], CommonSettings()))
    summaries = summarize(runs, [measurement(runs[0].name, 1.0, pair) for pair in PAIRS])
    file = tmp_path / "bench.png"
    with open_journal(file) as journal:
        journal.append({"version": 1})
        with pytest.raises(OSError, match="another process is writing to it"):
            plots.plot(summaries, "title", file)
    assert file.read_text() == '{"version": 1}\n'
