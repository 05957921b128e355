"""The application: routes over a service, behind key, limits and log."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from dsbd_ort.openai_server.access_log import AccessLog
from dsbd_ort.openai_server.answerer import Answerer
from dsbd_ort.openai_server.engine_service import EngineService
from dsbd_ort.openai_server.errors import answer_http, answer_invalid, answer_refusal
from dsbd_ort.openai_server.gate import Gate
from dsbd_ort.openai_server.generation_routes import generation_routes
from dsbd_ort.openai_server.key_check import KeyCheck
from dsbd_ort.openai_server.metrics import Metrics
from dsbd_ort.openai_server.middleware import BodyLimit
from dsbd_ort.openai_server.planner import Planner
from dsbd_ort.openai_server.refusal import Refusal
from dsbd_ort.openai_server.routes import model_routes, operation_routes
from dsbd_ort.openai_server.settings import ServingSettings
from dsbd_ort.version import __version__
from dsbd_runtime.bundle import ROLES


def _random_seed() -> int:
    return secrets.randbelow(2**32)  # a number that JavaScript can hold as well


def create_app(
    service: EngineService,
    settings: ServingSettings,
    *,
    gate: Gate | None = None,
    clock: Callable[[], float] = time.monotonic,
    new_seed: Callable[[], int] = _random_seed,
    logs_access: bool = True,
) -> FastAPI:
    """Return the application; whoever made the service closes it.

    Args:
        service: answers the requests.
        settings: keys and limits.
        gate: closed by whoever ends the server; None for one that stays open.
        clock: seconds, for log and metrics.
        new_seed: for requests without a seed.
        logs_access: whether every request is a line of the log.
    """
    gate = gate or Gate()
    metrics = Metrics(service, settings.model_name, clock)
    app = FastAPI(
        title="dsbd-serve",
        version=__version__,
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    bundle = service.pipeline.bundle
    context_length = min(bundle.entry(role).context_length for role in ROLES)
    answerer = Answerer(service, settings, metrics, gate)
    app.include_router(generation_routes(answerer, Planner(service.pipeline, settings, new_seed)))
    app.include_router(model_routes(settings.model_name, context_length))
    app.include_router(operation_routes(gate, metrics))
    app.add_exception_handler(Refusal, answer_refusal)
    app.add_exception_handler(HTTPException, answer_http)
    app.add_exception_handler(RequestValidationError, answer_invalid)
    _wrap(app, settings, metrics, logs_access=logs_access)
    return app


def _wrap(app: FastAPI, settings: ServingSettings, metrics: Metrics, *, logs_access: bool) -> None:
    """Add the middlewares, the innermost first: log, then key, then body, then route."""
    paths = frozenset(app.openapi()["paths"])

    def count(path: str, status: int) -> None:
        metrics.count_answer(path if path in paths else "other", status)

    app.add_middleware(
        BodyLimit, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s
    )
    if settings.keys is not None:
        app.add_middleware(KeyCheck, keys=settings.keys, everywhere=settings.keys_everywhere)
    app.add_middleware(AccessLog, clock=metrics.clock, count=count, is_shown=logs_access)
