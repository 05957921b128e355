"""ASGI middleware: one line a request, and no failure without an answer.

A line holds method, path, status and seconds: nothing of query, headers or bodies.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsbd_ort.openai_server.refusal import Refusal

_log = logging.getLogger(__name__)


class AccessLog:
    """Logs what was answered, and tells it to ``count``."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        clock: Callable[[], float],
        count: Callable[[str, int], None],
        is_shown: bool,
    ) -> None:
        """``count`` gets path and status of every answer."""
        self._app = app
        self._clock = clock
        self._count = count
        self._is_shown = is_shown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began = 0, self._clock()

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            _log_bug(error)
            if status == 0:
                answer = Refusal(500, "internal error; the server's log says where", code="bug")
                await answer.response()(scope, receive, noted)
        finally:
            self._count(scope["path"], status)
            if self._is_shown:
                seconds = self._clock() - began
                _log.info("%s %s %d %.3f", scope["method"], _shown(scope["path"]), status, seconds)


def _shown(path: str) -> str:
    """Return a path in printable characters, short enough for a line."""
    return quote(path)[:200]


def _log_bug(error: Exception) -> None:
    """Say where an error comes from, not what it says: that may quote what a client sent."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    _log.error("internal error, %s, at:\n%s", type(error).__name__, frames)
