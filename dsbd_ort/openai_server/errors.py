"""From exceptions to answers: what a client can mend says how, what it cannot says no details."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from dsbd_errors import DsbdError
from dsbd_ort.decoding import DecodingConfig, DecodingError, ModelError
from dsbd_ort.engine import Cancelled, QueueFullError, ServiceClosedError
from dsbd_ort.openai_server.refusal import Refusal, bad_request
from dsbd_runtime.errors import CapacityError, InputError

_log = logging.getLogger(__name__)
_FIELDS = frozenset(field.name for field in dataclasses.fields(DecodingConfig)) | {"prompt"}
_COMPARED_TYPES = frozenset(("str", "list[str]", "list[int]", "list[list[int]]", "list[TextPart]"))
_RETRY = {"Retry-After": "1"}


class ServingError(DsbdError):
    """The server cannot be started as asked."""


def refusal_of(error: DsbdError) -> Refusal:
    """Return the answer to a request that the service does not take."""
    if isinstance(error, QueueFullError):
        return Refusal(429, str(error), code="queue_full", headers=_RETRY)
    if isinstance(error, ServiceClosedError):
        return draining()
    if isinstance(error, CapacityError):
        return bad_request(str(error), "prompt", "context_length_exceeded")
    if isinstance(error, DecodingError | InputError) and not isinstance(error, ModelError):
        first = str(error).partition(" ")[0]  # messages about a field begin with its name
        return bad_request(str(error), first if first in _FIELDS else None)
    return failure_of(error)


def failure_of(event: DsbdError | Cancelled) -> Refusal:
    """Return the answer to a request that began and could not be finished."""
    if isinstance(event, Cancelled):
        return draining()
    _log.error("a request failed: %s: %s", type(event).__name__, event)
    if isinstance(event, CapacityError):
        return Refusal(503, "no memory for this request now", code="no_memory", headers=_RETRY)
    return Refusal(500, "the engine failed; the server's log says why", code="engine_failed")


def draining() -> Refusal:
    """Return the answer of a server that is about to end."""
    return Refusal(503, "the server is shutting down", code="shutting_down", headers=_RETRY)


def answer_refusal(_: Request, error: Exception) -> Response:
    """Answer for a route that raised a Refusal."""
    assert isinstance(error, Refusal)  # registered for these alone
    return error.response()


def answer_http(_: Request, error: Exception) -> Response:
    """Answer for the framework: an unknown path, a method that a path does not take."""
    assert isinstance(error, HTTPException)  # registered for these alone
    return Refusal(error.status_code, str(error.detail), headers=error.headers or {}).response()


def answer_invalid(_: Request, error: Exception) -> Response:
    """Answer for a body that is no JSON, or not of the shape wanted; names its first fault."""
    assert isinstance(error, RequestValidationError)  # registered for these alone
    fault = error.errors()[0]
    reason = str(fault.get("ctx", {}).get("error") or fault["msg"])
    if fault["type"] == "json_invalid":
        return bad_request(f"the body is no JSON: {reason}").response()
    param = _place(fault["loc"])
    return bad_request(f"{param or 'the body'}: {reason}", param).response()


def _place(location: Sequence[Any]) -> str | None:
    """Return where in the body: ("body", "messages", 0, "content", "str") is messages.0.content.

    The last part is the type that a value of several was compared with first.
    """
    parts = [str(part) for part in location[1:]]
    return ".".join(part for part in parts if part not in _COMPARED_TYPES) or None
