"""Reading of JSON bodies in threads, so that a large body does not delay other clients."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, HTTPException, Request, Response, params
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, ValidationError

from dsbd_ort.openai_server.errors import ErrorResponse, bad_request

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)
Entries = Annotated[list[T], Field(fail_fast=True)]
"""A list in a body. Only the first invalid entry is reported: reporting all may take seconds."""
_MOST_FAULTS = 1000  # describing one takes 15 us, during which no other thread runs
_LARGE = 100_000  # bytes of a body
_LARGE_THREADS = 4


def prepare(app: FastAPI, max_body_bytes: int) -> None:
    """Make every route that is added from now on a ``BodyRoute``.

    max_body_bytes: the limit of a body without media.
    """
    app.router.route_class = BodyRoute
    app.state.max_body_bytes = max_body_bytes
    app.state.large_bodies = ThreadPoolExecutor(_LARGE_THREADS, "large bodies")


class BodyRoute(APIRoute):
    """A route whose endpoint, if it takes a JSON body, is called with (request, body).

    ``request.state.threads`` are the threads that should process the request. Requests with large
    bodies have their own threads, so that they delay only each other. None: the event loop's.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler that reads a body as the framework does, but in a thread."""
        if self.body_field is None or isinstance(self.body_field.field_info, params.Form):
            return super().get_route_handler()
        model: Any = self.body_field.field_info.annotation

        async def handle(request: Request) -> Response:
            content = await request.body()
            state, kind = request.app.state, request.headers.get("content-type", "")
            threads = state.large_bodies if len(content) > _LARGE else None
            request.state.threads = threads
            body = await asyncio.get_running_loop().run_in_executor(
                threads, _read, model, content, kind, state.max_body_bytes
            )
            response: Response = await self.endpoint(request, body)
            return response

        return handle


def _read(model: type[Model], content: bytes, kind: str, most_bytes: int) -> Model:
    """Return a body; RequestValidationError, HTTPException, ErrorResponse: it is invalid.

    most_bytes: limit of the body without its media.
    """
    message = Message()
    message["content-type"] = kind
    is_json = message.get_content_type().endswith(("/json", "+json"))
    if not (content and is_json):
        fault: dict[str, Any] = {"type": "missing", "loc": ("body",), "msg": "Field required"}
        raise RequestValidationError([fault])
    _check_size(content.count(b","), most_bytes)  # before as many values are allocated
    try:
        data = json.loads(content)
    except json.JSONDecodeError as error:
        context = {"error": error.msg}
        fault = {"type": "json_invalid", "loc": ("body", error.pos), "ctx": context}
        raise RequestValidationError([fault]) from error
    except (ValueError, RecursionError) as error:  # another encoding, or nested too deep
        raise HTTPException(400, "There was an error parsing the body") from error
    body = validated(model, data)
    _check_size(len(content) - getattr(body, "num_media_bytes", 0), most_bytes)
    return body


def _check_size(num_bytes: int, most_bytes: int) -> None:
    if num_bytes > most_bytes:
        raise ErrorResponse(
            413,
            f"the body has {num_bytes} bytes or more without its sounds and pictures, this server "
            f"allows {most_bytes}; send less",
            code="body_too_large",
        )


def validated(model: type[Model], data: Any) -> Model:
    """Return data as a pydantic model; raise RequestValidationError if it is invalid."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        if error.error_count() > _MOST_FAULTS:
            number = error.error_count()
            raise bad_request(
                f"the body has {number} invalid fields; send those of the endpoint"
            ) from None
        faults = error.errors(include_url=False, include_input=False)
        located = [{**each, "loc": ("body", *each["loc"])} for each in faults]
        raise RequestValidationError(located, body=data) from None
