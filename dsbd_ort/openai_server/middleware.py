"""ASGI middleware: a body has a size and a time, whatever its headers say."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsbd_ort.openai_server.refusal import Refusal

_CLOSE = {"Connection": "close"}


class BodyLimit:
    """Reads the whole body before anything else sees the request."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its body, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                body = await self._read(receive)
        except TimeoutError:
            error = Refusal(
                408,
                f"the body did not arrive within {self._timeout_s:g} s",
                code="body_timeout",
                headers=_CLOSE,
            )
            await error.response()(scope, receive, send)
        except Refusal as error:
            await error.response()(scope, receive, send)
        else:
            await self._app(scope, _Replay(body, receive), send)

    async def _read(self, receive: Receive) -> bytes:
        """Return the body.

        One that is too large is read on, but not kept: a client that is still sending when the
        connection closes would not see the answer.
        """
        body = bytearray()
        num_bytes, has_more = 0, True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refusal(499, "the client has gone")
            piece = message.get("body", b"")
            num_bytes += len(piece)
            if num_bytes <= self._max_bytes:
                body += piece
            has_more = message.get("more_body", False)
        if num_bytes > self._max_bytes:
            raise Refusal(
                413,
                f"the body has {num_bytes} bytes, this server takes {self._max_bytes}; send less",
                code="body_too_large",
                headers=_CLOSE,
            )
        return bytes(body)


class _Replay:
    """A receive that begins with a body that was read."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._first: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self._receive = receive

    async def __call__(self) -> Message:
        message, self._first = self._first, None
        return message or await self._receive()
