"""Runs in processes of their own: interleaved, counted, and reported when they fail."""

from __future__ import annotations

import pytest

from peers.catalog import PeerError
from peers.prepare import NotRun
from peers.rounds import Plan, Request, measure_rounds
from tests.peers.samples import ready_run, run_of, start_fake

PLAN = Plan(prompts=[[5], [7, 8]], warm_up=[1], max_new_tokens=3, num_rounds=2)


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
    assert first.seconds > 0 and 10**6 < first.peak_bytes < 10**9
    assert first.tokens_per_s == 3 / first.seconds


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"missing": "no such model"}, "open: FileNotFoundError: no such model"),
        ({"crash": True}, "generate: the process ended (exit code 3: segmentation fault)"),
    ],
)
def test_a_run_that_fails_is_reported_once_and_stops_nobody(tmp_path, options, words):
    found = outcomes(tmp_path, run_of("bad", **options), run_of("good"))
    failures = [item for item in found if isinstance(item, NotRun)]
    assert [(item.run.name, item.reason) for item in failures] == [("bad", f"failed: {words}")]
    assert [r.run for r in found if isinstance(r, Request)] == ["good"] * 4


def test_an_answer_that_does_not_come_is_an_error(tmp_path):
    run = ready_run(run_of(), tmp_path)
    process = start_fake(run, tmp_path / "log", timeout_s=0.001)
    with pytest.raises(PeerError, match=r"open: no answer within 0\.001 s"), process:
        process.open()
