"""Runs in processes of their own: interleaved, counted, and reported when they fail."""

import json
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from lab.peers.catalog import PeerError
from lab.peers.documents import Documents
from lab.peers.ids import Ids
from lab.peers.prepare import NotRun
from lab.peers.rounds import Plan, Prompt, Request, measure_rounds
from tests.lab.peers.samples import ready_run, run_of, start_fake

PLAN = Plan(
    prompts=[Prompt(token_ids=[5]), Prompt(token_ids=[7, 8])],
    warm_up=Prompt(token_ids=[1]),
    max_new_tokens=3,
    num_rounds=2,
)


def outcomes(folder, *runs, plan=PLAN):
    ready = [ready_run(run, folder) for run in runs]
    return list(measure_rounds(ready, plan, folder, lambda line: None, start_fake))


def test_rounds_alternate_and_every_request_is_what_was_asked_for(tmp_path):
    requests = outcomes(tmp_path, run_of("a"), run_of("b", skip=10))
    assert [(r.run, r.round, r.prompt_index, r.seed, r.token_ids) for r in requests] == [
        ("a", 0, 0, 0, [6, 7, 8]),
        ("a", 0, 1, 1, [9, 10, 11]),
        ("b", 0, 0, 0, [16, 17, 18]),
        ("b", 0, 1, 1, [19, 20, 21]),
        ("b", 1, 0, 2, [16, 17, 18]),
        ("b", 1, 1, 3, [19, 20, 21]),
        ("a", 1, 0, 2, [6, 7, 8]),
        ("a", 1, 1, 3, [9, 10, 11]),
    ]
    first = requests[0]
    assert (first.version, first.settings) == ("1.2", "counting")
    assert (first.num_iterations, first.is_valid) == (3, None)
    assert (first.sequences, first.scores, first.num_legal) == (None, None, None)
    assert first.seconds > 0 and 10**6 < first.peak_bytes < 10**9
    assert first.tokens_per_s == 3 / first.seconds


FAILING = [
    ({"missing": "no such model"}, "open: FileNotFoundError: no such model"),
    ({"crash": True}, "generate: the process ended (exit code 3: segmentation fault)"),
]


@pytest.mark.parametrize(("options", "words"), FAILING)
def test_a_run_that_fails_is_reported_once_and_stops_nobody(tmp_path, options, words):
    found = outcomes(tmp_path, run_of("bad", **options), run_of("good"))
    failures = [item for item in found if isinstance(item, NotRun)]
    assert [(item.run.name, item.reason) for item in failures] == [("bad", f"failed: {words}")]
    assert [r.run for r in found if isinstance(r, Request)] == ["good"] * 4


ANSWERS = [  # (tokens, those before the end, whether they are a valid document)
    ([0, 1, 2, 3, 4], [0, 1, 2], True),  # what follows the end is padding
    ([0, 1, 2], [0, 1, 2], True),
    ([0, 1], [0, 1], False),  # not whole
    ([0, 4, 2, 3], [0, 4, 2], False),  # JSON, but nothing that the schema allows
    ([3], [], False),
]


@pytest.mark.parametrize(("tokens", "kept", "is_valid"), ANSWERS)
def test_answers_under_a_schema_are_judged(tmp_path, tokens, kept, is_valid):
    schema = {"type": "array", "items": {"type": "integer"}, "tokens": tokens}
    prompt = Prompt(token_ids=[0], json_schema=json.dumps(schema))
    tokenizer = Tokenizer(WordLevel({"[": 0, "1": 1, "]": 2, "<end>": 3, '"a"': 4}))
    documents = Documents(tokenizer, end_token=3)
    plan = replace(PLAN, prompts=[prompt], num_rounds=1, documents=documents)
    (found,) = outcomes(tmp_path, run_of("a"), plan=plan)
    assert (found.token_ids, found.is_valid) == (kept, is_valid)


def test_ids_among_the_returned_sequences_are_counted(tmp_path):
    np.save(tmp_path / "ids.npy", np.array([[1, 2], [3, 4], [5, 6]]))
    plan = replace(PLAN, num_rounds=1, ids=Ids(tmp_path / "ids.npy"))
    first, _ = outcomes(tmp_path, run_of("a", num_beams=2), plan=plan)
    assert first.sequences == [[1, 2, 9], [1, 2], [3, 4]]
    assert first.scores == [0.25, 0.0, -0.5]
    assert (first.token_ids, first.num_legal) == ([1, 2], 2)
    assert first.requests_per_s == 1 / first.seconds


def test_no_answer_in_time_and_a_process_that_ended_are_errors(tmp_path):
    process = start_fake(ready_run(run_of(), tmp_path), tmp_path / "log", timeout_s=0.001)
    with pytest.raises(PeerError, match=r"open: no answer within 0\.001 s"), process:
        process.open()
    process = start_fake(ready_run(run_of(), tmp_path), tmp_path / "log")
    with pytest.raises(PeerError, match=r"open: the process ended \(exit code -9"), process:
        process._process.kill()
        process._process.wait()
        process.open()
