"""The JSON says what the recorded trace and the result say."""

from __future__ import annotations

import json
import math

import pytest

from dsbd_ort import RequestTrace
from dsbd_ort.trace_page.trace_file import trace_object
from tests.trace_page.conftest import PROMPT, STRATEGIES

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
    options = {"top_k": 1, "strategy": "speculative", "max_new_tokens": 8}
    pipeline.generate("x", trace=trace, **options)
    nodes = [
        node for i in trace_object(trace, pipeline.tokenizer)["iterations"] for node in i["nodes"]
    ]
    impossible = [node for node in nodes if node["p"] == 0]
    assert impossible and all(node["log_weight"] is None for node in impossible)
