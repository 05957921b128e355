"""The page in a browser: forest, texts, proposers, keys, pointer, light and dark, its console."""

from collections import Counter
from typing import Any

import pytest

from dsbd_ort import Pipeline, RequestTrace, write_trace
from dsbd_ort.trace_page.trace_file import trace_object
from scripts.web_driver import browser, missing_browser
from tests.trace_page.conftest import STRATEGIES

WHERE = "document.getElementById('where').textContent"
DETAILS = "document.getElementById('details')"
PAPER = "getComputedStyle(document.body).backgroundColor"
ROLES = "[...document.querySelectorAll('g.node')].map(box => [+box.dataset.node, box.classList[1]])"


@pytest.fixture(scope="module")
def pages(requests, pipeline, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    for strategy, (trace, _, _) in requests.items():
        write_trace(folder / f"{strategy}.html", trace, pipeline.tokenizer)
    return folder


@pytest.fixture(scope="module")
def window():
    if missing := missing_browser():
        pytest.skip(missing)
    with browser(width=1200, height=900) as opened:
        yield opened


def test_the_best_beam_is_in_the_first_screen(window, pages):
    window.open((pages / "dsbd.html").as_uri())
    bottom = window.value("document.getElementById('best').getBoundingClientRect().bottom")
    assert 0 < bottom <= window.value("window.innerHeight") / 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_iteration_shows_its_forest_and_its_texts(window, pages, requests, strategy):
    _, result, fields = requests[strategy]
    window.open((pages / f"{strategy}.html").as_uri())
    iterations = fields["iterations"]
    num_bars = window.value("document.querySelectorAll('#strip button').length")
    assert num_bars == len(iterations)
    for number, iteration in enumerate(iterations, start=1):
        assert window.value(WHERE) == f"{number} / {len(iterations)}"
        shown = window.value(ROLES)
        assert sorted(shown) == sorted([node["id"], node["role"]] for node in iteration["nodes"])
        facts = window.value("document.getElementById('facts').textContent")
        assert f"rows by the target{iteration['rows']['target']}" in facts
        widths = " ".join(str(len(layer)) for layer in iteration["committed"])
        assert f"width per layer{widths}rows" in facts
        num_lines = window.value("document.querySelectorAll('#beams li').length")
        assert num_lines == len(iteration["beams"])
        window.press("right")
    text = window.value("document.getElementById('best').textContent")
    assert (fields["prompt"]["text"] + result.sequences[0].text).startswith(text)
    assert window.console() == []


def test_keys_step_and_stop_at_both_ends(window, pages, requests):
    window.open((pages / "dsbd.html").as_uri())
    last = len(requests["dsbd"][2]["iterations"])
    for key, number in (
        ("left", 1), ("right", 2), ("end", last), ("right", last), ("left", last - 1), ("home", 1)
    ):  # fmt: skip
        window.press(key)
        assert window.value(WHERE) == f"{number} / {last}"
    window.click("#strip button:nth-child(3)")
    assert window.value(WHERE) == f"3 / {last}" and window.value("location.hash") == "#3"
    current = window.value("document.querySelector('#strip [aria-current]').ariaLabel")
    assert current.startswith("iteration 3: ")


def test_keyboard_alone_reaches_every_node(window, pages, requests):
    window.open((pages / "dsbd.html").as_uri() + "#2")
    nodes = requests["dsbd"][2]["iterations"][1]["nodes"]
    focused = "Number(document.activeElement?.dataset?.node ?? -1)"
    for _ in range(20):
        if window.value(focused) >= 0:
            break
        window.press("tab")
    reached = []
    for _ in nodes:
        reached.append(window.value(focused))
        node = next(node for node in nodes if node["id"] == reached[-1])
        told = window.value(f"{DETAILS}.hidden ? '' : {DETAILS}.textContent")
        expected = "not computed" if node["p"] is None else "target p̃"
        assert expected in told and f"token id{node['token']}" in told
        window.press("down")
    assert sorted(reached) == sorted(node["id"] for node in nodes)
    window.press("escape")
    assert window.value(f"{DETAILS}.hidden")
    assert window.console() == []


def test_pointer_shows_the_details_of_a_node(window, pages, requests):
    window.open((pages / "dsbd.html").as_uri())
    node = next(n for n in requests["dsbd"][2]["iterations"][0]["nodes"] if n["role"] == "bonus")
    window.point_at(f"g.node[data-node='{node['id']}']")
    told = window.value(f"{DETAILS}.hidden ? '' : {DETAILS}.textContent")
    assert f"target p̃{node['p']:.3f}" in told and "bonus" in told


def test_light_and_dark_by_preference_and_by_button(window, pages):
    window.open((pages / "dsbd.html").as_uri())
    light = window.value(PAPER)
    window.click("#theme")
    dark = window.value(PAPER)
    assert light != dark
    window.click("#theme")
    assert window.value(PAPER) == light
    with browser(width=800, height=600, is_dark=True) as other:
        other.open((pages / "dsbd.html").as_uri())
        assert other.value(PAPER) == dark
        assert other.value("document.getElementById('theme').textContent") == "Light"
        other.click("#theme")
        assert other.value(PAPER) == light


def test_a_request_given_up_at_once_has_a_page_too(window, pipeline, tmp_path):
    trace = RequestTrace()
    steps = pipeline.stream("x", trace=trace, max_new_tokens=4)
    next(steps)
    steps.close()
    trace.iterations.clear()
    write_trace(tmp_path / "empty.html", trace, pipeline.tokenizer)
    window.open((tmp_path / "empty.html").as_uri())
    assert "given up" in window.value("document.getElementById('totals').textContent")
    assert window.console() == []


REQUESTS: dict[str, dict[str, Any]] = {
    "ngram": {"drafter": "ngram"},
    "constraint": {"drafter": "model", "constraint": {"regex": "(abc|xyz){3}"}},
    "model": {"drafter": "model"},
}
MARKS = "[...document.querySelectorAll('g.node text.proposer')].map(mark => mark.textContent)"


@pytest.fixture(scope="module")
def drafted(pipeline: Pipeline) -> dict[str, tuple[RequestTrace, dict[str, Any]]]:
    """By proposer: a request's trace and the page's data."""
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


@pytest.mark.parametrize("name", REQUESTS)
def test_the_page_marks_what_no_model_drafted(drafted, window, pipeline, tmp_path, name):
    trace, fields = drafted[name]
    write_trace(tmp_path / "page.html", trace, pipeline.tokenizer)
    window.open((tmp_path / "page.html").as_uri())
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
