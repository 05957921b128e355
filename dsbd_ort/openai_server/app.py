"""The FastAPI application: endpoints over a service, with log, API keys and body limits."""

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Form, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from dsbd_ort.engine import Service
from dsbd_ort.openai_server import bodies
from dsbd_ort.openai_server.chat import ChatBody, ChatBuilder, ChatCompletion
from dsbd_ort.openai_server.completions import Completion, CompletionBody, CompletionBuilder
from dsbd_ort.openai_server.errors import (
    AUDIO_PREFIX,
    ErrorBody,
    ErrorResponse,
    engine_ended,
    handle_error_response,
    handle_http_exception,
    handle_validation_error,
    shutting_down,
    unknown_model,
)
from dsbd_ort.openai_server.generation import Gate, GenerationHandler
from dsbd_ort.openai_server.item_requests import ResponsesBody
from dsbd_ort.openai_server.item_responses import ItemResponse, ItemResponseBuilder
from dsbd_ort.openai_server.metrics import Metrics
from dsbd_ort.openai_server.middleware import (
    AccessLog,
    ApiKeyCheck,
    BodyLimit,
    EndingSlash,
    JsonByDefault,
    without_slash,
)
from dsbd_ort.openai_server.planner import Planner
from dsbd_ort.openai_server.settings import ServingSettings
from dsbd_ort.openai_server.transcription import SpeechForm, TranscribedText, TranscriptionHandler
from dsbd_ort.requests.prompts import new_seed
from dsbd_ort.version import __version__

AUDIO_PATHS = (f"{AUDIO_PREFIX}transcriptions", f"{AUDIO_PREFIX}translations")
CHAT_PATH = "/v1/chat/completions"

_AudioForm = Annotated[SpeechForm, Form(media_type="multipart/form-data")]
_TEXT = {"schema": {"type": "string"}}
_STREAM: dict[str, Any] = {"text/event-stream": {}}  # a schema would describe a single event
_4XX: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody}}
_4XX_AND_503: dict[int | str, dict[str, Any]] = {**_4XX, 503: {"model": ErrorBody}}
_4XX_AND_5XX: dict[int | str, dict[str, Any]] = {**_4XX, "5XX": {"model": ErrorBody}}


class State(BaseModel):
    """State of the server."""

    status: Literal["alive", "ready"]


