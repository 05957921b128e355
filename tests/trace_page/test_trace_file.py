"""The trace file: labels of tokens, what its JSON says, and a page that needs nothing else."""

import json
import math
import re

import pytest

import dsbd_ort
from dsbd_ort import RequestTrace
from dsbd_ort.trace_page.trace_file import page_html, token_label, trace_object
from dsbd_runtime.errors import InputError
from tests.runtime.tokenizer_kinds import SPECIAL, saved, with_piece
from tests.trace_page.conftest import PROMPT, STRATEGIES


def embedded(page):
    return re.findall(r'<script id="trace" type="application/json">(.*?)</script>', page, re.S)


def test_page_holds_the_json_and_nothing_ends_it_early(requests):
    fields = requests["dsbd"][2]
    page = page_html(fields)
    (data,) = embedded(page)
    assert json.loads(data) == json.loads(json.dumps(fields))
    assert data.isascii() and "<" not in data and "/* trace */" not in page
    assert page.count("</script>") == 2 and "console.error" not in page.replace(data, "")


def test_page_needs_nothing_else(requests):
    page = page_html(requests["dsbd"][2])
    markup = page.replace(embedded(page)[0], "")
    assert "default-src 'none'" in markup
    assert set(re.findall(r"https?://[^\"']*", markup)) == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"/\* \w+ \*/", markup)  # every part was put in
    assert not re.findall(r"src=|@import|fetch\(|url\(", markup)


def test_texts_that_look_like_the_template_stay_texts(requests):
    fields = requests["dsbd"][2] | {"program": "/* style */ /* script */ /* trace */"}
    assert json.loads(embedded(page_html(fields))[0])["program"] == fields["program"]


def test_suffix_decides_and_others_are_refused(requests, pipeline, tmp_path):
    trace, _, fields = requests["dsbd"]
    dsbd_ort.write_trace(tmp_path / "trace.json", trace, pipeline.tokenizer)
    dsbd_ort.write_trace(tmp_path / "trace.html", trace, pipeline.tokenizer)
    assert json.loads((tmp_path / "trace.json").read_text()) == json.loads(json.dumps(fields))
    assert (tmp_path / "trace.html").read_text().startswith("<!DOCTYPE html>")
    for name, words in (("trace.txt", "ends in .html"), ("no/trace.html", "is not a folder")):
        with pytest.raises(InputError, match=words):
            dsbd_ort.write_trace(tmp_path / name, trace, pipeline.tokenizer)


LABELS = {  # kind of tokenizer and token: label
    ("byte_level", "Ġdef"): "·def",
    ("byte_level", "ĊĊ"): "⏎⏎",
    ("byte_level", "ĉx"): "⇥x",
    ("byte_level", "Ć"): "\\x06",
    ("byte_level", "âĤ"): "\\xe2\\x82",  # two bytes of three
    ("byte_level", SPECIAL): SPECIAL,  # decodes to nothing
    ("strip", "▁def"): "·def",  # the space is dropped at the beginning of a text
    ("strip", "<0xE2>"): "\\xe2",
    ("word_piece", "def"): "·def",
    ("word_piece", "##def"): "def",
}


@pytest.mark.parametrize(("kind", "piece"), LABELS)
def test_labels(tmp_path, kind, piece):
    assert token_label(saved(with_piece(kind, piece), tmp_path), 0) == LABELS[kind, piece]


def test_a_token_outside_the_vocabulary_is_named_by_its_number(pipeline):
    assert token_label(pipeline.tokenizer, 99_999) == "<99999>"


every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def chain(fields, row):
    """The rows of a hypothesis from the first new token on."""
    rows = []
    while row:
        rows.append(fields["hypotheses"][row])
        row = rows[-1]["parent"]
    return rows[::-1]


@every_strategy
def test_a_last_beam_is_the_returned_sequence(requests, strategy):
    _, result, fields = requests[strategy]
    beams = [chain(fields, beam["hypothesis"]) for beam in fields["iterations"][-1]["beams"]]
    best = result.sequences[0]
    (rows,) = [rows for rows in beams if [row["token"] for row in rows] == best.token_ids]
    assert sum(row["logprob"] for row in rows) == pytest.approx(best.logprob, rel=1e-5)
    assert "".join(row["text"] for row in rows) + rows[-1]["rest"] == best.text
    assert sum(len(i["committed"]) for i in fields["iterations"]) >= len(best.token_ids)


@every_strategy
def test_every_hypothesis_stands_there_once_and_after_its_parent(requests, strategy):
    fields = requests[strategy][2]
    rows = fields["hypotheses"]
    assert all(row["parent"] < index for index, row in enumerate(rows) if index)
    assert len({(row["parent"], row["token"]) for row in rows[1:]}) == len(rows) - 1


@every_strategy
def test_nodes_are_those_recorded(requests, strategy):
    trace, _, fields = requests[strategy]
    for recorded, written in zip(trace.iterations, fields["iterations"], strict=True):
        assert written["committed"] == recorded.committed and written["roots"] == recorded.roots
        assert written["rows"] == {"draft": recorded.draft_rows, "target": recorded.target_rows}
        for node, out in zip(recorded.nodes, written["nodes"], strict=True):
            assert (out["id"], out["role"], out["token"]) == (node.id, node.role, node.token)
            assert str(node.token) in json.loads(json.dumps(fields["labels"]))
            for log_prob, found in (
                (node.target_log_prob, out["p"]),
                (node.draft_log_prob, out["q"]),
            ):
                if log_prob is None:
                    assert found is None
                else:
                    assert found == pytest.approx(math.exp(log_prob), rel=1e-6)


def test_json_is_strict_and_names_prompt_and_resolved_options(requests, pipeline):
    fields = requests["dsbd"][2]
    again = json.loads(json.dumps(fields, allow_nan=False))
    assert again["version"] == 1 and again["prompt"]["text"] == PROMPT
    assert again["prompt"]["token_ids"] == pipeline.tokenizer.encode(PROMPT)
    assert again["config"]["num_beams"] == 4 and again["config"]["draft_beams"] == [4, 4, 4, 4]


def test_an_impossible_token_has_probability_0_and_no_weight(pipeline):
    trace = RequestTrace()
    options = {"top_k": 1, "strategy": "speculative", "max_new_tokens": 8, "seed": 0}
    options["draft_length"] = 4
    pipeline.generate("x", trace=trace, **options)
    nodes = [
        node for i in trace_object(trace, pipeline.tokenizer)["iterations"] for node in i["nodes"]
    ]
    impossible = [node for node in nodes if node["p"] == 0]
    assert impossible and all(node["log_weight"] is None for node in impossible)
