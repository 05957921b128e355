"""Sources of answers: the order of the lines, shared engine calls, interruptions."""

from __future__ import annotations

import io
import time
from dataclasses import dataclass
from itertools import count

import pytest
from rich.console import Console

from dsbd_ort.batch.answer_sources import Backlog, SharedCalls, answers_in_order
from dsbd_ort.batch.job import Batch, run_batch
from dsbd_ort.batch.prompt_lines import BatchError, BatchSettings, LineAnswer, RawLine
from dsbd_ort.pipeline import Pipeline, PipelineSettings
from tests.batch.test_job import LINES, answers, batch_of, done, without_times, write_lines


def test_the_answers_are_those_of_one_line_after_another(tiny_bundle, tmp_path):
    lines = [{"prompt": f"line {number} " + "x" * (number % 3)} for number in range(30)]
    write_lines(tmp_path / "in.jsonl", lines)
    alone = batch_of(tmp_path, tiny_bundle)
    done(alone)
    shared = batch_of(tmp_path, tiny_bundle, name="shared.jsonl", source=SharedCalls(8))
    done(shared)
    assert without_times(shared.output) == without_times(alone.output)


def test_a_line_that_cannot_be_answered_has_its_error(tiny_bundle, tmp_path):
    write_lines(tmp_path / "in.jsonl", LINES)
    alone = batch_of(tmp_path, tiny_bundle)
    shared = batch_of(tmp_path, tiny_bundle, name="shared.jsonl", source=SharedCalls(3))
    assert "4 could not be answered" in done(alone)
    assert "7 of 7 lines are done; 4 could not be answered" in done(shared)
    errors = [[answer.get("error") for answer in answers(b.output)] for b in (alone, shared)]
    assert errors[0] == errors[1]


def test_the_requests_do_share_a_cache(tiny_bundle, tmp_path):
    options = {"strategy": "sample", "max_new_tokens": 60, "eos_token_id": []}
    write_lines(tmp_path / "in.jsonl", [{"prompt": "ab"}] * 8)
    alone = batch_of(tmp_path, tiny_bundle, options=options)
    shared = batch_of(
        tmp_path, tiny_bundle, name="shared.jsonl", options=options, source=SharedCalls(8)
    )
    peaks = []
    for batch in (alone, shared):
        done(batch)
        peaks.append(max(answer["stats"]["kv_bytes_peak"] for answer in answers(batch.output)))
    assert peaks[1] > peaks[0]  # 62 rows fit the smallest cache, those of several do not


def test_an_interrupted_batch_ends_at_once(tiny_bundle):
    settings = BatchSettings(
        pipeline=PipelineSettings(bundle=tiny_bundle.path, num_threads=1),
        options={"strategy": "sample", "max_new_tokens": 400, "eos_token_id": []},
    )
    lines = (RawLine(number, b'{"prompt": "x"}') for number in count(1))
    given = []
    began = time.monotonic()
    backlog = Backlog(
        settings=settings, fingerprint="", lines=lines, is_interrupted=lambda: len(given) >= 2
    )
    for answer in SharedCalls(4).answers(backlog):
        given.append(answer)
    assert len(given) >= 2
    assert time.monotonic() - began < 60


@dataclass(frozen=True, kw_only=True)
class EndingEngines(PipelineSettings):
    """A pipeline whose target ends its thread in a call."""

    num_calls: int

    def open(self) -> Pipeline:
        pipeline = super().open()
        session = pipeline._target._session  # the only way to a real engine that does
        run, calls = session.run, count(1)

        def ending(inputs):
            if next(calls) > self.num_calls:
                raise SystemExit
            return run(inputs)

        session.run = ending
        return pipeline


def test_a_batch_whose_engines_have_ended_answers_no_further_line(tiny_bundle, tmp_path):
    write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}] * 30)
    whole = batch_of(tmp_path, tiny_bundle, source=SharedCalls(2))
    ending = EndingEngines(bundle=tiny_bundle.path, num_threads=1, num_calls=40)
    settings = BatchSettings(pipeline=ending, options=whole.settings.options)
    batch = Batch(input=whole.input, output=whole.output, settings=settings, source=whole.source)
    with pytest.raises(BatchError, match=r"has ended.*run the same command again to go on"):
        run_batch(batch, Console(file=io.StringIO()))
    found = answers(whole.output)
    assert 0 < len(found) < 30 and not any("error" in answer for answer in found)
    assert f"30 of 30 lines are done, {len(found)} of them before" in done(whole)


class LastFirst:
    """A pool that finishes the line it got last; the one that lasts only when no other is left."""

    def __init__(self, num_members, lasting=None):
        self.num_members = num_members
        self.sent = []
        self._busy = []
        self._lasting = lasting
        self.num_sent_while_lasting = 0

    def has_idle(self):
        return len(self._busy) < self.num_members

    def send(self, index, line):
        self._busy.append((index, line))
        self.sent.append(index)

    def receive(self, seconds):
        index, line = self._busy[-1] if self._busy[-1][0] != self._lasting else self._busy[0]
        self._busy.remove((index, line))
        if index == self._lasting:
            self.num_sent_while_lasting = len(self.sent)
        return [(index, LineAnswer({"line": line.number}, num_tokens=1, is_error=False))]


def numbers(answers):
    return [answer.fields["line"] for answer in answers]


def lines(num):
    return (RawLine(number, b"{}") for number in range(num))


def test_the_order_is_that_of_the_lines():
    pool = LastFirst(3)
    assert numbers(answers_in_order(pool, lines(20), lambda: False)) == list(range(20))
    assert pool.sent == list(range(20))


def test_no_line_is_taken_far_ahead_of_one_that_lasts():
    pool = LastFirst(2, lasting=0)
    assert numbers(answers_in_order(pool, lines(100), lambda: False)) == list(range(100))
    assert pool.num_sent_while_lasting == 2 * 8


def test_a_wish_to_end_is_heard_between_two_answers():
    pool = LastFirst(1)
    answers = answers_in_order(pool, lines(9), lambda: len(pool.sent) == 4)
    assert numbers(answers) == [0, 1, 2, 3]


def test_no_line_no_answer():
    assert numbers(answers_in_order(LastFirst(2), lines(0), lambda: False)) == []
