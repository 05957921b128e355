"""Errors of the server: failures to start, and the error responses to requests."""

import dataclasses
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from dsbd_errors import DsbdError
from dsbd_ort.constraints.trial import GrammarTrialError
from dsbd_ort.decoding import DecodingConfig, DecodingError
from dsbd_ort.decoding.errors import ConstraintError
from dsbd_ort.engine import Cancelled, QueueFullError, ServiceClosedError
from dsbd_ort.speech.speech_request import SPEECH_OPTIONS
from dsbd_runtime.errors import CapacityError, InputError

_log = logging.getLogger(__name__)
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_FIELDS = frozenset(field.name for field in dataclasses.fields(DecodingConfig)) | {
    "prompt",
    "messages",
    *SPEECH_OPTIONS,
}
_LATER = "/v1/responses"
AUDIO_PREFIX = "/v1/audio/"  # bodies of these paths are forms
_NO_OBJECT = ("dict_type", "model_type", "model_attributes_type")  # their texts name Python types
_INDEX = re.compile(r"\[(\d+)\]")
_RETRY = {"Retry-After": "1"}


class ServingError(DsbdError):
    """The server cannot start: unusable API keys, or an address it cannot listen on."""


class ErrorFields(BaseModel):
    """OpenAI's error object: message, kind, the field at fault, and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error response."""

    error: ErrorFields


