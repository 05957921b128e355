"""What can go wrong when the C library is built."""

from dsbd_errors import DsbdError


class BuildError(DsbdError):
    """The Python or the machine lacks what the C library is built from."""
