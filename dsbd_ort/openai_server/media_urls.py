"""Fetches files at http and https URLs for requests, only from public addresses, with limits.

Host names are resolved here, so that the connection uses the address that was checked; the same
holds after a redirect. Proxies of the environment are not used.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import SplitResult, urljoin, urlsplit

from dsbd_runtime.errors import InputError
from dsbd_runtime.typed_json import in_short

_PORTS = {"http": 80, "https": 443}
_MOST_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = {"User-Agent": "dsbd-serve", "Accept-Encoding": "identity", "Connection": "close"}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Return whether an address is public, and also the IPv4 address that it may embed."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo or (None, None))[1]
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast


class MediaFetcher:
    """Fetches files; each takes at most ``seconds``, redirects included."""

    def __init__(
        self,
        max_bytes: int,
        *,
        seconds: float = 10.0,
        is_allowed: Callable[[str], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``is_allowed``: whether an address may be connected to."""
        self._max_bytes, self._seconds, self._is_allowed = max_bytes, seconds, is_allowed
        self._tls = tls or ssl.create_default_context()

    def __call__(self, url: str) -> bytes:
        """Return the file at a URL; raise InputError if it cannot or must not be fetched."""
        deadline = time.monotonic() + self._seconds
        try:
            for _ in range(_MOST_REDIRECTS + 1):
                answer = self._answer(urlsplit(url), deadline)
                if isinstance(answer, bytes):
                    return answer
                url = urljoin(url, answer)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, InputError):
                raise
            if time.monotonic() >= deadline:
                raise InputError(
                    f"it was not fetched within {self._seconds:g} s; send the file itself, as a "
                    "data URL"
                ) from error
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"it cannot be fetched ({reason}); check the URL") from error
        raise InputError(f"it has more than {_MOST_REDIRECTS} redirects; give the last URL")

    def _answer(self, url: SplitResult, deadline: float) -> bytes | str:
        """Return the file, or the location that the server redirects to."""
        with self._connected(url, deadline) as stream:
            connection = http.client.HTTPConnection(url.hostname or "")
            connection.sock = stream
            path = f"{url.path or '/'}{'?' if url.query else ''}{url.query}"
            host = url.netloc.rpartition("@")[2]
            connection.request("GET", path, headers={"Host": host, **_HEADERS})
            with connection.getresponse() as answer:
                location = answer.getheader("Location")
                if answer.status in _REDIRECTS and location:
                    return location
                if answer.status != 200:
                    raise InputError(f"its server answers {answer.status}; check the URL")
                data = answer.read(self._max_bytes + 1)
        if len(data) > self._max_bytes:
            raise InputError(f"it has more than the {self._max_bytes} bytes that are allowed")
        if time.monotonic() >= deadline:  # it may be cut
            raise TimeoutError
        return data

    @contextlib.contextmanager
    def _connected(self, url: SplitResult, deadline: float) -> Iterator[socket.socket]:
        """Connect to the server of a URL; the connection ends at the deadline."""
        if url.scheme not in _PORTS or not url.hostname:
            raise InputError(f"it leads to {in_short(url.geturl())}; expected http or https")
        address = self._address(url.hostname, url.port or _PORTS[url.scheme])
        left = max(deadline - time.monotonic(), 0.001)
        with socket.create_connection(address, timeout=left) as stream, stream.dup() as watched:

            def end() -> None:
                with contextlib.suppress(OSError):  # it is closed already
                    watched.shutdown(socket.SHUT_RDWR)

            timer = threading.Timer(max(deadline - time.monotonic(), 0), end)
            timer.daemon = True
            timer.start()
            try:
                if url.scheme == "http":
                    yield stream
                else:
                    with self._tls.wrap_socket(stream, server_hostname=url.hostname) as secure:
                        yield secure
            finally:
                timer.cancel()

    def _address(self, host: str, port: int) -> tuple[str, int]:
        """Return the first address of a host; all its addresses must be allowed."""
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(each[4][0]) for each in infos]
        if not all(map(self._is_allowed, addresses)):
            raise InputError(
                f"{in_short(host)} is a private address; expected one of the internet, or a data "
                "URL"
            )
        return addresses[0], port
