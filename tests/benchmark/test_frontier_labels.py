"""The picture of quality over speed: every point has its label, and no label lies over another."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from scripts.speed import report

CROWDED = [  # strategy, width policy, num_beams, min_beams, threshold, tokens/s, nats
    ("sample", None, 1, None, None, 88, -2.03),
    ("speculative", None, 1, None, None, 182, -2.03),
    *(("beam-sample", None, w, None, None, 73 - 4 * w, -1.37 + 0.2 * w) for w in (2, 3, 4)),
    *(("dsbd", "fixed", w, None, None, 166 - 20 * w, -1.8 + 0.22 * w) for w in (2, 3, 4)),
    ("dsbd", "threshold", 2, 1, 0.7, 131, -1.37),
    ("dsbd", "threshold", 2, 1, 0.5, 127, -1.38),
    ("dsbd", "threshold", 3, 1, 0.7, 116, -1.34),
    ("dsbd", "threshold", 4, 2, 0.7, 126, -1.37),
    ("dsbd", "threshold", 4, 2, 0.5, 125, -1.36),
    ("greedy", None, 1, None, None, 89, -0.77),
    ("beam-search", None, 2, None, None, 88, -0.76),
    ("speculative-beam-search", None, 1, None, None, 276, -0.77),
    ("mjsd", None, 1, None, None, 270, -0.76),
]


def run_of(row: tuple[Any, ...]) -> dict[str, Any]:
    names = ("strategy", "width_policy", "num_beams", "min_beams", "accept_threshold")
    settings = dict(zip(names, row[:5], strict=True))
    speed = {"median": row[5]}
    return {"settings": settings, "tokens_per_s": speed, "logprob_per_token": row[6]}


def test_no_label_lies_over_another_or_over_a_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(
        report, "Figure", lambda **options: figures.append(Figure(**options)) or figures[-1]
    )
    reports = {title: {"runs": [run_of(row) for row in CROWDED]} for title in ("a", "b")}
    report.plot_frontier(reports, tmp_path / "frontier.png")
    (figure,) = figures
    for axes in figure.axes:
        boxes = [label.get_window_extent() for label in axes.texts]
        assert len(boxes) == len(CROWDED)
        for one, other in itertools.combinations(boxes, 2):
            assert not one.overlaps(other)
        for line in axes.lines:
            for x, y in axes.transData.transform(line.get_xydata()):
                assert not any(box.contains(x, y) for box in boxes)
    legend = figure.legends[0].get_window_extent()
    assert not any(legend.overlaps(axes.bbox) for axes in figure.axes)
