"""Response of /v1/responses: items in one piece, or named events in this order.

response.created, response.in_progress
a message:  output_item.added, content_part.added, output_text.delta ..., output_text.done,
            content_part.done, output_item.done
a call:     output_item.added, function_call_arguments.delta ..., function_call_arguments.done,
            output_item.done
response.completed, response.incomplete or response.failed
"""

import uuid
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import to_json

from dsbd_ort.openai_server.errors import ErrorResponse
from dsbd_ort.openai_server.item_requests import ResponsesBody
from dsbd_ort.openai_server.protocol import (
    ChoiceReport,
    FinishReason,
    Report,
    ResponseBuilder,
    ResponseHead,
    TokenPieces,
    Usage,
    absent_if_none,
)
from dsbd_ort.openai_server.tools import Addition, ToolUse, new_call_id

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(BaseModel):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputMessage(BaseModel):
    """A message of the model."""

    id: str
    type: Literal["message"] = "message"
    status: Status = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class OutputCall(BaseModel):
    """A call of a function; the item with its result repeats ``call_id``."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: Status = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


OutputItem = OutputMessage | OutputCall


class ItemResponse(BaseModel):
    """The response; fields of the request are repeated."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float | None
    metadata: dict[str, Any]
    usage: dict[str, Any] | None = None
    dsbd: Report | None = absent_if_none()


class _Noted(BaseModel):
    """A choice whose events the builder has noted."""


class ItemResponseBuilder(ResponseBuilder):
    """The ResponseBuilder of the endpoint, which returns one sequence."""

    end = ""

    def __init__(self, head: ResponseHead, tools: ToolUse | None, body: ResponsesBody) -> None:
        """``tools``: how the answer becomes calls; None if it is plain text."""
        super().__init__(head)
        self._body = body
        self._reader = tools.reader() if tools else None
        self._items: list[OutputItem] = []
        self._events = ""  # not sent yet
        self._num_events = 0  # of the whole response
        self._finish_reason: FinishReason | None = None
        self._report: Report | None = None

    def choice(
        self,
        index: int,
        text: str,
        tokens: TokenPieces | None,
        finish_reason: FinishReason,
        report: ChoiceReport,
    ) -> _Noted:
        self.text_choice(index, text, tokens)
        return self.last_choice(index, finish_reason, report)

    def full(self, choices: Sequence[BaseModel], usage: Usage, report: Report) -> BaseModel:
        self._report = report
        return self._response(self._last_status, usage)

    def first_choice(self, index: int) -> _Noted:
        for name in ("created", "in_progress"):
            self._note(name, response=self._response("in_progress"))
        return _Noted()

    def text_choice(self, index: int, text: str, tokens: TokenPieces | None) -> _Noted:
        self._add(self._reader.push(text) if self._reader else Addition(content=text))
        return _Noted()

    def last_choice(self, index: int, finish_reason: FinishReason, report: ChoiceReport) -> _Noted:
        if self._reader is not None:
            self._add(self._reader.finish())
        self._finish_reason = finish_reason
        if not self._items:
            self._open(OutputMessage(id=_new_id("msg")))
        self._close(self._last_status)
        return _Noted()

    def event(
        self, *choices: BaseModel, usage: Usage | None = None, report: Report | None = None
    ) -> str:
        """Return the noted events; with ``usage`` but no choices, add the response's last event."""
        self._report = report or self._report
        if usage is not None and not choices:
            self._note(self._last_status, response=self._response(self._last_status, usage))
        events, self._events = self._events, ""
        return events

    def error_event(self, error: ErrorResponse) -> str:
        response = self._response("failed")
        response.error = {"code": "server_error", "message": error.message}  # OpenAI's code
        self._note("failed", response=response)
        return self.event()

    @property
    def _last_status(self) -> Status:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _add(self, addition: Addition) -> None:
        """Add a part of the answer to the last item, or begin the next one."""
        is_message = bool(self._items) and isinstance(self._items[-1], OutputMessage)
        if addition.content and (is_message or not self._items or addition.content.strip()):
            if not is_message:
                self._open(OutputMessage(id=_new_id("msg")))
            self._extend(addition.content)
        for _, name, arguments in addition.calls:
            if name is not None:
                self._open(OutputCall(id=_new_id("fc"), call_id=new_call_id(), name=name))
            if arguments:
                self._extend(arguments)

    def _open(self, item: OutputItem) -> None:
        if self._items:
            self._close("completed")
        self._items.append(item)
        self._note_item("output_item.added", item=item)
        if isinstance(item, OutputMessage):
            item.content = [OutputText()]
            self._note_item(
                "content_part.added", item_id=item.id, content_index=0, part=OutputText()
            )

    def _extend(self, text: str) -> None:
        item = self._items[-1]
        if isinstance(item, OutputCall):
            item.arguments += text
            self._note_item("function_call_arguments.delta", item_id=item.id, delta=text)
        else:
            item.content[0].text += text
            place = {"item_id": item.id, "content_index": 0}
            self._note_item("output_text.delta", **place, delta=text, logprobs=[])

    def _close(self, status: Status) -> None:
        item = self._items[-1]
        item.status = status
        if isinstance(item, OutputCall):
            named = {"item_id": item.id, "name": item.name}
            self._note_item("function_call_arguments.done", **named, arguments=item.arguments)
        else:
            part, place = item.content[0], {"item_id": item.id, "content_index": 0}
            self._note_item("output_text.done", **place, text=part.text, logprobs=[])
            self._note_item("content_part.done", **place, part=part)
        self._note_item("output_item.done", item=item)

    def _note_item(self, name: str, /, **fields: Any) -> None:
        self._note(name, output_index=len(self._items) - 1, **fields)

    def _note(self, event: str, /, **fields: Any) -> None:
        """Serialize an event now, because its fields change later; it is sent next."""
        kind = f"response.{event}"
        data = to_json({"type": kind, "sequence_number": self._num_events, **fields}).decode()
        self._events += f"event: {kind}\ndata: {data}\n\n"
        self._num_events += 1

    def _response(self, status: Status, usage: Usage | None = None) -> ItemResponse:
        body, names = self._body, ("instructions", "max_output_tokens", "temperature", "top_p")
        text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
        choice = body.tool_choice
        is_incomplete = status == "incomplete"
        return ItemResponse(
            **{name: getattr(body, name) for name in names},
            id=self._head["id"],
            created_at=self._head["created"],
            model=self._head["model"],
            status=status,
            incomplete_details={"reason": "max_output_tokens"} if is_incomplete else None,
            output=self._items,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            text={"format": {"type": "text"}, **text},
            tool_choice=choice.model_dump() if isinstance(choice, BaseModel) else choice or "auto",
            tools=[tool.model_dump() for tool in body.tools or ()],
            metadata=(body.model_extra or {}).get("metadata") or {},
            usage=None if usage is None else _usage_of(usage),
            dsbd=self._report,
        )


def _usage_of(usage: Usage) -> dict[str, Any]:
    cached = usage.prompt_tokens_details
    num_cached = cached.cached_tokens if cached else 0
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
