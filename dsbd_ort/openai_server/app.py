"""The FastAPI application: endpoints over a service, with log, API keys and body limits."""

import time
from collections.abc import Callable

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from dsbd_ort.engine import Service
from dsbd_ort.openai_server.api_keys import ApiKeyCheck
from dsbd_ort.openai_server.errors import (
    ErrorResponse,
    handle_error_response,
    handle_http_exception,
    handle_validation_error,
)
from dsbd_ort.openai_server.generation import Gate, GenerationHandler
from dsbd_ort.openai_server.metrics import Metrics
from dsbd_ort.openai_server.middleware import AccessLog, BodyLimit, JsonByDefault
from dsbd_ort.openai_server.planner import Planner
from dsbd_ort.openai_server.routes import (
    AUDIO_PATHS,
    generation_routes,
    model_routes,
    operation_routes,
    speech_routes,
)
from dsbd_ort.openai_server.settings import ServingSettings
from dsbd_ort.openai_server.transcription import TranscriptionHandler
from dsbd_ort.pipeline import Pipeline
from dsbd_ort.prompts import new_seed
from dsbd_ort.version import __version__


def create_app(
    service: Service,
    settings: ServingSettings,
    *,
    gate: Gate | None = None,
    clock: Callable[[], float] = time.monotonic,
    draw_seed: Callable[[], int] = new_seed,
    logs_access: bool = True,
) -> FastAPI:
    """Return the application; the caller closes the service.

    gate: shared with a server that drains it.
    clock: seconds, for log and metrics.
    draw_seed: returns the seed of a request without one.
    """
    gate = gate or Gate()
    metrics = Metrics(service, settings.model_name, clock)
    app = FastAPI(
        title="dsbd-serve",
        version=__version__,
        docs_url="/docs" if settings.shows_docs else None,  # it loads scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    context_length = service.pipeline.bundle.context_length
    if reads_audio(service.pipeline):
        speech = TranscriptionHandler(service, settings, metrics, gate)
        app.include_router(speech_routes(speech))
    else:
        handler = GenerationHandler(service, settings, metrics, gate)
        app.include_router(generation_routes(handler, Planner(service, settings, draw_seed)))
    app.include_router(model_routes(settings.model_name, context_length))
    app.include_router(operation_routes(service, gate, metrics))
    app.add_exception_handler(ErrorResponse, handle_error_response)
    app.add_exception_handler(HTTPException, handle_http_exception)
    app.add_exception_handler(RequestValidationError, handle_validation_error)
    _add_middlewares(app, settings, metrics, logs_access=logs_access)
    return app


def reads_audio(pipeline: Pipeline) -> bool:
    """Return whether the model of a pipeline is a speech model."""
    encoder = pipeline.prompts.encoder
    return encoder is not None and encoder.speech is not None


def _add_middlewares(
    app: FastAPI, settings: ServingSettings, metrics: Metrics, *, logs_access: bool
) -> None:
    """Add the middlewares, the innermost first: a request meets log, key, body, type, endpoint."""
    paths = frozenset(app.openapi()["paths"])

    def count(path: str, status: int) -> None:
        known = path if path in paths else "other"
        metrics.count("dsbd:http_answers", path=known, status=str(status))

    app.add_middleware(JsonByDefault)
    app.add_middleware(
        BodyLimit,
        max_bytes=settings.max_body_bytes,
        timeout_s=settings.body_timeout_s,
        limits_by_path=dict.fromkeys(
            AUDIO_PATHS, (settings.max_audio_bytes, settings.audio_timeout_s)
        ),
    )
    if settings.keys is not None:
        app.add_middleware(ApiKeyCheck, keys=settings.keys, everywhere=settings.keys_everywhere)
    app.add_middleware(AccessLog, clock=metrics.clock, count=count, is_shown=logs_access)
