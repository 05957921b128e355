"""Requests of many callers on one pipeline: they share engine calls and a bounded memory."""

from dsbd_ort.engine.errors import EnginesEndedError, QueueFullError, ServiceClosedError
from dsbd_ort.engine.events import Cancelled, ServiceEvent
from dsbd_ort.engine.limits import ServiceLimits
from dsbd_ort.engine.live_request import LiveRequest
from dsbd_ort.engine.service import Service, ServiceStats

__all__ = [
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
