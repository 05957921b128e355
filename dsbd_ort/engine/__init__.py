"""Concurrent requests on one pipeline: they share the engine calls and a bounded cache.

A request from HTTP to the loop:

    GenerationPlan     openai_server: prompts and options of an HTTP request, data of its response
    Generation         openai_server: these submitted, awaited within a deadline, cancelled together
    LiveRequest        here: one of them, with its state: waiting, running, preempted, ended
    DecodingRequest    decoding: its prompt, options and randomness
    BatchMember        decoding: its loop, its rows of the caches, the engine call that it waits for
"""

from dsbd_ort.engine.async_stream import AsyncEvents, AsyncStream
from dsbd_ort.engine.errors import EnginesEndedError, QueueFullError, ServiceClosedError
from dsbd_ort.engine.limits import ServiceLimits
from dsbd_ort.engine.scheduler import Cancelled, LiveRequest, ServiceEvent
from dsbd_ort.engine.service import Service, ServiceStats

__all__ = [
    "AsyncEvents",
    "AsyncStream",
    "Cancelled",
    "EnginesEndedError",
    "LiveRequest",
    "QueueFullError",
    "Service",
    "ServiceClosedError",
    "ServiceEvent",
    "ServiceLimits",
    "ServiceStats",
]
