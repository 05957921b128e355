"""Who drafted a node: in the page's data, its mark in the forest, the legend and the details."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dsbd_ort import Pipeline, RequestTrace, write_trace
from dsbd_ort.trace_page.trace_file import trace_object
from scripts.web_driver import browser, missing_browser

REQUESTS: dict[str, dict[str, Any]] = {
    "ngram": {"drafter": "ngram"},
    "constraint": {"drafter": "model", "constraint": {"regex": "(abc|xyz){3}"}},
    "model": {"drafter": "model"},
}
MARKS = "[...document.querySelectorAll('g.node text.proposer')].map(mark => mark.textContent)"


@pytest.fixture(scope="module")
def drafted(pipeline: Pipeline) -> dict[str, tuple[RequestTrace, dict[str, Any]]]:
    """By the name of whom it is about: a request's trace and the page's data."""
    found = {}
    for name, options in REQUESTS.items():
        trace = RequestTrace()
        shape: dict[str, Any] = {"num_beams": 2, "draft_length": 3, "max_new_tokens": 12, "seed": 0}
        pipeline.generate("abababababab", trace=trace, **shape, **options)
        found[name] = trace, trace_object(trace, pipeline.tokenizer)
    return found


@pytest.mark.parametrize("name", REQUESTS)
def test_the_data_say_who_drafted(drafted, name):
    _, fields = drafted[name]
    by = Counter(node["proposer"] for each in fields["iterations"] for node in each["nodes"])
    assert by[name] > 0 and by[None] > 0
    assert set(by) <= {name, REQUESTS[name]["drafter"], None}


@pytest.mark.skipif(missing_browser() is not None, reason=missing_browser() or "")
def test_the_page_marks_what_no_model_drafted(drafted, pipeline: Pipeline, tmp_path: Path):
    with browser(width=1200, height=900) as window:
        for name, (trace, fields) in drafted.items():
            write_trace(tmp_path / f"{name}.html", trace, pipeline.tokenizer)
            window.open((tmp_path / f"{name}.html").as_uri())
            legend = window.value("document.getElementById('legend').textContent")
            assert (f"{name}: drafted without the model" in legend) == (name != "model")
            for iteration in fields["iterations"]:
                proposers = [node["proposer"] for node in iteration["nodes"]]
                marked = sorted(each for each in proposers if each not in ("model", None))
                assert sorted(window.value(MARKS)) == marked
                drafted_now = {node for layer in iteration["drafted"] for node in layer}
                ids = drafted_now - set(iteration["roots"])
                counts = Counter(n["proposer"] for n in iteration["nodes"] if n["id"] in ids)
                facts = window.value("document.getElementById('facts').textContent")
                for proposer, count in counts.items():
                    assert f"{proposer} {count}" in facts
                window.press("right")
            assert window.console() == []
