"""What can go wrong around a batch: its files or its workers, never a single line of it."""

from dsbd_errors import DsbdError


class BatchError(DsbdError):
    """The input cannot be read, the output cannot be written or gone on with, a worker ended."""
