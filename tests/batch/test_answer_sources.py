"""Sources of answers: the order of the lines, shared engine calls, interruptions."""

import threading
import time
from dataclasses import dataclass, replace
from itertools import count

import pytest

from dsbd_ort.batch.answer_sources import Backlog, SharedCalls, answers_in_order
from dsbd_ort.batch.job import run_batch
from dsbd_ort.batch.prompt_lines import BatchError, BatchSettings, LineAnswer, RawLine
from dsbd_ort.pipeline import Pipeline, PipelineSettings
from tests.batch.test_job import answers, batch_of, console, done, write_lines


def test_the_requests_do_share_a_cache(tiny_bundle, tmp_path):
    options = {"strategy": "sample", "max_new_tokens": 60, "eos_token_id": []}
    write_lines(tmp_path / "in.jsonl", [{"prompt": "ab"}] * 8)
    peaks = []
    for name, source in (("alone.jsonl", None), ("shared.jsonl", SharedCalls(8))):
        batch = batch_of(tmp_path, tiny_bundle, name=name, options=options, source=source)
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
    for answer in SharedCalls(4)(backlog):
        given.append(answer)
    assert len(given) >= 2
    assert time.monotonic() - began < 60


@dataclass(frozen=True, kw_only=True)
class EndingEngines(PipelineSettings):
    """A pipeline whose target ends its thread in a call."""

    num_calls: int

    def open(self) -> Pipeline:
        pipeline = super().open()
        session = pipeline.models.target._session  # the only way to a real engine that does
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
    batch = replace(whole, settings=replace(whole.settings, pipeline=ending))
    with pytest.raises(BatchError, match=r"has ended.*run the same command again to go on"):
        run_batch(batch, console())
    found = answers(whole.output)
    assert 0 < len(found) < 30 and not any("error" in answer for answer in found)
    assert f"30 of 30 lines are done, {len(found)} of them before" in done(whole)


def backlog_of(num_lines, is_interrupted=lambda: False):
    lines = (RawLine(number, b"{}") for number in range(num_lines))
    return Backlog(settings=None, fingerprint="", lines=lines, is_interrupted=is_interrupted)


def echo(member, line, may_stop):
    time.sleep(0.01 * (line.number % 3))
    return LineAnswer({"line": line.number, "member": member}, num_tokens=1, is_error=False)


def numbers(answers):
    return [answer.fields["line"] for answer in answers]


def test_the_order_is_that_of_the_lines_and_every_member_answers():
    found = list(answers_in_order("abc", echo, backlog_of(20)))
    assert numbers(found) == list(range(20))
    assert {answer.fields["member"] for answer in found} == set("abc")


def test_no_line_is_taken_far_ahead_of_one_that_lasts():
    backlog, is_first_done = backlog_of(100), threading.Event()

    def first_lasts(member, line, may_stop):
        if line.number == 0:
            is_first_done.wait(10)
        return echo(member, line, may_stop)

    threading.Timer(0.5, is_first_done.set).start()
    answers = answers_in_order("ab", first_lasts, backlog)
    assert next(answers).fields["line"] == 0
    assert next(backlog.lines).number == 2 * 8
    answers.close()


def test_a_wish_to_end_is_heard_between_two_answers():
    given = []
    for answer in answers_in_order("a", echo, backlog_of(9, lambda: len(given) >= 4)):
        given.append(answer)
    assert 4 <= len(given) < 9 and numbers(given) == list(range(len(given)))


def test_an_interruption_does_not_wait_for_the_line_that_lasts():
    is_interrupted = threading.Event()

    def lasting(member, line, may_stop):
        is_interrupted.set()
        while not may_stop():
            time.sleep(0.01)

    assert list(answers_in_order("ab", lasting, backlog_of(9, is_interrupted.is_set))) == []


def test_the_lines_before_one_that_fails_are_answered():
    def failing(member, line, may_stop):
        if line.number == 3:
            raise BatchError("a worker ended")
        return echo(member, line, may_stop)

    given = []
    with pytest.raises(BatchError, match="a worker ended"):
        for answer in answers_in_order("ab", failing, backlog_of(9)):
            given.append(answer)
    assert numbers(given) == [0, 1, 2]


def test_no_line_no_answer():
    assert list(answers_in_order("ab", echo, backlog_of(0))) == []
