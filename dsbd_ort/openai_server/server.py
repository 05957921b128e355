"""uvicorn server with graceful shutdown and connection timeouts, and its listening socket."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from dsbd_ort.engine import Service
from dsbd_ort.engine.limits import MOST_SECONDS, check_count, check_seconds
from dsbd_ort.openai_server.errors import ServingError
from dsbd_ort.openai_server.generation import Gate

_log = logging.getLogger(__name__)
_LAST_RESPONSES_S = 2  # for the responses to cancelled requests to reach their clients


def listening_socket(host: str, port: int, *, stuck_after_s: float) -> socket.socket:
    """Return a bound socket; port 0 picks a free one. ServingError: the address cannot be bound.

    On Linux the kernel drops a connection if the client acknowledges no data for
    ``stuck_after_s``, because it has vanished or stopped reading.
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


class GracefulServer(uvicorn.Server):
    """Drains on the first signal, cancels on the second; a third one does not wait.

    While requests finish, the server still listens, so that /ready can return 503. After
    ``shutdown_timeout_s``, or a second signal, the remaining requests are cancelled, and their
    clients get an error. Clients that do not read the error soon are disconnected.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        gate: Gate,
        *,
        idle_timeout_s: int,
        shutdown_timeout_s: float,
        max_connections: int,
    ) -> None:
        check_count("idle_timeout_s", idle_timeout_s, 1, MOST_SECONDS)
        check_seconds("shutdown_timeout_s", shutdown_timeout_s, may_be_zero=True)
        check_count("max_connections", max_connections, 1)
        super().__init__(
            uvicorn.Config(
                _Cancellable(app),
                http=TimedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=idle_timeout_s,
                timeout_graceful_shutdown=_LAST_RESPONSES_S + 1,  # then uvicorn cancels tasks
                limit_concurrency=max_connections,
            )
        )
        self._service = service
        self._gate = gate
        self._shutdown_timeout_s = shutdown_timeout_s
        self._deadline: float | None = None
        self._has_patience = True
        self._when_listening: Callable[[], None] = lambda: None

    def run_on(self, listener: socket.socket, *, when_listening: Callable[[], None]) -> None:
        self._when_listening = when_listening
        self.run(sockets=[listener])
        self._service.close(drain=False)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen; signals are handled from here on."""
        await super().startup(sockets)
        self._when_listening()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self._has_patience:
            self.should_exit = self.force_exit = True
        self._has_patience = not self._gate.is_draining
        self._gate.drain()

    async def on_tick(self, counter: int) -> bool:
        """Check ten times a second whether draining is done, or has taken too long."""
        if self._gate.is_draining:
            now = asyncio.get_running_loop().time()
            if self._deadline is None:
                self._deadline = now + self._shutdown_timeout_s
                _log.info("shutting down; %d requests in flight", self._gate.num_inside)
            if self._gate.num_inside == 0:
                self.should_exit = True
            elif now >= self._deadline or not self._has_patience:
                _log.warning("%d requests are cancelled", self._gate.num_inside)
                await asyncio.to_thread(self._service.close, drain=False)
                self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Give clients a short time to read their responses, then disconnect all."""
        after_s = 0 if self.force_exit else _LAST_RESPONSES_S
        disconnecting = asyncio.get_running_loop().call_later(after_s, self._disconnect_all)
        await super().shutdown(sockets)
        disconnecting.cancel()
        self._disconnect_all()

    def _disconnect_all(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, TimedProtocol):
                connection.transport.abort()


class _Cancellable:
    """Ends without an exception if its task is cancelled, for which uvicorn logs a traceback."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # only when the server ends
            await self._app(scope, receive, send)


class TimedProtocol(H11Protocol):
    """An HTTP/1.1 connection, closed if no request begins within uvicorn's ``timeout_keep_alive``.

    uvicorn itself waits without limit for the first bytes of a connection, for the rest of a
    request's head, and for the rest of a body that the application no longer reads.
    """

    _expiry: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the head of the first request."""
        super().connection_made(transport)
        self._await_request(after=None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Start the timer for the head of the next request, even if other bytes arrive."""
        answered = self.cycle
        super().on_response_complete()
        self._await_request(after=answered)

    def _await_request(self, *, after: RequestResponseCycle | None) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = self.loop.call_later(self.timeout_keep_alive, self._close_unless, after)

    def _close_unless(self, after: RequestResponseCycle | None) -> None:
        """Close if no request followed that of ``after``; buffered data is still sent."""
        if self.cycle is after:
            self.transport.close()
