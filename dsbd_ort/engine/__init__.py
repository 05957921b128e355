"""Concurrent requests on one pipeline: they share the engine calls and a bounded cache."""

from dsbd_ort.engine.async_stream import AsyncStream
from dsbd_ort.engine.errors import EnginesEndedError, QueueFullError, ServiceClosedError
from dsbd_ort.engine.limits import ServiceLimits
from dsbd_ort.engine.scheduler import Cancelled, LiveRequest, ServiceEvent
from dsbd_ort.engine.service import Service, ServiceStats

__all__ = [
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
