"""Error of an engine that breaks its contract."""

from dsbd_errors import DsbdError


class ModelError(DsbdError, ValueError):
    """An engine returned what the contract of a forward does not allow."""
