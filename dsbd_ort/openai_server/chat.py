"""Request and response of /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dsbd_ort.decoding.option_table import MOST_TOP_LOGPROBS
from dsbd_ort.openai_server.bodies import Entries
from dsbd_ort.openai_server.errors import bad_request
from dsbd_ort.openai_server.protocol import (
    ChoiceReport,
    FinishReason,
    GenerationBody,
    Report,
    ResponseBuilder,
    ResponseHead,
    ScoredToken,
    TokenPieces,
    Usage,
    absent_if_none,
)
from dsbd_ort.openai_server.tools import (
    Addition,
    CallReader,
    Tool,
    ToolChoice,
    ToolUse,
    new_call_id,
)
from dsbd_runtime.typed_json import in_short

_PART_TYPES = ("text", "input_audio", "image_url")


class _Exact(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class InputAudio(_Exact):
    """A sound file in base64; ``format`` is not used, because the file names its format."""

    data: str
    format: str | None = Field(None, max_length=16)


class ImageUrl(_Exact):
    """A picture as a URL; ``detail`` is not used, because the model has its own sizes."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ContentPart(_Exact):
    """A part of a message's content, in the field that its type names.

    ``cache_control`` is a hint of other servers, unused here.
    """

    type: Literal["text", "input_audio", "image_url"]
    text: str | None = None
    input_audio: InputAudio | None = None
    image_url: ImageUrl | None = None
    cache_control: dict[str, Any] | None = None

    @property
    def num_media_bytes(self) -> int:
        sound, picture = self.input_audio, self.image_url
        return len(sound.data if sound else picture.url if picture else "")

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_types(cls, part: Any) -> Any:
        """Raise ValueError for a part of an unknown type, before its other fields are checked."""
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind not in _PART_TYPES:
            raise ValueError(
                f"a part of type {in_short(kind)} is not supported: this server reads text, and "
                "sound or pictures if its model does; use parts of type 'text', 'input_audio' or "
                "'image_url'"
            )
        return part

    @model_validator(mode="after")
    def _check_field(self) -> Self:
        given = [name for name in _PART_TYPES if getattr(self, name) is not None]
        if given != [self.type]:
            shown = " and ".join(map(repr, given)) or "no content"
            raise ValueError(
                f"a part of type {self.type!r} has {shown}; expected {self.type!r} alone"
            )
        return self


class CalledFunction(BaseModel):
    """The function of a call, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call that the model has made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class PastCall(BaseModel):
    """A call in a message of the request; clients that read streams may have lost its id."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        named = {} if self.id is None else {"id": self.id}
        return {**named, "type": "function", "function": self.function.model_dump()}


class ChatMessage(BaseModel):
    """A message of the request; fields beyond these must be empty."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: str | Entries[ContentPart] | None = None
    name: str | None = None
    tool_calls: Entries[PastCall] | None = None
    tool_call_id: str | None = None
    cache_control: dict[str, Any] | None = None

    @property
    def has_media(self) -> bool:
        parts = self.content if isinstance(self.content, list) else []
        return any(part.type != "text" for part in parts)

    def for_template(self) -> dict[str, Any]:
        content: str | list[dict[str, Any]]
        if isinstance(self.content, list):
            content = [part.model_dump(include={"type", part.type}) for part in self.content]
        else:
            content = self.content or ""
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


class ChatBody(GenerationBody):
    """The request."""

    messages: Entries[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    tools: Entries[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def may_take_long(self) -> bool:
        return bool(self.tools) or super().may_take_long

    @property
    def has_media(self) -> bool:
        return any(message.has_media for message in self.messages)

    @property
    def num_media_bytes(self) -> int:
        """Bytes of the sounds and pictures, which have their own limit."""
        contents = (each.content for each in self.messages if isinstance(each.content, list))
        return sum(part.num_media_bytes for content in contents for part in content)

    @property
    def num_top_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            message = f"top_logprobs is {self.top_logprobs}, which needs logprobs true; set it"
            raise bad_request(message, "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the messages for chat templates; raise ErrorResponse for an unknown field."""
        for index, message in enumerate(self.messages):
            for name, value in (message.model_extra or {}).items():
                if value not in (None, [], ""):
                    field = f"messages.{index}.{name}"
                    reason = (
                        f"{field} is not supported; use role, content, name, tool_calls and "
                        "tool_call_id only"
                    )
                    raise bad_request(reason, field, "unsupported")
        has_calls = any(each.tool_calls or each.role == "tool" for each in self.messages)
        if (self.tools or has_calls) and self.has_media:
            raise bad_request(
                "media cannot be combined with tools and their calls; leave out one of them",
                "messages",
                "unsupported",
            )
        return [message.for_template() for message in self.messages]


class TopLogprob(BaseModel):
    """One token: its name, its own bytes, its raw log-probability.

    The joined bytes of all tokens are the text in UTF-8, including special tokens. The name is the
    token's text; if the token is a part of a character, its escaped bytes.
    """

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token, and the most probable tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of the tokens of a choice, or of a chunk."""

    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(BaseModel):
    """The message that the model generated."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = absent_if_none()


