"""Why a service does not answer a request that is right in itself."""

from dsbd_errors import DsbdError


class QueueFullError(DsbdError):
    """As many requests wait as may; later there may be room."""


class ServiceClosedError(DsbdError):
    """The service is closed, or about to be."""


class InternalError(DsbdError):
    """A bug; the log has the traceback."""


class EnginesEndedError(InternalError):
    """The thread that runs the engines has ended: the service answers nothing any more."""
