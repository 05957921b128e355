"""Requests that run together in a cache that is too small for them: those preempted are resumed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dsbd_ort.decoding import DecodeResult, DecodingConfig, DecodingRequest
from dsbd_ort.decoding.batched_decoder import (
    BatchedDecoder,
    BatchedRequest,
    Outcome,
    Preempted,
    Progress,
)
from dsbd_ort.decoding.drafting.acceptance import AcceptanceEstimator
from dsbd_ort.decoding.drafting.cost_curve import CostCurve, EngineCosts
from dsbd_ort.decoding.result import IterationOutput

COSTS = EngineCosts(CostCurve((1, 16), (1e-3, 2e-3)), CostCurve((1, 16), (1e-4, 2e-4)))


def request_of(
    kind: dict[str, Any],
    prompt: tuple[int, ...],
    seed: int,
    num_new: int = 24,
    eos: int | None = None,
) -> DecodingRequest:
    """A request with these options; one that plans its drafts knows ``COSTS``."""
    config = DecodingConfig(**{"max_new_tokens": num_new, "eos_token_id": eos, **kind})
    is_planned = config.draft_policy == "throughput"
    return DecodingRequest(
        prompt_ids=prompt,
        config=config,
        rng=np.random.default_rng(seed),
        costs=COSTS if is_planned else None,
        estimator=AcceptanceEstimator(),
    )


def together(forest: BatchedDecoder, requests: Sequence[DecodingRequest], seed: int) -> Together:
    """Run requests that are admitted and resumed at random."""
    rng = np.random.default_rng(seed)
    return Together(forest, requests).run(iter(lambda: bool(rng.integers(2)), None))


@dataclass
class Together:
    """Requests that arrived in this order.

    Attributes:
        outcomes: by request, once it has ended.
        streams: by request, its agreed tokens.
        num_preempted: by request.
        members, running: of those that have begun; the numbers of those that run.
        waiting: first those that were preempted.
    """

    forest: BatchedDecoder
    requests: Sequence[DecodingRequest]
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    streams: dict[int, list[int]] = field(default_factory=dict)
    num_preempted: dict[int, int] = field(default_factory=dict)
    members: dict[int, BatchedRequest] = field(default_factory=dict)
    running: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.requests)))

    def run(self, admits: Iterator[bool]) -> Together:
        """Run them all; ``admits`` says whether the first that waits is admitted now."""
        while self.waiting or self.running:
            self.iterate(admits)
        return self

    def iterate(self, admits: Iterator[bool]) -> None:
        while self.waiting and (not self.running or next(admits)):
            self._admit(self.waiting.popleft())
        for progress in self.forest.iterate():
            (number,) = (n for n, member in self.members.items() if member is progress.live)
            self._take(number, progress)
        assert self.forest.num_live == len(self.running)

    def result(self, number: int) -> DecodeResult:
        outcome = self.outcomes[number]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _admit(self, number: int) -> None:
        assert all(older < number for older in self.running)
        self.running.append(number)
        if number in self.members:
            self.forest.resume(self.members[number])
        else:
            self.members[number] = self.forest.join(self.requests[number])
            self.streams[number], self.num_preempted[number] = [], 0

    def _take(self, number: int, progress: Progress) -> None:
        event = progress.event
        if isinstance(event, IterationOutput):
            stream = self.streams[number]
            assert event.agreed_tokens[: len(stream)] == stream, "a streamed token was taken back"
            self.streams[number] = event.agreed_tokens
        elif isinstance(event, Preempted):
            assert number == max(self.running), "an older request is preempted"
            is_forced = self.requests[number].preempts is not None
            assert is_forced or len(self.running) > 1, "one that has all rows is preempted"
            self.running.remove(number)
            self.waiting.appendleft(number)
            self.num_preempted[number] += 1
        else:
            self.running.remove(number)
            self.outcomes[number] = event
            if isinstance(event, DecodeResult):
                best, stream = event.sequences[0].token_ids, self.streams[number]
                assert best[: len(stream)] == stream, "a streamed token was taken back"
