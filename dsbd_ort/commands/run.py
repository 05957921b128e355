"""dsbd-run: open a bundle, continue a prompt, print text and statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dsbd_ort.answer import Answer, answer
from dsbd_ort.commands.answer_output import OutputStyle, print_answer
from dsbd_ort.commands.interactive import line_of_terminal, talk
from dsbd_ort.conversation import Messages, user_messages, with_answer
from dsbd_ort.decoding import RequestTrace
from dsbd_ort.interruption import watched_signals
from dsbd_ort.pipeline import Pipeline
from dsbd_ort.pipeline_settings import PipelineSettings
from dsbd_ort.trace_page.trace_file import write_trace


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What the command line asked for.

    Attributes:
        pipeline: how to open the bundle.
        prompt: text to continue or, in a chat, what the user says; None: ask at the terminal.
        options: fields of DecodingConfig that were given.
        is_chat: whether to fill the prompt into the checkpoint's chat template.
        system: the system message of a chat, None for none.
        style: what to print and when.
        trace: where to write the request's trace, None for no trace.
    """

    pipeline: PipelineSettings
    prompt: str | None
    options: dict[str, Any]
    is_chat: bool = False
    system: str | None = None
    style: OutputStyle
    trace: Path | None = None


def run(request: RunRequest) -> int:
    """Generate and print: text (or JSON) to stdout, all else to stderr; return the exit code."""
    with request.pipeline.open() as pipeline:
        responder = responder_of(pipeline, request)
        if request.prompt is None:
            talk(responder.respond, line_of_terminal)
            return 0
        with watched_signals() as interruption:
            responder.respond(request.prompt, interruption.is_wanted)
        return interruption.exit_code


class Responder(Protocol):
    """Answers one prompt after another."""

    def respond(self, text: str, is_interrupted: Callable[[], bool]) -> Answer:
        """Answer ``text``, print the answer."""


def responder_of(pipeline: Pipeline, request: RunRequest) -> Responder:
    """Return what continues text, or what answers in a conversation."""
    return _Chat(pipeline, request) if request.is_chat else _Continuation(pipeline, request)


class _Continuation:
    """Continues every prompt for itself."""

    def __init__(self, pipeline: Pipeline, request: RunRequest) -> None:
        self._pipeline = pipeline
        self._request = request

    def respond(self, text: str, is_interrupted: Callable[[], bool]) -> Answer:
        """Continue ``text`` and print both."""
        return self._print(text, is_interrupted, heading=text)

    def _print(
        self, prompt: str | list[int], is_interrupted: Callable[[], bool], *, heading: str
    ) -> Answer:
        request, pipeline = self._request, self._pipeline
        trace = RequestTrace() if request.trace else None
        given = print_answer(
            lambda show: answer(pipeline, prompt, request.options, is_interrupted, show, trace),
            request.style,
            heading=heading,
        )
        if request.trace and trace:
            write_trace(request.trace, trace, pipeline.tokenizer)
        return given


class _Chat(_Continuation):
    """Answers what the user says, and remembers it."""

    def __init__(self, pipeline: Pipeline, request: RunRequest) -> None:
        super().__init__(pipeline, request)
        self._messages: Messages = []

    def respond(self, text: str, is_interrupted: Callable[[], bool]) -> Answer:
        """Answer ``text``, print the answer; an interrupted one is remembered as far as it came."""
        system = None if self._messages else self._request.system
        asked = [*self._messages, *user_messages(text, system)]
        given = self._print(self._pipeline.chat_prompt(asked), is_interrupted, heading="")
        self._messages = with_answer(asked, given.text)
        return given
