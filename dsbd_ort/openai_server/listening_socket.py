"""The socket that a server listens on."""

from __future__ import annotations

import socket

from dsbd_ort.number_checks import check_seconds
from dsbd_ort.openai_server.errors import ServingError


def listening_socket(host: str, port: int, *, stuck_after_s: float) -> socket.socket:
    """Return a bound socket; port 0 takes any that is free.

    Connections that it accepts are cut by the kernel, where it can, once their peer has taken
    nothing of what was sent for ``stuck_after_s``: a client that has gone without a word, or reads
    no more.

    Raises:
        ServingError: the address is not to be had.
    """
    check_seconds("stuck_after_s", stuck_after_s)
    listener = None
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            milliseconds = int(1000 * stuck_after_s)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        listener.bind(address)
    except (OSError, OverflowError, UnicodeError) as error:
        if listener is not None:
            listener.close()
        raise ServingError(
            f"cannot listen on host {host!r}, port {port} ({error}); choose others with --host "
            "and --port"
        ) from error
    return listener
