"""API keys: read from a file, kept as hashes, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import logging
import stat
from collections.abc import Iterable
from pathlib import Path

from dsbd_ort.openai_server.errors import ServingError

_log = logging.getLogger(__name__)


class ApiKeys:
    """The keys that a server accepts; holds their hashes alone."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def accept(self, authorization: bytes | None) -> bool:
        """Tell whether the value of an Authorization header is ``Bearer`` and one of the keys.

        Every key is compared whatever the others gave, so that time tells nothing about them.
        """
        scheme, _, key = (authorization or b"").partition(b" ")
        digest = _digest(key.strip())
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(found)


def read_api_keys(file: Path) -> ApiKeys:
    """Read a file of one key a line; empty lines and those that begin with # do not count.

    Raises:
        ServingError: the file cannot be read, holds no key, or one that no header can carry.
    """
    try:
        mode = file.stat().st_mode
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ServingError(
            f"the API keys {file} cannot be read ({error}); give a text file with one key a line"
        ) from error
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        _log.warning("others can read the API keys in %s; run: chmod 600 %s", file, file)
    keys = [line.strip() for line in lines]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        raise ServingError(f"{file} holds no API key; write one a line")
    for number, key in enumerate(keys, 1):
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ServingError(
                f"key {number} of {file} has characters that no header carries; use ASCII without "
                "white space"
            )
    return ApiKeys(keys)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
