"""Concurrent requests on one pipeline: they share the engine calls and a bounded cache.

A request from HTTP to the loop:

    GenerationPlan     openai_server: prompts and options of an HTTP request, data of its response
    Generation         openai_server: these submitted, awaited within a deadline, cancelled together
    Submission         here: one of them: waiting, running, preempted or ended
    DecodingRequest    decoding: its prompt, options and randomness
    LiveRequest        decoding: its loop, its rows of the caches, the engine call that it waits for
"""

from dsbd_ort.engine.async_stream import AsyncEvents, AsyncStream
from dsbd_ort.engine.errors import EnginesEndedError, QueueFullError, ServiceClosedError
from dsbd_ort.engine.limits import ServiceLimits
from dsbd_ort.engine.scheduler import Cancelled, ServiceEvent, Submission
from dsbd_ort.engine.service import Service, ServiceStats

__all__ = [
    "AsyncEvents",
    "AsyncStream",
    "Cancelled",
    "EnginesEndedError",
    "QueueFullError",
    "Service",
    "ServiceClosedError",
    "ServiceEvent",
    "ServiceLimits",
    "ServiceStats",
    "Submission",
]
