"""Tools of a chat: their schemas as a constraint, and the answer's text as tool calls.

choice                 the answer's text                                       constraint
a named function       its arguments, as JSON                                  its schema
required               [{"name":"...","arguments":{...}}, ...]                 all schemas
auto                   any text; calls in the format that the chat template    none
                       or plain_tools.py prescribes
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dsbd_ort.constraints import FunctionCalls, JsonSchema
from dsbd_ort.decoding.errors import ConstraintError
from dsbd_ort.openai_server.errors import bad_request
from dsbd_ort.openai_server.plain_tools import CALL_BEGINS, CALL_ENDS
from dsbd_runtime.typed_json import json_from_text

MOST_CALLS = 16
"""Limit of calls in one answer with tool_choice "required": a model must not go on forever."""


class FunctionBody(BaseModel):
    """A function that the model may call; its arguments always follow ``parameters``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """An entry of ``tools``; ``cache_control`` is a hint of other servers, unused here."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["function"]
    function: FunctionBody
    cache_control: dict[str, Any] | None = None

    def for_template(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True, exclude={"cache_control"})


class FunctionName(BaseModel):
    """The function of a named choice."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str


class NamedChoice(BaseModel):
    """A ``tool_choice`` that names a function."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


@dataclass
class Addition:
    """Part of an answer's message, read from the next text.

    calls: (index of the call, its name in its first part else None, the next text of its
        arguments).
    """

    content: str = ""
    calls: list[tuple[int, str | None, str]] = field(default_factory=list)


@dataclass(frozen=True)
class ToolUse:
    """How the tools of a request are used; ``constraint`` None: the answer is any text.

    names: names of the functions; for a named choice only its name.
    """

    choice: Literal["auto", "required", "named"]
    names: tuple[str, ...]
    constraint: JsonSchema | FunctionCalls | None

    def reader(self) -> CallReader:
        if self.choice == "named":
            return _Arguments(self.names[0])
        return _CallList() if self.choice == "required" else _TaggedCalls(self.names)


def new_call_id() -> str:
    """Return the id of a call; the message with its result repeats it."""
    return f"call_{uuid.uuid4().hex[:24]}"


def tool_use(
    tools: Sequence[Tool], choice: ToolChoice | None, *, parallel: bool, auto_fault: str | None
) -> ToolUse | None:
    """Return how a request uses its tools, None if it uses no tools; ErrorResponse: invalid.

    choice: its ``tool_choice``; None is "auto" if there are tools.
    parallel: whether one answer may have several calls.
    auto_fault: why calls cannot be distinguished from text, None if they can.
    """
    names = tuple(tool.function.name for tool in tools)
    if len(set(names)) < len(names):
        raise bad_request("two functions of tools have the same name; rename one", "tools")
    if isinstance(choice, NamedChoice):
        name = choice.function.name
        if name not in names:
            expected = ", ".join(names) or "none, as tools is empty"
            raise bad_request(
                f"tool_choice names {name!r}; expected one of {expected}", "tool_choice"
            )
        return ToolUse("named", (name,), _arguments(tools[names.index(name)]))
    if choice == "required" and not tools:
        raise bad_request("tool_choice is required, but tools is empty; add a tool", "tool_choice")
    if choice == "none" or not tools:
        return None
    if choice == "required":
        functions = tuple((tool.function.name, _arguments(tool)) for tool in tools)
        max_calls = MOST_CALLS if parallel else 1
        return ToolUse("required", names, FunctionCalls(functions, max_calls))
    if auto_fault is not None:
        raise bad_request(
            f"tool_choice auto is not supported: {auto_fault}; use required, a function's name, or "
            "none",
            "tool_choice",
            "unsupported",
        )
    return ToolUse("auto", names, None)


def auto_fault(template: str | None, tag_is_text: bool) -> str | None:
    """Return why calls cannot be distinguished from text, None if they can.

    tag_is_text: whether the tokenizer keeps the tag that begins a call as text.
    """
    if not tag_is_text:
        return f"the tokenizer of this model drops {CALL_BEGINS} from texts"
    if template is None or not re.search(r"\btools\b", template):
        return "the chat template of this model does not read tools"
    has_tags = CALL_BEGINS in template and CALL_ENDS in template
    if not has_tags or "<function=" in template or "arguments" not in template:
        return (
            "the chat template of this model does not write calls as "
            f'{CALL_BEGINS}{{"name": ..., "arguments": ...}}{CALL_ENDS}'
        )
    return None


def _arguments(tool: Tool) -> JsonSchema:
    """Return the schema of a function's arguments; without ``parameters``: an empty object."""
    parameters = tool.function.parameters
    if not parameters:
        return JsonSchema({"type": "object", "additionalProperties": False})
    kind = parameters.get("type", "object")  # if absent, $ref, allOf, properties, ... imply it
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise bad_request(
            f"the parameters of {tool.function.name} are of type {kind!r}; expected a schema of "
            "type 'object'",
            "tools",
        )
    try:
        return JsonSchema({**parameters, "type": "object"})
    except ConstraintError as error:
        raise bad_request(f"tools: {error}", "tools") from error


