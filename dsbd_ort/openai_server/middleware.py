"""ASGI middlewares of every request: access log, size and time limit of the body."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Mapping
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsbd_ort.openai_server.errors import ErrorResponse, client_disconnected

_log = logging.getLogger(__name__)
_TYPE = b"content-type"
_CLOSE = {"Connection": "close"}


class AccessLog:
    """Logs and counts every response; an unexpected exception becomes a 500.

    A line holds method, path, status and seconds: nothing of query, headers or bodies.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        clock: Callable[[], float],
        count: Callable[[str, int], None],
        is_shown: bool,
    ) -> None:
        """``count`` is called with path and status of every response."""
        self._app = app
        self._clock = clock
        self._count = count
        self._is_shown = is_shown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began = 0, self._clock()

        async def recorded_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, recorded_send)
        except Exception as error:
            _log_bug(error)
            if status == 0:
                message = "internal error; the server's log says where"
                response = ErrorResponse(500, message, code="bug").response()
                await response(scope, receive, recorded_send)
        finally:
            self._count(scope["path"], status)
            if self._is_shown:
                seconds = self._clock() - began
                path = quote(scope["path"])[:200]  # printable, and short enough for a line
                _log.info("%s %s %d %.3f", scope["method"], path, status, seconds)


def _log_bug(error: Exception) -> None:
    """Log where an error was raised, without its message, which may quote a request."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    _log.error("internal error, %s, at:\n%s", type(error).__name__, frames)


class JsonByDefault:
    """Reads a body without Content-Type, or with that of ``curl -d``, as JSON.

    Not if the request has an Origin: a page of another site may send these types, while browsers
    send its JSON only with the consent of this server, which it never gives.
    """

    _TAKEN = (b"", b"application/x-www-form-urlencoded")

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            headers = dict(scope["headers"])
            kind = headers.get(_TYPE, b"").partition(b";")[0].strip().lower()
            if kind in self._TAKEN and b"origin" not in headers:
                others = [(name, value) for name, value in scope["headers"] if name != _TYPE]
                scope = {**scope, "headers": [*others, (_TYPE, b"application/json")]}
        await self._app(scope, receive, send)


class BodyLimit:
    """Receives the whole body, within its limits, before the application sees the request."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_bytes: int,
        timeout_s: float,
        limits_by_path: Mapping[str, tuple[int, float]] | None = None,
    ) -> None:
        """``limits_by_path``: bytes and seconds of paths that have their own."""
        self._app = app
        self._limits = max_bytes, timeout_s
        self._limits_by_path = limits_by_path or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        max_bytes, timeout_s = self._limits_by_path.get(scope["path"], self._limits)
        try:
            async with asyncio.timeout(timeout_s):
                body = await _received(receive, max_bytes)
        except TimeoutError:
            error = ErrorResponse(
                408,
                f"the body did not arrive within {timeout_s:g} s",
                code="body_timeout",
                headers=_CLOSE,
            )
            await error.response()(scope, receive, send)
        except ErrorResponse as error:
            await error.response()(scope, receive, send)
        else:
            await self._app(scope, _ReceiveAgain(body, receive), send)


async def _received(receive: Receive, max_bytes: int) -> bytes:
    """Return the body.

    A body that is too large is read to its end and dropped: a client that is still sending when
    the connection closes would not see the response.
    """
    body = bytearray()
    num_bytes, has_more = 0, True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise client_disconnected()
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes <= max_bytes:
            body += part
        has_more = message.get("more_body", False)
    if num_bytes > max_bytes:
        raise ErrorResponse(
            413,
            f"the body has {num_bytes} bytes, this server allows {max_bytes}; send less",
            code="body_too_large",
            headers=_CLOSE,
        )
    return bytes(body)


class _ReceiveAgain:
    """An ASGI ``receive`` that replays a body already received."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._first: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self._receive = receive

    async def __call__(self) -> Message:
        message, self._first = self._first, None
        return message or await self._receive()