class ChatChoice(BaseModel):
    """One returned sequence."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    dsbd: ChoiceReport


class ChatCompletion(ResponseHead):
    """The response in one piece."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    dsbd: Report


class FunctionDelta(BaseModel):
    """Part of the function of a call, in a chunk."""

    name: str | None = absent_if_none()
    arguments: str


class ToolCallDelta(BaseModel):
    """Part of a call, in a chunk; the first part has the id."""

    index: int
    id: str | None = absent_if_none()
    type: Literal["function"] | None = absent_if_none()
    function: FunctionDelta


class Delta(BaseModel):
    """Part of the message of a choice, in a chunk."""

    role: Literal["assistant"] | None = absent_if_none()
    content: str | None = absent_if_none()
    tool_calls: list[ToolCallDelta] | None = absent_if_none()


class ChunkChoice(BaseModel):
    """The choice of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    dsbd: ChoiceReport | None = absent_if_none()


class ChatCompletionChunk(ResponseHead):
    """One event of a stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    usage: Usage | None = absent_if_none()
    dsbd: Report | None = absent_if_none()


class ChatBuilder(ResponseBuilder):
    """The ResponseBuilder of the endpoint."""

    response = ChatCompletion
    chunk = ChatCompletionChunk

    def __init__(self, head: ResponseHead, tools: ToolUse | None = None) -> None:
        """``tools``: how answers become calls; None if answers are plain text."""
        super().__init__(head)
        self._tools = tools
        self._readers: dict[int, CallReader] = {}
        self._has_calls: set[int] = set()

    def choice(
        self,
        index: int,
        text: str,
        tokens: TokenPieces | None,
        finish_reason: FinishReason,
        report: ChoiceReport,
    ) -> ChatChoice:
        message = AssistantMessage(content=text)
        if self._tools is not None:
            reader = self._tools.reader()
            message = _message([reader.push(text), reader.finish()])
            if message.tool_calls:
                self._has_calls.add(index)
        return ChatChoice(
            index=index,
            message=message,
            logprobs=_logprobs(tokens),
            finish_reason=self._finish_reason(index, finish_reason),
            dsbd=report,
        )

    def _finish_reason(self, index: int, of_text: FinishReason) -> FinishReason:
        """Return "tool_calls", as OpenAI does, if the model itself chose to call a function."""
        decided = self._tools is not None and self._tools.choice != "named"
        is_done = of_text == "stop" and decided and index in self._has_calls
        return "tool_calls" if is_done else of_text

    def _delta(self, index: int, addition: Addition) -> Delta:
        calls = [_call_delta(*call) for call in addition.calls]
        if calls:
            self._has_calls.add(index)
        return Delta(content=addition.content or None, tool_calls=calls or None)

    def first_choice(self, index: int) -> ChunkChoice:
        return ChunkChoice(index=index, delta=Delta(role="assistant", content=""))

    def text_choice(self, index: int, text: str, tokens: TokenPieces | None) -> ChunkChoice:
        delta = Delta(content=text)
        if self._tools is not None:
            reader = self._readers.setdefault(index, self._tools.reader())
            delta = self._delta(index, reader.push(text))
        return ChunkChoice(index=index, delta=delta, logprobs=_logprobs(tokens))

    def last_choice(
        self, index: int, finish_reason: FinishReason, report: ChoiceReport
    ) -> ChunkChoice:
        delta = Delta()
        if self._tools is not None:
            reader = self._readers.setdefault(index, self._tools.reader())
            delta = self._delta(index, reader.finish())
        reason = self._finish_reason(index, finish_reason)
        return ChunkChoice(index=index, delta=delta, finish_reason=reason, dsbd=report)


def _message(additions: Sequence[Addition]) -> AssistantMessage:
    content = "".join(addition.content for addition in additions)
    calls: dict[int, ToolCall] = {}
    for index, name, arguments in (call for each in additions for call in each.calls):
        if index not in calls:
            function = CalledFunction(name=name or "", arguments="")
            calls[index] = ToolCall(id=new_call_id(), function=function)
        calls[index].function.arguments += arguments
    return AssistantMessage(content=content or None, tool_calls=list(calls.values()) or None)


def _call_delta(index: int, name: str | None, arguments: str) -> ToolCallDelta:
    function = FunctionDelta(name=name, arguments=arguments)
    if name is None:
        return ToolCallDelta(index=index, function=function)
    return ToolCallDelta(index=index, id=new_call_id(), type="function", function=function)


def _logprobs(pieces: TokenPieces | None) -> ChatLogprobs | None:
    if pieces is None:
        return None
    return ChatLogprobs(
        content=[
            TokenLogprob(
                **_fields(token), top_logprobs=[TopLogprob(**_fields(t)) for t in top or ()]
            )
            for token, top in zip(pieces.tokens, pieces.tops, strict=True)
        ]
    )


def _fields(token: ScoredToken) -> dict[str, Any]:
    return {"token": token.name, "logprob": token.logprob, "bytes": list(token.content)}
