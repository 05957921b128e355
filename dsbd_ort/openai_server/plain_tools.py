"""Tools as plain text, for models whose chat template does not support tools.

The model reads (docs/serving.md shows an example):

* the functions and the format of a call: at the end of the system message or, if the template
  allows no system message, at the beginning of the first user message;
* a call that it made, in its own message: ``{"name": ..., "arguments": ...}`` between
  ``CALL_BEGINS`` and ``CALL_ENDS``;
* the result of a call, in a user message: ``{"name": ..., "content": ...}`` between
  ``RESULT_BEGINS`` and ``RESULT_ENDS``.
"""

import json
from collections.abc import Sequence
from typing import Any

from dsbd_runtime.text.chat_messages import call_arguments, joined_text

TOOL_TEMPLATES = OWN, PLAIN = "own", "plain"
"""How tools are offered: only by the chat template, or as plain text if it cannot."""

CALL_BEGINS, CALL_ENDS = "<tool_call>", "</tool_call>"
"""Tags around a call, for Hermes, Qwen and plain text."""

RESULT_BEGINS, RESULT_ENDS = "<tool_response>", "</tool_response>"

_BEFORE = "Functions that you may call, one JSON object a line:"
_AFTER = (
    "To call a function, write one line of this form and wait for its result:\n"
    f'{CALL_BEGINS}{{"name": "...", "arguments": {{...}}}}{CALL_ENDS}\n'
    "Call a function only where the answer needs its result; else answer directly."
)

Message = dict[str, Any]


def offer(functions: Sequence[Message]) -> str:
    """Return the text that offers functions to a model: names, descriptions, parameters."""
    return "\n".join([_BEFORE, *map(_json, functions), _AFTER])


def with_system_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Return messages with a text at the end of the system message, which is added if missing."""
    first, *others = messages
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": _joined(first["content"], text)}, *others]


def with_user_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Return messages with a text at the beginning of the first user message."""
    index = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if index is None:
        return [{"role": "user", "content": text}, *messages]
    asked = messages[index]
    first = {**asked, "content": _joined(text, asked["content"])}
    return [*messages[:index], first, *messages[index + 1 :]]


def as_text(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which calls and their results are text.

    Consecutive results, and a user message after them, become one message: many templates require
    that user and assistant alternate. InputError: arguments of a call are not a JSON object.
    """
    names: dict[str, str] = {}  # of called functions, by the id of the call
    plain: list[Message] = []
    is_after_result = False
    for index, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            if "id" in call:
                names[call["id"]] = call["function"]["name"]
        is_result = message["role"] == "tool"
        text = _result(message, names) if is_result else _with_calls(message, f"messages[{index}]")
        if is_after_result and text["role"] == "user":
            plain[-1] = {**plain[-1], "content": _joined(plain[-1]["content"], text["content"])}
        else:
            plain.append(text)
        is_after_result = is_result or (is_after_result and text["role"] == "user")
    return plain


def _with_calls(message: Message, place: str) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    lines = [
        _call(call["function"], f"{place}.tool_calls[{index}].function")
        for index, call in enumerate(calls)
    ]
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**others, "content": _joined(message["content"], "\n".join(lines))}


def _call(function: Message, place: str) -> str:
    arguments = str(call_arguments(function["arguments"], f"{place}.arguments"))
    name = _json(function["name"])
    return f'{CALL_BEGINS}{{"name": {name}, "arguments": {arguments}}}{CALL_ENDS}'


def _result(message: Message, names: dict[str, str]) -> Message:
    name = message.get("name") or names.get(message.get("tool_call_id", ""))
    named = {} if name is None else {"name": name}
    content = _json({**named, "content": joined_text(message["content"])})
    return {"role": "user", "content": f"{RESULT_BEGINS}{content}{RESULT_ENDS}"}


def _joined(*contents: str | list[Any]) -> str:
    return "\n\n".join(text for text in map(joined_text, contents) if text)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
