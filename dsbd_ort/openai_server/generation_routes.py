"""The routes that generate."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from dsbd_ort.openai_server.answerer import Answerer
from dsbd_ort.openai_server.chat import ChatCompletion, ChatShape
from dsbd_ort.openai_server.completions import Completion, CompletionShape
from dsbd_ort.openai_server.planner import Planner
from dsbd_ort.openai_server.protocol import ChatBody, CompletionBody
from dsbd_ort.openai_server.refusal import ErrorBody

_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody},
    "5XX": {"model": ErrorBody},
}


def generation_routes(answerer: Answerer, planner: Planner) -> APIRouter:
    """Return the two routes."""
    router = APIRouter(prefix="/v1")

    @router.post(
        "/completions",
        response_model=None,
        responses={200: {"model": Completion, "content": _STREAM}, **_ERRORS},
    )
    async def completions(request: Request, body: CompletionBody) -> Response:
        """Continue prompts."""
        return await answerer.answer(request, body, planner.of_completion, CompletionShape, "cmpl")

    @router.post(
        "/chat/completions",
        response_model=None,
        responses={200: {"model": ChatCompletion, "content": _STREAM}, **_ERRORS},
    )
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        """Answer a conversation."""
        return await answerer.answer(request, body, planner.of_chat, ChatShape, "chatcmpl")

    return router