class _Arguments:
    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> Addition:
        name, self._name = self._name, None
        return Addition(calls=[(0, name, text)] if name or text else [])

    def finish(self) -> Addition:
        return self.push("") if self._name else Addition()


_HEAD = re.compile(r'"name":"([^"]*)","arguments":')


class _CallList:
    def __init__(self) -> None:
        self._num_calls = 0
        self._head = ""  # the text so far between the arguments of two calls
        self._depth: int | None = None  # depth of brackets in arguments; None between calls
        self._in_string = self._is_escaped = False

    def push(self, text: str) -> Addition:
        calls: list[tuple[int, str | None, str]] = []
        while text:
            if self._depth is None:
                self._head += text
                begun = _HEAD.search(self._head)
                if begun is None:
                    break
                text, self._head, self._depth = self._head[begun.end() :], "", 0
                calls.append((self._num_calls, begun[1], ""))
                self._num_calls += 1
            end = self._end_of_arguments(text)
            if text[:end]:
                index, name, before = calls.pop() if calls else (self._num_calls - 1, None, "")
                calls.append((index, name, before + text[:end]))
            text = text[end:]
        return Addition(calls=calls)

    def finish(self) -> Addition:
        return Addition()

    def _end_of_arguments(self, text: str) -> int:
        """Return how many characters of the text belong to the arguments."""
        assert self._depth is not None
        for position, character in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._depth = None
                    return position + 1
        return len(text)


class _TaggedCalls:
    """Any text with calls between tags, as Hermes and Qwen write them.

    A call is JSON; a tag inside its strings is text. If the text between two tags does not call a
    known function, it stays text up to the first closing tag, including both tags.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._held = ""  # text that begins with a tag, or may be the first part of a tag
        self._num_searched = 0  # characters after that tag
        self._num_calls = 0

    def push(self, text: str) -> Addition:
        self._held += text
        return self._read(is_whole=False)

    def finish(self) -> Addition:
        return self._read(is_whole=True)

    def _read(self, *, is_whole: bool) -> Addition:
        """Return the additions that later text cannot change."""
        addition = Addition()
        while True:
            before, begin, after = self._held.partition(CALL_BEGINS)
            if not begin:
                num_held = 0 if is_whole else _overlap(self._held, CALL_BEGINS)
                split = len(self._held) - num_held
                addition.content += self._held[:split]
                self._held = self._held[split:]
                return addition
            addition.content += before
            end = self._end_of_call(after)
            if end is None:
                if not is_whole:
                    self._held = begin + after
                    return addition
                first = after.find(CALL_ENDS)
                end = first if first >= 0 else len(after)
            inside, self._held = after[:end], after[end + len(CALL_ENDS) :]
            self._num_searched = 0
            if (call := self._call(inside)) is None:
                addition.content += begin + after[: end + len(CALL_ENDS)]
            else:
                addition.calls.append((self._num_calls, *call))
                self._num_calls += 1

    def _end_of_call(self, text: str) -> int | None:
        """Return the place of the tag that ends the call, None if more text is needed."""
        end = text.find(CALL_ENDS, self._num_searched)
        while end >= 0:
            try:
                json_from_text(text[:end])
                return end
            except (ValueError, RecursionError) as error:
                message = error.msg if isinstance(error, json.JSONDecodeError) else ""
                if not message.startswith("Unterminated string"):
                    return text.find(CALL_ENDS)
            end = text.find(CALL_ENDS, end + 1)
        self._num_searched = max(len(text) - len(CALL_ENDS) + 1, self._num_searched)
        return None

    def _call(self, text: str) -> tuple[str, str] | None:
        try:
            call = json_from_text(text)
        except (ValueError, RecursionError):
            return None
        name, arguments = (
            (call.get("name"), call.get("arguments")) if isinstance(call, dict) else (None, None)
        )
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        written = json.dumps(arguments, ensure_ascii=False)
        return name, written.encode(errors="backslashreplace").decode()  # of lone surrogates


CallReader = _Arguments | _CallList | _TaggedCalls
"""Reads the calls of one answer from successive pieces of text; ``finish`` returns the rest."""


def _overlap(text: str, tag: str) -> int:
    """Return how many of the last characters of a text may begin a tag."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)
