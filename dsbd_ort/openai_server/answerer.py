"""From a body to an answer, the same way for both routes."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from fastapi import Request, Response

from dsbd_ort.openai_server.answer_shape import AnswerHead, AnswerShape
from dsbd_ort.openai_server.client_presence import while_present
from dsbd_ort.openai_server.engine_service import EngineService
from dsbd_ort.openai_server.gate import Gate
from dsbd_ort.openai_server.generation import Generation
from dsbd_ort.openai_server.metrics import Metrics, RequestMeter
from dsbd_ort.openai_server.planner import GenerationPlan
from dsbd_ort.openai_server.protocol import GenerationBody
from dsbd_ort.openai_server.refusal import Refusal, bad_request
from dsbd_ort.openai_server.responses import EventStream, streamed_answer
from dsbd_ort.openai_server.settings import ServingSettings
from dsbd_ort.openai_server.whole_answer import whole_answer
from dsbd_ort.version import __version__
from dsbd_runtime.bundle import MANIFEST_NAME

Body = TypeVar("Body", bound=GenerationBody)


class Answerer:
    """Answers bodies with a service, under the limits of a server."""

    def __init__(
        self, service: EngineService, settings: ServingSettings, metrics: Metrics, gate: Gate
    ) -> None:
        self._service = service
        self._settings = settings
        self._metrics = metrics
        self._gate = gate
        manifest = service.pipeline.bundle.path / MANIFEST_NAME
        digest = hashlib.sha256(manifest.read_bytes()).hexdigest()
        self._fingerprint = f"dsbd-ort-{__version__}-{digest[:12]}"

    async def answer(
        self,
        request: Request,
        body: Body,
        plan_of: Callable[[Body], GenerationPlan],
        shape_of: Callable[[AnswerHead], AnswerShape],
        id_prefix: str,
    ) -> Response:
        """Return the answer to ``body``: a whole one, or a stream.

        Raises:
            Refusal: the request is refused or failed, or its client has gone.
        """
        self._check(body)
        tokenizer = self._service.pipeline.tokenizer if _wants_logprobs(body) else None
        with ExitStack() as on_end:
            self._gate.enter()
            on_end.callback(self._gate.leave)
            meter = RequestMeter(self._metrics)
            generation = Generation(self._service, meter, self._settings.request_timeout_s)
            on_end.callback(generation.close)
            plan = await asyncio.to_thread(_begun, generation, plan_of, body)
            shape = shape_of(self._head(id_prefix))
            if body.stream:
                usage = bool(body.stream_options and body.stream_options.include_usage)
                events = streamed_answer(
                    generation, plan, shape, tokenizer=tokenizer, include_usage=usage
                )
                return EventStream(events, on_end.pop_all().close)
            work = whole_answer(generation, plan, shape, tokenizer=tokenizer)
            answer = await while_present(request.receive, work)
            return Response(answer.model_dump_json(), media_type="application/json")

    def _head(self, id_prefix: str) -> AnswerHead:
        return AnswerHead(
            id=f"{id_prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self._settings.model_name,
            system_fingerprint=self._fingerprint,
        )

    def _check(self, body: GenerationBody) -> None:
        if body.model != self._settings.model_name:
            raise unknown_model(body.model, self._settings.model_name)
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options belong to stream true; drop them", "stream_options")


def unknown_model(asked: str, served: str) -> Refusal:
    """Return the answer to a request for a model that is not here."""
    return Refusal(
        404, f"no model {asked!r} here; use {served!r}", param="model", code="model_not_found"
    )


def _begun(
    generation: Generation, plan_of: Callable[[Body], GenerationPlan], body: Body
) -> GenerationPlan:
    """Return the plan of a body whose engine requests have begun; takes the tokenizer's time."""
    plan = plan_of(body)
    generation.submit(plan.submissions)
    return plan


def _wants_logprobs(body: GenerationBody) -> bool:
    asked = getattr(body, "logprobs", None)
    return asked is not None and asked is not False
