"""An answer that refuses, in OpenAI's shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from fastapi import Response
from pydantic import BaseModel

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ErrorFields(BaseModel):
    """What was wrong, which field, and a name for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that refuses."""

    error: ErrorFields


@dataclass(eq=False)
class Refusal(Exception):
    """An answer that refuses; no DsbdError, for it is what becomes of one.

    Attributes:
        status: HTTP status.
        message: what is wrong, the value, what was expected, the mend.
        param: the field of the body that is wrong, None where it is none.
        code: a name for programs.
        headers: that the answer carries.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> ErrorBody:
        """Return the error as the body that clients know."""
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        return ErrorBody(
            error=ErrorFields(
                message=_shortened(self.message, 500),
                type=_TYPES.get(self.status, usual),
                param=self.param and _shortened(self.param, 100),
                code=self.code,
            )
        )

    def json(self) -> str:
        """Return the body in ASCII: a message may quote what is no character."""
        return json.dumps(self.body().model_dump())

    def response(self) -> Response:
        """Return the whole answer."""
        return Response(
            self.json(), self.status, headers=self.headers, media_type="application/json"
        )


def _shortened(text: str, most: int) -> str:
    """Return at most so many characters: a message may quote a name from the body."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def bad_request(message: str, param: str | None = None, code: str | None = None) -> Refusal:
    """Return the refusal of a request that cannot be answered as it is."""
    return Refusal(400, message, param, code)
