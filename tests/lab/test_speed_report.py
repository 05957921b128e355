"""Report of lab/run speed: labels of the picture lie apart, tables hold what was found."""

import itertools
from typing import Any

from matplotlib.figure import Figure

from lab.speed import report

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


def test_no_label_lies_over_another_or_over_a_point(tmp_path, monkeypatch):
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


def test_draft_calls_are_counted_over_all_requests_of_a_run():
    def request(run: str, calls: int, seconds: float) -> dict[str, Any]:
        stats = {"draft_calls": calls, "draft_s": seconds, "num_iterations": 4}
        return {"run": run, "stats": stats}

    runs = [{"name": name, "draft_acceptance_rate": 0.625} for name in ("plain", "drafted")]
    requests = [request("plain", 0, 0.0), request("drafted", 2, 0.01), request("drafted", 10, 0.02)]
    found = report.draft_calls_of({"a twin": {"runs": runs, "measurements": requests}})
    # 0.03 s in 12 calls, over 8 iterations
    assert found.splitlines()[2:] == ["| a twin | drafted | 0.62 | 2.50 | 1.5 |"]


def test_twin_and_trained_pair_are_compared_request_by_request():
    def of_model(tokens: list[list[int]], rate: float) -> dict[str, Any]:
        runs = [{"name": "plain", "draft_acceptance_rate": None}]
        runs += [{"name": "drafted", "draft_acceptance_rate": rate}]
        requests = [
            {"run": "drafted", "prompt_index": 0, "repetition": number, "token_ids": ids}
            for number, ids in enumerate(tokens)
        ]
        return {"runs": runs, "measurements": requests[::-1]}

    found = report.same_drafts_of("1B", of_model([[5], [6]], 0.5), of_model([[5], [7]], 0.75))
    assert found.splitlines()[2:] == ["| drafted | 0.7500 | 0.5000 | 1/2 |"]
