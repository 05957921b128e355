"""uvicorn's HTTP/1.1 connection, closed when its client sends no request.

uvicorn waits for ever for the first bytes of a connection, for the rest of a request's head, and
for a body that nobody reads any more.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle


class TimedProtocol(H11Protocol):
    """Closes a connection that begins no request within uvicorn's ``timeout_keep_alive``."""

    _expiry: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection: its first request's head is awaited."""
        super().connection_made(transport)
        self._await_request(after=None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let a connection go."""
        if self._expiry is not None:
            self._expiry.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Await the next request's head, whatever the client sends instead of it."""
        answered = self.cycle
        super().on_response_complete()
        self._await_request(after=answered)

    def _await_request(self, *, after: RequestResponseCycle | None) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = self.loop.call_later(self.timeout_keep_alive, self._close_unless, after)

    def _close_unless(self, after: RequestResponseCycle | None) -> None:
        """Close if no request came after the one of ``after``; what is being sent goes out."""
        if self.cycle is after:
            self.transport.close()
