"""API keys: their file, their comparison in constant time, and the middleware that checks them."""

import hashlib
import hmac
import logging
import stat
from collections.abc import Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dsbd_ort.openai_server.errors import ErrorResponse, ServingError

_log = logging.getLogger(__name__)
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
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def read_api_keys(file: Path) -> ApiKeys:
    """Read a file of one key per line; empty lines and lines that begin with # are skipped.

    A ServingError is raised without a key, or for one that no header can carry.
    """
    try:
        mode = file.stat().st_mode
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
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