@dataclass(eq=False)
class ErrorResponse(Exception):
    """An HTTP error response in OpenAI's format. It is no DsbdError, but may be caused by one.

    message: the fault, the given value, the expected value, and the fix.
    param: the invalid field of the body; None if no single field is invalid.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> ErrorBody:
        default_type = "server_error" if self.status >= 500 else "invalid_request_error"
        return ErrorBody(
            error=ErrorFields(
                message=_shortened(self.message, 500),
                type=_ERROR_TYPES.get(self.status, default_type),
                param=self.param and _shortened(self.param, 100),
                code=self.code,
            )
        )

    def json(self) -> str:
        """Return the body in ASCII: a message may quote a lone surrogate."""
        return json.dumps(self.body().model_dump())

    def response(self) -> Response:
        return Response(
            self.json(), self.status, headers=self.headers, media_type="application/json"
        )


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ErrorResponse:
    """Return the response to an invalid request."""
    return ErrorResponse(400, message, param, code)


def unknown_model(requested: str, served: str) -> ErrorResponse:
    """Return the response to a request for another model."""
    message = f"unknown model {requested!r}; use {served!r}"
    return ErrorResponse(404, message, param="model", code="model_not_found")


def client_disconnected() -> ErrorResponse:
    """Return the status, for access log and metrics, of a client that has disconnected."""
    return ErrorResponse(499, "the client disconnected")


def shutting_down() -> ErrorResponse:
    """Return the response of a server that is draining."""
    return ErrorResponse(503, "the server is shutting down", code="shutting_down", headers=_RETRY)


def engine_ended() -> ErrorResponse:
    """Return the response of a server whose engine has failed."""
    return ErrorResponse(
        503, "the engine has stopped; restart the server; its log says why", code="engine_ended"
    )


def rejection(error: DsbdError) -> ErrorResponse:
    """Return the response to a request that the service rejects."""
    if isinstance(error, QueueFullError):
        return ErrorResponse(429, str(error), code="queue_full", headers=_RETRY)
    if isinstance(error, ServiceClosedError):
        return shutting_down()
    if isinstance(error, GrammarTrialError):
        _log.error("a grammar was not tried: %s", error)
        message = "this server cannot try grammars at the moment; try again later"
        return ErrorResponse(503, message, code="no_grammars", headers=_RETRY)
    if isinstance(error, CapacityError):
        return bad_request(str(error), "prompt", "context_length_exceeded")
    if isinstance(error, DecodingError | InputError):
        # messages about a field begin with its place
        first = str(error).removeprefix("the ").partition(" ")[0]
        place = _INDEX.sub(r".\1", {"source": "prompt"}.get(first, first.rstrip(",:")))
        return bad_request(str(error), place if place.partition(".")[0] in _FIELDS else None)
    return failure(error)


def failure(event: DsbdError | Cancelled) -> ErrorResponse:
    """Return the response to a request that failed after its start; it reveals no internals."""
    if isinstance(event, Cancelled):
        return shutting_down()
    if isinstance(event, ConstraintError):  # for example, no token may follow a path
        return bad_request(str(event), "constraint", "constraint_failed")
    _log.error("a request failed: %s: %s", type(event).__name__, event)
    if isinstance(event, CapacityError):
        message = "not enough memory for this request at the moment"
        return ErrorResponse(503, message, code="no_memory", headers=_RETRY)
    return ErrorResponse(500, "the engine failed; the server's log says why", code="engine_failed")


def handle_error_response(_: Request, error: Exception) -> Response:
    """Respond for a route that raised an ErrorResponse."""
    assert isinstance(error, ErrorResponse)  # registered only for these
    return error.response()


def handle_http_exception(request: Request, error: Exception) -> Response:
    """Respond for the framework: unknown path, method not allowed."""
    assert isinstance(error, HTTPException)  # registered only for these
    headers, message = error.headers or {}, str(error.detail)
    path = _shortened(request.url.path, 100)
    if error.status_code == 405 and (allowed := headers.get("Allow")):
        message = f"{request.method} {path} is not supported; use {allowed}"
    elif error.status_code == 404:
        absent = f"{path} is not supported" if path.startswith(_LATER) else f"unknown path {path}"
        paths: dict[str, dict[str, Any]] = request.app.openapi()["paths"]
        endpoints = (
            f"{method.upper()} {of}" for of, methods in paths.items() for method in methods
        )
        message = f"{absent}; this server has {', '.join(endpoints)}"
    return ErrorResponse(error.status_code, message, headers=headers).response()


def handle_validation_error(request: Request, error: Exception) -> Response:
    """Respond to invalid JSON, or to a body with invalid fields, of which it names the first."""
    assert isinstance(error, RequestValidationError)  # registered only for these
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    is_form = request.url.path.startswith(AUDIO_PREFIX)
    expected = "multipart/form-data" if is_form else "application/json"
    if not kind.lower().endswith((expected,) if is_form else ("/json", "+json")):
        return bad_request(
            f"Content-Type is {_shortened(kind, 80)!r}; expected {expected}"
        ).response()
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return bad_request(f"the body is invalid JSON: {first['ctx']['error']}").response()
    place, reason = _fault([_located(each, error.body) for each in error.errors()])
    param = ".".join(map(str, place)) or None
    return bad_request(f"{param or 'the body'}: {reason}", param).response()


_Place = tuple[str | int, ...]
_Located = tuple[_Place, _Place | None, str]
"""Place of a fault, place of the union-typed field that contains it (or None), and the reason."""


def _located(fault: Mapping[str, Any], body: Any) -> _Located:
    """Return a fault with its place in the body.

    pydantic's location names the member of a union too: the location of messages.0.content.1 is
    ("body", "messages", 0, "content", "list[ContentPart]", 1).
    """
    place: list[str | int] = []
    union, value = None, body
    location = fault["loc"][1:]
    for index, part in enumerate(location):
        try:
            value = value[part]
        except (LookupError, TypeError):
            if fault["type"] != "missing" or index < len(location) - 1:
                union = tuple(place) if union is None else union
                continue
        place.append(part)
    if fault["type"] in _NO_OBJECT:
        return tuple(place), union, "Input should be an object"
    return tuple(place), union, str(fault.get("ctx", {}).get("error") or fault["msg"])


def _fault(faults: Sequence[_Located]) -> tuple[_Place, str]:
    """Return place and reason of the first fault; in a union, those of the deepest fault.

    If several types of the union fail at that place, their reasons are joined.
    """
    place, union, reason = faults[0]
    if union is None:
        return place, reason
    others = [(place, reason) for place, its_union, reason in faults if its_union == union]
    place = max((place for place, _ in others), key=len)
    reason, *more = dict.fromkeys(reason for its_place, reason in others if its_place == place)
    return place, " or ".join([reason, *(each.removeprefix("Input should be ") for each in more)])


def _shortened(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."
