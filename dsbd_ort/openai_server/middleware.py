"""ASGI middlewares for every request: access log, size and time limit of the body, API keys."""

import asyncio
import hashlib
import hmac
import logging
import stat
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsbd_errors.text_files import text_of
from dsbd_ort.openai_server.errors import ErrorResponse, ServingError, client_disconnected

_log = logging.getLogger(__name__)
_TYPE = b"content-type"
_FORMS = (b"", b"application/x-www-form-urlencoded")  # read as JSON by default
_CLOSE = {"Connection": "close"}


@dataclass(kw_only=True)
class AccessLog:
    """Logs and counts every response; an unexpected exception becomes a response with status 500.

    A line has method, path, status and seconds, but nothing of query, headers or bodies.
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
    """Log the traceback of an error without its message, which may quote a request."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    _log.error("internal error, %s, at:\n%s", type(error).__name__, frames)


@dataclass
class EndingSlash:
    """Removes a slash at the end of a path, which clients may add when they join paths."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": without_slash(scope["path"])}
        await self.app(scope, receive, send)


def without_slash(path: str) -> str:
    """Return a path without slashes at its end; the root is one slash."""
    return path.rstrip("/") or "/"


@dataclass
class JsonByDefault:
    """Reads a body without Content-Type, or with the Content-Type of ``curl -d``, as JSON.

    A request with an Origin is left unchanged. Browsers let a page of another site send these
    types, but JSON only with the consent of this server, which it never gives.
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
    """Receives the whole body, within its limits, before the application gets the request.

    limits_by_path: bytes and seconds for paths with their own limits.
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

    A body that is too large is read to its end, because a client that still sends would miss the
    response.
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
    def __init__(self, body: bytes, receive: Receive) -> None:
        self._first: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self._receive = receive

    async def __call__(self) -> Message:
        message, self._first = self._first, None
        return message or await self._receive()


_OPEN_PATHS = frozenset(("/health", "/ready", "/metrics"))  # exact: no other spelling is open


class ApiKeys:
    """The keys that a server accepts, as hashes."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def accept(self, authorization: bytes | None) -> bool:
        """Return whether an Authorization header is ``Bearer`` and one of the keys.

        Every key is compared, also after a match, so that the time taken reveals nothing.
        """
        scheme, _, key = (authorization or b"").partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, accepted) for accepted in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def read_api_keys(file: Path) -> ApiKeys:
    """Read a file of one key per line; empty lines and lines that begin with # are skipped.

    ServingError: the file cannot be read, has no key, or has a key that no header can carry.
    """
    try:
        mode = file.stat().st_mode
        lines = text_of(file.read_bytes()).splitlines()
    except (OSError, UnicodeError) as error:
        raise ServingError(
            f"the API keys {file} cannot be read ({error}); expected a text file with one key per "
            "line"
        ) from error
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        _log.warning("others can read the API keys in %s; run: chmod 600 %s", file, file)
    keys = [line.strip() for line in lines]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        raise ServingError(f"{file} has no API key; write one per line")
    for number, key in enumerate(keys, 1):
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ServingError(
                f"key {number} of {file} has characters that no header can carry; use ASCII "
                "without white space"
            )
    return ApiKeys(keys)


class ApiKeyCheck:
    """ASGI middleware that rejects requests without a key, before their bodies are read."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, *, everywhere: bool) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = frozenset[str]() if everywhere else _OPEN_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("authorization")
        if self._keys.accept(None if given is None else given.encode("latin-1")):
            await self._app(scope, receive, send)
            return
        error = ErrorResponse(
            401,
            f"the API key is {'wrong' if given else 'missing'}; send the header Authorization: "
            "Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
