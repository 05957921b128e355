"""ASGI middleware: without a key nothing is read, and nothing is told."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dsbd_ort.openai_server.api_keys import ApiKeys
from dsbd_ort.openai_server.refusal import Refusal

_OPEN = frozenset(("/health", "/ready", "/metrics"))  # the very paths: no other spelling of one


class KeyCheck:
    """Lets requests with a key through; a path that is not open is closed, known or unknown."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, *, everywhere: bool) -> None:
        self._app = app
        self._keys = keys
        self._open = frozenset[str]() if everywhere else _OPEN

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on or refuse it."""
        if scope["type"] != "http" or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("authorization")
        if self._keys.accept(None if given is None else given.encode("latin-1")):
            await self._app(scope, receive, send)
            return
        what = "wrong" if given else "missing"
        error = Refusal(
            401,
            f"the API key is {what}; send the header Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)
