"""Whole requests, from their prompts to their results: one alone, or several together."""

import dataclasses
from collections import deque
from collections.abc import Generator, Sequence
from typing import cast

import numpy as np

from dsbd_forward.engine import Engine
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.decoder import Decoder, LiveRequest, Preempted
from dsbd_ort.decoding.drafting.cost_curve import LearnedCosts, learn_from_first_calls
from dsbd_ort.decoding.logits_processing.path_states import StopState
from dsbd_ort.decoding.request import DecodingRequest, check_request
from dsbd_ort.decoding.result import DecodeResult, IterationOutput, LiveHypotheses, result_of
from dsbd_ort.decoding.trace import TraceRecorder

Iterations = Generator[IterationOutput, None, DecodeResult]


def decode(
    target: Engine,
    draft: Engine | None,
    prompt_ids: Sequence[int],
    config: DecodingConfig,
    rng: np.random.Generator,
    *,
    stop: StopState | None = None,
    trace: TraceRecorder | None = None,
) -> DecodeResult:
    """Continue a prompt. See ``decode_iterations``."""
    request = DecodingRequest(prompt_ids=prompt_ids, config=config, rng=rng, stop=stop, trace=trace)
    return result_of(decode_iterations(request, target, draft))


def decode_iterations(
    request: DecodingRequest, target: Engine, draft: Engine | None
) -> Generator[LiveHypotheses, None, DecodeResult]:
    """Decode a request on engines whose rows are dropped; see ``decoded_alone``.

    Without ``costs`` draft_policy "throughput" has the draft called a few times first, and learns
    them.
    """
    if request.config.draft_policy == "throughput" and request.costs is None:
        check_request(request, target.spec, draft.spec if draft else None)
        costs = LearnedCosts()
        if draft is not None:
            learn_from_first_calls(costs, draft, request.source, request.clock)
        request = dataclasses.replace(request, costs=costs)
    decoder = BatchedDecoder(target, draft, costs=request.costs, clock=request.clock)
    decoder.keep_for(None)
    iterations = decoded_alone(decoder, request)
    return (yield from cast("Generator[LiveHypotheses, None, DecodeResult]", iterations))


def decoded_alone(decoder: Decoder, request: DecodingRequest) -> Iterations:
    """Decode one request on a decoder without other live requests; rows of earlier ones are reused.

    Yields the live hypotheses after every iteration and returns the result. Raises what
    ``check_decodable`` raises.
    """
    live = decoder.join(request)
    try:
        while True:
            for progress in decoder.iterate():
                event = progress.event
                if isinstance(event, IterationOutput):
                    yield event
                elif isinstance(event, DecodeResult):
                    return event
                elif isinstance(event, Preempted):
                    decoder.resume(live)
                else:
                    raise event
    finally:
        decoder.leave(live)


def decoded_together(
    decoder: Decoder, requests: Sequence[DecodingRequest], most_live: int
) -> list[DecodeResult]:
    """Decode requests, at most ``most_live`` at a time; raise what the first to fail raises."""
    results: dict[int, DecodeResult] = {}
    waiting, live = deque(enumerate(requests)), dict[LiveRequest, int]()
    try:
        while True:
            while waiting and len(live) < most_live:
                index, request = waiting[0]
                if not decoder.accepts(request, [each.request for each in live]):
                    break
                waiting.popleft()
                live[decoder.join(request)] = index
            if not live:
                return [results[index] for index in range(len(requests))]
            for progress in decoder.iterate():
                event = progress.event
                if isinstance(event, DecodeResult):
                    results[live.pop(progress.live)] = event
                elif isinstance(event, Preempted):
                    decoder.resume(progress.live)
                elif isinstance(event, BaseException):
                    event.add_note(f"prompt {live.pop(progress.live)} of the list")
                    raise event
    finally:
        for each in live:
            decoder.leave(each)
