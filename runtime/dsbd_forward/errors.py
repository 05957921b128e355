"""What can go wrong at the seam: an engine that breaks its word."""

from dsbd_errors import DsbdError


class ModelError(DsbdError, ValueError):
    """An engine returned what the contract of a forward does not allow."""
