"""Order of admission and of preemption, and their bounds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsbd_forward.forward import Source
from dsbd_ort.decoding import DecodingConfig, DecodingRequest
from dsbd_ort.engine import QueueFullError, ServiceLimits
from dsbd_ort.engine.scheduler import AnswerRows, Scheduler, Submission
from dsbd_ort.requests.results import TextStream
from dsbd_runtime.errors import CapacityError

FIRST_MEAN = 256


def request(
    most_rows: int, num_prompt_tokens: int = 1, source: tuple[int, ...] | None = None
) -> Submission:
    decoding = DecodingRequest(
        prompt_ids=[1] * num_prompt_tokens,
        config=DecodingConfig(),
        rng=np.random.default_rng(0),
        source=source,
    )
    return Submission(
        request=decoding,
        texts=TextStream(None, ()),  # type: ignore[arg-type]  # no text is made here
        most_rows=most_rows,
        on_event=lambda _: None,
        wake=lambda: None,
    )


def scheduler(max_requests: int = 8, max_queued: int = 8, max_rows: int = 100) -> Scheduler:
    limits = ServiceLimits(max_requests=max_requests, max_queued=max_queued)
    return Scheduler(limits, max_rows)


def enqueued(most_rows: Sequence[int], **limits: int) -> tuple[Scheduler, list[Submission]]:
    """A scheduler with requests that may need so many rows."""
    queue, requests = scheduler(**limits), [request(rows) for rows in most_rows]
    for one in requests:
        queue.enqueue(one)
    return queue, requests


def admitted(queue: Scheduler) -> list[int]:
    """Admit while running requests use their reserved rows."""
    return [one.most_rows for one in queue.admit(queue.rows_reserved)]


def member(num_rows: int) -> Any:
    return SimpleNamespace(num_rows=num_rows)


def test_rows_are_given_as_long_as_there_are_any() -> None:
    queue, requests = enqueued((40, 60, 1))
    assert admitted(queue) == [40, 60]
    assert queue.rows_reserved == 100
    queue.release(requests[0])
    assert admitted(queue) == [1]
    assert queue.rows_reserved == 61


def test_rows_are_reserved_for_what_answers_need_and_not_for_what_they_may_need() -> None:
    queue = scheduler(max_rows=1000)
    for _ in range(3):
        queue.enqueue(request(1000, num_prompt_tokens=100))
    assert admitted(queue) == [1000, 1000]
    assert queue.rows_reserved == 2 * (100 + FIRST_MEAN)
    for _ in range(40):
        queue.answer_rows(4).learn(80, was_cut=False)
    assert admitted(queue) == [1000]
    assert 100 + 80 <= queue.running[2].rows_reserved <= 100 + 82


def test_the_expected_rows_are_a_running_mean_of_answers_that_were_not_cut() -> None:
    rows = AnswerRows()
    rows.learn(100, was_cut=True)  # as long as it was allowed to be
    assert rows.mean == FIRST_MEAN
    rows.learn(512, was_cut=True)
    assert rows.mean == FIRST_MEAN + FIRST_MEAN / 8
    rows.learn(0, was_cut=False)
    assert rows.mean == 288 - 288 / 8
    for _ in range(100):
        rows.learn(1, was_cut=False)
    assert rows.mean == 64


def test_what_wide_requests_need_is_learned_apart() -> None:
    queue = scheduler(max_rows=10_000)
    few, many = queue.answer_rows(4), queue.answer_rows(256)
    assert (few.mean, many.mean) == (FIRST_MEAN, FIRST_MEAN * 32)
    assert queue.answer_rows(8) is queue.answer_rows(15) is few
    assert queue.answer_rows(511) is many and queue.answer_rows(255) is not many
    few.learn(64, was_cut=False)
    assert many.mean == FIRST_MEAN * 32
    wide = request(1500, 300)
    object.__setattr__(wide.request, "config", DecodingConfig(num_beams=256))
    queue.enqueue(wide)
    assert admitted(queue) == [1500]
    assert wide.rows_reserved == 1500  # its bound, as long as nothing is known


def test_one_is_always_admitted_where_none_runs() -> None:
    queue = scheduler(max_rows=100)
    queue.enqueue(request(100, num_prompt_tokens=90))
    assert [one.most_rows for one in queue.admit(7)] == [100]


def test_no_request_overtakes_the_first() -> None:
    queue, requests = enqueued((50, 90, 10, 10))
    assert admitted(queue) == [50]  # a 10 would fit, but 90 is first
    queue.release(requests[0])
    assert admitted(queue) == [90, 10]


def test_a_preempted_request_is_the_first_and_resumes_once_it_can_go_on() -> None:
    queue = scheduler(max_rows=1000)
    requests = [request(900, 10) for _ in range(3)]
    for one in requests:
        queue.enqueue(one)
    assert len(queue.admit(0)) == 3
    late = request(5)
    queue.enqueue(late)
    for one in (requests[2], requests[1]):  # the youngest first
        one.live = member(300)
        queue.preempt(one)
    assert list(queue.waiting) == [requests[1], requests[2], late]
    assert queue.num_preemptions == 2
    assert queue.admit(500) == []  # 300 rows and what an answer takes do not fit
    assert queue.admit(400) == [requests[1]]
    assert requests[1].rows_reserved == 300 + FIRST_MEAN
    assert queue.admit(0) == [requests[2], late]


def test_places_are_bounded_too() -> None:
    queue, _ = enqueued((1, 1, 1), max_requests=2)
    assert admitted(queue) == [1, 1]
    assert not queue.may_admit


def test_sources_that_are_not_kept_together_wait() -> None:
    """Sources of requests that run together would be read again in every iteration."""
    queue, asked = scheduler(), list[int]()

    def two(sources: Sequence[Source]) -> int:
        asked.append(len(sources))
        return 2

    requests = [request(1, source=(number,)) for number in (1, 2, 2, 3, 1)]
    for one in requests:
        queue.enqueue(one)
    assert queue.admit(0, two) == requests[:3]
    assert asked == [2, 2, 3]  # never of one alone
    queue.release(requests[0])
    assert queue.admit(0, two) == requests[3:4]
    queue.release(requests[3])
    assert queue.admit(0, two) == requests[4:]
    for one in queue.unfinished:
        queue.release(one)
    queue.enqueue(request(1, source=(9,)))
    assert len(queue.admit(0, lambda _: 0)) == 1  # one always fits


def test_a_full_queue_refuses_and_a_free_place_needs_no_queue() -> None:
    queue, requests = enqueued((5, 5, 5), max_requests=2, max_queued=1)  # a burst
    assert admitted(queue) == [5, 5]
    with pytest.raises(QueueFullError, match="2 requests are running and 1 are waiting"):
        queue.enqueue(request(5))
    queue.release(requests[0])
    queue.enqueue(request(5))


def test_what_would_wait_for_ever_is_refused() -> None:
    with pytest.raises(
        CapacityError, match=r"context size: the request may need 101 cache rows .1 of"
    ):
        scheduler().enqueue(request(101))


def test_cancelled_requests_wait_no_more() -> None:
    queue, requests = enqueued((1, 2, 3), max_requests=1)
    requests[1].is_cancelled = True
    assert queue.cancelled == [requests[1]]
    queue.release(requests[1])
    assert [one.most_rows for one in queue.waiting] == [1, 3]


@dataclass
class Simulation:
    """A scheduler with requests that take a row per iteration; no engine and no clock."""

    queue: Scheduler
    lengths: dict[Submission, int]
    rows: dict[Submission, int] = field(default_factory=dict)
    ended: list[Submission] = field(default_factory=list)

    def iterate(self) -> None:
        queue = self.queue
        for one in queue.admit(self._num_taken()):
            self.rows[one] = one.num_prompt_tokens if one.live is None else self.rows[one]
        running = list(queue.running)
        assert not queue.waiting or running, "requests wait and none runs"
        while len(running) > 1 and sum(self.rows[one] + 1 for one in running) > queue.max_rows:
            youngest = running.pop()
            youngest.live = member(self.rows[youngest])
            queue.preempt(youngest)
        for one in running:
            self.rows[one] += 1
            if self.rows[one] >= self.lengths[one]:
                queue.release(one)
                queue.answer_rows(4).learn(self.rows[one], was_cut=False)
                self.ended.append(one)
        assert sum(self.rows[one] for one in queue.running) <= queue.max_rows

    def _num_taken(self) -> int:
        return sum(max(self.rows[one], one.rows_reserved) for one in self.queue.running)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=25),
    st.lists(st.integers(0, 30), min_size=25, max_size=25),
    st.integers(600, 1500),
    st.integers(1, 8),
)
def test_nothing_starves_whatever_arrives(
    sizes: list[tuple[int, int]], pauses: list[int], max_rows: int, max_requests: int
) -> None:
    """The oldest that has not ended takes a row in every iteration, from its arrival as such on."""
    queue = scheduler(max_requests, 30, max_rows)
    arriving = [request(max_rows, prompt) for prompt, _ in sizes]
    lengths = {one: sum(size) for one, size in zip(arriving, sizes, strict=True)}
    simulation = Simulation(queue, lengths)
    unfinished: list[Submission] = []
    for one, pause in zip(arriving, pauses, strict=False):
        queue.enqueue(one)
        unfinished.append(one)
        for _ in range(pause):
            iterate_and_check(simulation, unfinished)
    num_left = sum(lengths[one] for one in unfinished)
    for _ in range(num_left):
        if unfinished:
            iterate_and_check(simulation, unfinished)
    assert not unfinished


def iterate_and_check(simulation: Simulation, unfinished: list[Submission]) -> None:
    if not unfinished:
        return
    oldest, queue = unfinished[0], simulation.queue
    before = simulation.rows.get(oldest, oldest.num_prompt_tokens)
    simulation.iterate()
    assert simulation.rows[oldest] == before + 1
    for one in simulation.ended:
        if one in unfinished:
            unfinished.remove(one)
    in_order = [*queue.running, *queue.waiting]
    assert in_order == unfinished, "a younger request runs while an older one waits"