class Model(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["dsbd-ort"] = "dsbd-ort"
    max_model_len: int


class Models(BaseModel):
    """The list of models."""

    object: Literal["list"] = "list"
    data: list[Model]


def _add_generation(app: FastAPI, handler: GenerationHandler, planner: Planner) -> None:
    @app.post(
        "/v1/completions",
        response_model=None,
        responses={200: {"model": Completion, "content": _STREAM}, **_4XX_AND_5XX},
    )
    async def completions(request: Request, body: CompletionBody) -> Response:
        """Continue prompts."""
        return await handler.respond(
            request,
            body,
            planner.plan_completion,
            lambda head, plan: CompletionBuilder(head),
            "cmpl",
        )

    @app.post(
        CHAT_PATH,
        response_model=None,
        responses={200: {"model": ChatCompletion, "content": _STREAM}, **_4XX_AND_5XX},
    )
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        """Answer a conversation."""
        return await handler.respond(
            request,
            body,
            planner.plan_chat,
            lambda head, plan: ChatBuilder(head, plan.tools),
            "chatcmpl",
        )

    @app.post(
        "/v1/responses",
        response_model=None,
        responses={200: {"model": ItemResponse, "content": _STREAM}, **_4XX_AND_5XX},
    )
    async def responses(request: Request, body: ResponsesBody) -> Response:
        """Answer a conversation, with the items and events of OpenAI's newer endpoint."""
        threads = request.state.threads
        chat = await asyncio.get_running_loop().run_in_executor(threads, body.chat_body)
        return await handler.respond(
            request,
            chat,
            planner.plan_chat,
            lambda head, plan: ItemResponseBuilder(head, plan.tools, body),
            "resp",
            lambda error: body.own_error(chat.own_error(error)),
        )


def _add_speech(app: FastAPI, handler: TranscriptionHandler) -> None:
    content = {**_STREAM, "text/plain": _TEXT, "text/vtt": _TEXT}
    responses = {200: {"model": TranscribedText, "content": content}, **_4XX_AND_5XX}

    @app.post(AUDIO_PATHS[0], response_model=None, responses=responses)
    async def transcriptions(request: Request, form: _AudioForm) -> Response:
        """Transcribe an audio file in its own language."""
        return await handler.respond(request, form, "transcribe")

    @app.post(AUDIO_PATHS[1], response_model=None, responses=responses)
    async def translations(request: Request, form: _AudioForm) -> Response:
        """Translate an audio file into English text."""
        return await handler.respond(request, form, "translate")


def _add_models(app: FastAPI, model_name: str, context_length: int) -> None:
    served = Model(id=model_name, created=int(time.time()), max_model_len=context_length)

    @app.get("/v1/models", responses=_4XX)
    async def models() -> Models:
        """List the one model of this server."""
        return Models(data=[served])

    @app.get("/v1/models/{name:path}", responses=_4XX)
    async def model(name: str) -> Model:
        """Describe a model."""
        if name != model_name:
            raise unknown_model(name, model_name)
        return served


def _add_operations(app: FastAPI, service: Service, gate: Gate, metrics: Metrics) -> None:
    @app.get("/health", responses=_4XX_AND_503)
    async def health() -> State:
        """Return 503 if only a restart helps; a server that drains is healthy."""
        if not (service.is_open or gate.is_draining):
            raise engine_ended()
        return State(status="alive")

    @app.get("/ready", responses=_4XX_AND_503)
    async def ready() -> State:
        """Return 503 if new generation requests are rejected."""
        if gate.is_draining:
            raise shutting_down()
        if not service.is_open:
            raise engine_ended()
        return State(status="ready")

    @app.get("/metrics", response_class=PlainTextResponse, responses=_4XX)
    async def all_metrics() -> Response:
        """Return all metrics in Prometheus' text format."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


def create_app(
    service: Service,
    settings: ServingSettings,
    *,
    gate: Gate | None = None,
    clock: Callable[[], float] = time.monotonic,
    draw_seed: Callable[[], int] = new_seed,
    logs_access: bool = True,
) -> FastAPI:
    """Return the application; the caller closes the service, and drains it with ``gate``.

    clock: returns seconds, for log and metrics.
    draw_seed: returns a seed for a request that gives no seed.
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
    bodies.prepare(app, settings.max_body_bytes)
    transcribes, encoder = service.pipeline.transcribes, service.pipeline.prompts.encoder
    answers = encoder is None or encoder.speech is None  # whether it reads text (too)
    if transcribes:
        _add_speech(app, TranscriptionHandler(service, settings, metrics, gate))
    if answers:
        handler = GenerationHandler(service, settings, metrics, gate)
        _add_generation(app, handler, Planner(service, settings, draw_seed))
    _add_models(app, settings.model_name, service.pipeline.bundle.context_length)
    _add_operations(app, service, gate, metrics)
    app.add_exception_handler(ErrorResponse, handle_error_response)
    app.add_exception_handler(HTTPException, handle_http_exception)
    app.add_exception_handler(RequestValidationError, handle_validation_error)
    paths = AUDIO_PATHS if transcribes else ()
    limits = dict.fromkeys(paths, (settings.max_audio_bytes, settings.audio_timeout_s))
    if answers and service.pipeline.media is not None:  # media of conversations are in base64
        max_bytes = settings.max_body_bytes + settings.max_audio_bytes * 4 // 3
        limits[CHAT_PATH] = max_bytes, settings.audio_timeout_s
    _add_middlewares(app, settings, metrics, limits, logs_access=logs_access)
    return app


def _add_middlewares(
    app: FastAPI,
    settings: ServingSettings,
    metrics: Metrics,
    limits_by_path: dict[str, tuple[int, float]],
    *,
    logs_access: bool,
) -> None:
    """Add the middlewares, the innermost first.

    A request passes access log, API key, ending slash, body limit, content type, endpoint.
    """
    paths = frozenset(app.openapi()["paths"])

    def count(path: str, status: int) -> None:
        path = without_slash(path)
        shown = path if path in paths else "other"
        metrics.count("dsbd:http_answers", path=shown, status=str(status))

    app.add_middleware(JsonByDefault)
    app.add_middleware(
        BodyLimit,
        max_bytes=settings.max_body_bytes,
        timeout_s=settings.body_timeout_s,
        limits_by_path=limits_by_path,
    )
    app.add_middleware(EndingSlash)
    if settings.keys is not None:
        app.add_middleware(ApiKeyCheck, keys=settings.keys, everywhere=settings.keys_everywhere)
    app.add_middleware(AccessLog, clock=metrics.clock, count=count, is_shown=logs_access)
