"""ASGI middlewares of every request: access log, size and time limit of the body."""

import asyncio
import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsbd_ort.openai_server.errors import ErrorResponse, client_disconnected

_log = logging.getLogger(__name__)
_TYPE = b"content-type"
_FORMS = (b"", b"application/x-www-form-urlencoded")  # read as JSON by default
_CLOSE = {"Connection": "close"}


@dataclass(kw_only=True)
class AccessLog:
    """Logs and counts every response; an unexpected exception becomes a 500.

    A line holds method, path, status and seconds: nothing of query, headers or bodies.
    ``count`` is called with path and status of every response.
    """

    app: ASGIApp = field(kw_only=False)
    clock: Callable[[], float]
    count: Callable[[str, int], None]
    is_shown: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, began = 0, self.clock()

        async def recorded_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, recorded_send)
        except Exception as error:
            _log_bug(error)
            if status == 0:
                message = "internal error; the server's log says where"
                response = ErrorResponse(500, message, code="bug").response()
                await response(scope, receive, recorded_send)
        finally:
            self.count(scope["path"], status)
            if self.is_shown:
                seconds = self.clock() - began
                path = quote(scope["path"])[:200]  # printable, and short enough for a line
                _log.info("%s %s %d %.3f", scope["method"], path, status, seconds)


def _log_bug(error: Exception) -> None:
    """Log where an error was raised, without its message, which may quote a request."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    _log.error("internal error, %s, at:\n%s", type(error).__name__, frames)


@dataclass
class JsonByDefault:
    """Reads a body without Content-Type, or with that of ``curl -d``, as JSON.

    Not if the request has an Origin: a page of another site may send these types, while browsers
    send its JSON only with the consent of this server, which it never gives.
    """

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            headers = dict(scope["headers"])
            kind = headers.get(_TYPE, b"").partition(b";")[0].strip().lower()
            if kind in _FORMS and b"origin" not in headers:
                others = [(name, value) for name, value in scope["headers"] if name != _TYPE]
                scope = {**scope, "headers": [*others, (_TYPE, b"application/json")]}
        await self.app(scope, receive, send)


@dataclass(kw_only=True)
class BodyLimit:
    """Receives the whole body, within its limits, before the application sees the request.

    limits_by_path: bytes and seconds of paths that have their own.
    """

    app: ASGIApp = field(kw_only=False)
    max_bytes: int
    timeout_s: float
    limits_by_path: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        max_bytes, timeout_s = self.limits_by_path.get(
            scope["path"], (self.max_bytes, self.timeout_s)
        )
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
            await self.app(scope, _ReceiveAgain(body, receive), send)


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
