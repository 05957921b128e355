"""The routes for those who run the server, and the list of models."""

from __future__ import annotations

import time
from typing import Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel

from dsbd_ort.openai_server.answerer import unknown_model
from dsbd_ort.openai_server.errors import draining
from dsbd_ort.openai_server.gate import Gate
from dsbd_ort.openai_server.metrics import Metrics
from dsbd_ort.openai_server.refusal import ErrorBody

_REFUSED: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody}}
_NOT_READY: dict[int | str, dict[str, Any]] = {503: {"model": ErrorBody}}


class State(BaseModel):
    """How the server is."""

    status: Literal["alive", "ready"]


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["dsbd-ort"] = "dsbd-ort"
    max_model_len: int


class Models(BaseModel):
    """All models that are served."""

    object: Literal["list"] = "list"
    data: list[Model]


def operation_routes(gate: Gate, metrics: Metrics) -> APIRouter:
    """Return /health, /ready and /metrics."""
    router = APIRouter()

    @router.get("/health", responses=_REFUSED)
    async def health() -> State:
        """Tell that the process answers."""
        return State(status="alive")

    @router.get("/ready", responses={**_REFUSED, **_NOT_READY})
    async def ready() -> State:
        """Tell whether new requests are let in."""
        if gate.is_draining:
            raise draining()
        return State(status="ready")

    @router.get("/metrics", response_class=PlainTextResponse, responses=_REFUSED)
    async def all_metrics() -> Response:
        """Return all metrics in Prometheus' text format."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router


def model_routes(model_name: str, context_length: int) -> APIRouter:
    """Return /v1/models and /v1/models/NAME."""
    router = APIRouter(prefix="/v1")
    served = Model(id=model_name, created=int(time.time()), max_model_len=context_length)

    @router.get("/models", responses=_REFUSED)
    async def models() -> Models:
        """List the one model of this server."""
        return Models(data=[served])

    @router.get("/models/{name:path}", responses=_REFUSED)
    async def model(name: str) -> Model:
        """Describe a model."""
        if name != model_name:
            raise unknown_model(name, model_name)
        return served

    return router
