"""Request of /v1/responses: items of a conversation, translated to a request for chat.

/v1/responses                              chat
instructions                               a first system message
message, with input_text or output_text    a message
function_call                              tool_calls of an assistant message
function_call_output                       a message of role tool
reasoning, which must be empty             nothing
tools, tool_choice: a flat function        the function in a field of its own
text.format                                response_format
max_output_tokens                          max_completion_tokens

Nothing is stored, so the whole conversation is in ``input``.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Tag,
    model_validator,
)

from dsbd_ort.openai_server.bodies import Entries, validated
from dsbd_ort.openai_server.chat import ChatBody
from dsbd_ort.openai_server.errors import ErrorResponse
from dsbd_ort.openai_server.protocol import with_names
from dsbd_ort.openai_server.request_fields import Refused, refusal
from dsbd_ort.openai_server.structured import SchemaFormat
from dsbd_ort.openai_server.tools import FunctionBody, FunctionName
from dsbd_runtime.typed_json import in_short

_STORED = "nothing is stored; send the whole conversation as input"
ITEM_FIELDS = {
    "previous_response_id": Refused(_STORED),
    "conversation": Refused(_STORED),
    "prompt": Refused("no prompts are stored; use instructions and input"),
    "store": Refused("nothing is stored", (False,)),
    "background": Refused("a response is made while its client waits", (False,)),
    "include": Refused("an answer has no such parts", ([], ["reasoning.encrypted_content"])),
    "truncation": Refused("a conversation is never cut silently", ("disabled",)),
    "context_management": Refused("a conversation is never cut silently", ([],)),
    "max_tool_calls": Refused("there are no hosted tools, which it counts"),
    "moderation": Refused("nothing is moderated"),
    "top_logprobs": Refused("use /v1/chat/completions for log-probabilities", (0,)),
    "logprobs": Refused("use /v1/chat/completions for log-probabilities", (False,)),
    "stream_options": Refused("events are sent as they are", ({}, {"include_obfuscation": False})),
    **dict.fromkeys(("n", "num_return_sequences"), Refused("a response has one answer", (1,))),
    "prompt_cache_options": Refused("prompts that begin alike share their cache rows anyway"),
    "prompt_cache_retention": Refused("rows are kept as long as there is room", ("in_memory",)),
    "messages": Refused("use `input`"),
    "response_format": Refused("use `text.format`"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), Refused("use `max_output_tokens`")),
}
"""Fields that only this endpoint refuses unless neutral; ``FIELDS`` is for all endpoints."""
_OWN_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}
"""Names of this endpoint's fields in errors, by the names of the chat endpoint's fields."""


class _Part(BaseModel):
    """A part of a request. Null means absent, because clients send back the answers they got."""

    model_config = ConfigDict(extra="forbid", strict=True)
    use: ClassVar[str] = ""  # advice in the error for a type that is not supported

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kind, field = given.get("type"), cls.model_fields.get("type")
        kinds = get_args(field.annotation) if field else ()
        if kinds and isinstance(kind, str) and kind not in kinds:
            use = cls.use or " or ".join(kinds)
            raise ValueError(f"type {in_short(kind)} is not supported; use {use}")
        return _without_nulls(given)


class _Item(_Part):
    """An item of the conversation; items of earlier answers have ``id`` and ``status``, unused."""

    id: str | None = None
    status: str | None = None


class InputText(_Part):
    """A text; texts of earlier answers have ``annotations`` and ``logprobs``, unused."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(_Item):
    """A message; messages of earlier answers have ``phase``, unused."""

    use = "message, function_call or function_call_output"
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Entries[InputText]
    phase: str | None = None


class PastFunctionCall(_Item):
    """A call that the model has made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(_Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Entries[InputText]


class PastReasoning(_Item):
    """The reasoning before an earlier answer, which must be empty."""

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None

    @model_validator(mode="after")
    def _check_is_empty(self) -> Self:
        if self.summary or self.content or self.encrypted_content:
            raise ValueError(
                "a reasoning item with content is not supported: no answer of this model has one; "
                "leave the item out"
            )
        return self


_KINDS = ("function_call", "function_call_output", "reasoning")


def _kind_of_item(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if kind in _KINDS else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[PastFunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[PastReasoning, Tag("reasoning")],
    Discriminator(_kind_of_item),
]


class FunctionTool(_Part, FunctionBody):
    """A function that the model may call."""

    use = "function: this server has no hosted tools"
    type: Literal["function"]

    def for_chat(self) -> dict[str, Any]:
        function = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": function}


class ChosenFunction(_Part, FunctionName):
    """A ``tool_choice`` that names a function."""

    type: Literal["function"]

    def for_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name}}


class TextFormat(_Part, SchemaFormat):
    """The format of the text; the fields of a schema stand in the format itself."""

    type: Literal["text", "json_object", "json_schema"]

    def for_chat(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        schema = self.model_dump(by_alias=True, exclude={"type"})
        return {"type": self.type, "json_schema": schema}


class TextOptions(_Part):
    """The field ``text``."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(_Part):
    """The field ``reasoning``: effort cannot be changed, and there is no reasoning to summarize."""

    effort: Literal["none"] | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesBody(BaseModel):
    """The request; all other fields are those of the chat endpoint."""

    model_config = ConfigDict(extra="allow", strict=True)
    model: str
    input: str | Entries[InputItem]
    instructions: str | None = None
    tools: Entries[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None

    def chat_body(self) -> ChatBody:
        """Return the same request to the chat endpoint.

        ErrorResponse: a field is refused. RequestValidationError: an option has another type.
        """
        form, choice = self.text and self.text.format, self.tool_choice
        fields: dict[str, Any] = {
            **self._options(),
            **self.model_dump(include={"model", "temperature", "top_p", "stream"}),
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "stream_options": {"include_usage": True} if self.stream else None,
            "tools": self.tools and [tool.for_chat() for tool in self.tools],
            "tool_choice": choice.for_chat() if isinstance(choice, ChosenFunction) else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": form and form.for_chat(),
        }
        return validated(ChatBody, fields)

    def own_error(self, error: ErrorResponse) -> ErrorResponse:
        """Return an error of the chat endpoint with the field names of this endpoint."""
        return with_names(error, _OWN_NAMES)

    def _options(self) -> dict[str, Any]:
        """Return the undeclared fields, which the chat endpoint checks."""
        options: dict[str, Any] = {}
        for name, value in (self.model_extra or {}).items():
            field = ITEM_FIELDS.get(name)
            if field is None:
                options[name] = value
            elif _without_nulls(value) not in (None, *field.neutral):
                raise refusal(name, field)
        return options

    def _messages(self) -> list[dict[str, Any]]:
        items, messages = self.input, list[dict[str, Any]]()
        if isinstance(items, str):
            items = [InputMessage(role="user", content=items)]
        if self.instructions:
            items = [InputMessage(role="system", content=self.instructions), *items]
        for item in items:
            if isinstance(item, PastFunctionCall):
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            elif isinstance(item, FunctionCallOutput):
                output = {"role": "tool", "tool_call_id": item.call_id}
                messages.append({**output, "content": _content_of(item.output)})
            elif isinstance(item, InputMessage):
                messages.append({"role": item.role, "content": _content_of(item.content)})
        return messages


def _content_of(content: str | list[InputText]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: entry for name, entry in value.items() if entry is not None}
