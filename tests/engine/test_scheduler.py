"""Order of admission, and its bounds."""

from __future__ import annotations

import numpy as np
import pytest

from dsbd_ort.decoding import DecodingConfig, DecodingRequest
from dsbd_ort.engine import QueueFullError, ServiceLimits
from dsbd_ort.engine.scheduler import LiveRequest, Scheduler
from dsbd_ort.results import TextStream
from dsbd_runtime.errors import CapacityError
from dsbd_runtime.tokenizer import Tokenizer


def request(num_rows: int, tokenizer: Tokenizer | None = None) -> LiveRequest:
    decoding = DecodingRequest(
        prompt_ids=[1], config=DecodingConfig(), rng=np.random.default_rng(0)
    )
    return LiveRequest(
        request=decoding,
        texts=TextStream(tokenizer, ()),  # type: ignore[arg-type]  # no text is made here
        num_rows=num_rows,
        on_event=lambda _: None,
        wake=lambda: None,
    )


def scheduler(max_requests: int = 8, max_queued: int = 8, max_rows: int = 100) -> Scheduler:
    limits = ServiceLimits(max_requests=max_requests, max_queued=max_queued)
    return Scheduler(limits, max_rows)


def admitted(queue: Scheduler) -> list[int]:
    return [one.num_rows for one in iter(queue.admit, None)]


def test_rows_are_given_as_long_as_there_are_any() -> None:
    queue = scheduler()
    requests = [request(rows) for rows in (40, 60, 1)]
    for one in requests:
        queue.enqueue(one)
    assert admitted(queue) == [40, 60]
    assert queue.rows_reserved == 100
    queue.release(requests[0])
    assert admitted(queue) == [1]
    assert queue.rows_reserved == 61


def test_no_request_overtakes_the_first() -> None:
    queue = scheduler()
    requests = [request(rows) for rows in (50, 90, 10, 10)]
    for one in requests:
        queue.enqueue(one)
    assert admitted(queue) == [50]  # a 10 would fit, but 90 is first
    queue.release(requests[0])
    assert admitted(queue) == [90, 10]


def test_places_are_bounded_too() -> None:
    queue = scheduler(max_requests=2)
    for _ in range(3):
        queue.enqueue(request(1))
    assert admitted(queue) == [1, 1]


def test_a_full_queue_refuses_and_a_free_place_needs_no_queue() -> None:
    queue = scheduler(max_requests=2, max_queued=1)
    requests = [request(5) for _ in range(3)]
    for one in requests:  # a burst, before any could be admitted
        queue.enqueue(one)
    assert admitted(queue) == [5, 5]
    with pytest.raises(QueueFullError, match="2 requests are running and 1 are waiting"):
        queue.enqueue(request(5))
    queue.release(requests[0])
    queue.enqueue(request(5))


def test_what_would_wait_for_ever_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"may need 101 cache rows .1 of them"):
        scheduler().enqueue(request(101))


def test_cancelled_requests_wait_no_more() -> None:
    queue = scheduler(max_requests=1)
    requests = [request(rows) for rows in (1, 2, 3)]
    for one in requests:
        queue.enqueue(one)
    requests[1].is_cancelled = True
    assert queue.remove_cancelled() == [requests[1]]
    assert [one.num_rows for one in queue.waiting] == [1, 3]
