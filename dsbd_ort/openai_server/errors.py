"""What can go wrong before a server serves: its keys, its address, its packages."""

from dsbd_errors import DsbdError


class ServingError(DsbdError):
    """The server cannot be started as asked."""
