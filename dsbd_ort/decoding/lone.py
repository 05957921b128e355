"""One request that has both engines to itself: every engine call is made as soon as it is asked."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Sequence

import numpy as np

from dsbd_ort.decoding.cached_prefix import CachedPrefix
from dsbd_ort.decoding.chance import Chance
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.cost_curve import EngineCosts, measure_costs
from dsbd_ort.decoding.decode import DecodingRequest, decoding_loop
from dsbd_ort.decoding.decoded import DecodeResult, DecodeStep
from dsbd_ort.decoding.experience import Experience
from dsbd_ort.decoding.meter import Clock
from dsbd_ort.decoding.request_checks import check_request
from dsbd_ort.decoding.step_model import EngineCall, Logits, StepModel
from dsbd_ort.decoding.stopping import StopState
from dsbd_ort.decoding.trace import TraceRecorder

Steps = Generator[DecodeStep, None, DecodeResult]


def decode(
    target: StepModel,
    draft: StepModel | None,
    prompt_ids: Sequence[int],
    config: DecodingConfig,
    rng: np.random.Generator,
    *,
    stop: StopState | None = None,
    trace: TraceRecorder | None = None,
) -> DecodeResult:
    """Continue a prompt. See ``decode_steps``."""
    steps = decode_steps(target, draft, prompt_ids, config, rng, stop=stop, trace=trace)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: DecodeResult = stop.value
            return result


def decode_steps(
    target: StepModel,
    draft: StepModel | None,
    prompt_ids: Sequence[int],
    config: DecodingConfig,
    rng: np.random.Generator,
    *,
    stop: StopState | None = None,
    chance: Chance | None = None,
    clock: Clock = time.perf_counter,
    costs: EngineCosts | None = None,
    experience: Experience | None = None,
    prefixes: tuple[CachedPrefix, CachedPrefix] | None = None,
    trace: TraceRecorder | None = None,
) -> Steps:
    """Continue a prompt; yield the beams after every iteration, return the result.

    The models and ``prefixes`` are those of ``decoding_loop``, which also says what is raised; the
    rest are the fields of ``DecodingRequest``. ``costs`` None has both engines measured first
    where the request needs it.
    """
    request = DecodingRequest(
        prompt_ids=prompt_ids,
        config=config,
        rng=rng,
        stop=stop,
        chance=chance,
        clock=clock,
        costs=costs,
        experience=experience,
        trace=trace,
    )
    if config.draft_policy == "throughput" and draft and costs is None:
        check_request(target, draft, prompt_ids, config, stop)
        request = dataclasses.replace(request, costs=measure_costs(target, draft, clock))
        prefixes = None
    return (yield from steps_of(request, target, draft, prefixes))


def steps_of(
    request: DecodingRequest,
    target: StepModel,
    draft: StepModel | None,
    prefixes: tuple[CachedPrefix, CachedPrefix] | None,
) -> Steps:
    """Drive the loop of a request; yield its steps, return its result."""
    loop = decoding_loop(request, target, draft, prefixes)
    logits: Logits | None = None
    while True:
        try:
            wanted = loop.send(logits)
        except StopIteration as stop:
            result: DecodeResult = stop.value
            return result
        if isinstance(wanted, EngineCall):
            model = target if wanted.role == "target" else draft
            assert model is not None  # only a draft that was given is called
            logits = wanted.run(model)
        else:
            logits = None
            yield wanted
