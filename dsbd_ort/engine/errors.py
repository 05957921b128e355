"""Errors of a service, as opposed to those of an invalid request.

QueueFullError        too many requests wait
ServiceClosedError    the service is closed, or is closing
InternalError         a bug
└── EnginesEndedError    the thread that runs the engines has ended
"""

from dsbd_errors import DsbdError


class QueueFullError(DsbdError):
    """The queue is full; a later attempt may succeed."""


class ServiceClosedError(DsbdError):
    """The service is closed, or is closing."""


class InternalError(DsbdError):
    """A bug; the log has the traceback."""


class EnginesEndedError(InternalError):
    """The thread that runs the engines has ended: the service accepts no more requests."""
