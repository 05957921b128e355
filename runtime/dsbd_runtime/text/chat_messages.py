"""Messages of a chat: checked, prepared for templates, and marked to find dropped ones.

A template silently drops messages that it has no place for: an unknown role, a later system
message, the second of two calls, a name. A second rendering, with a unique number in every text,
name and call's name, shows whether the template keeps everything; only numbers that are missing
there need further renderings. Such numbers also show whether it reads contents part by part.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from dsbd_runtime.errors import InputError
from dsbd_runtime.typed_json import in_short, json_from_text

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]

_KNOWS_DEVELOPER = re.compile(r"""(["'])developer\1""")
_MARK = re.compile(
    r"7031664(\d{12})9452738"
)  # digits: no filter for the case of letters hides them
_MARK_OF_PART = re.compile(  # except in a list that is written as Python or JSON
    rf"""(?<!text': ')(?<!text": ")(?<!text":"){_MARK.pattern}"""
)
_OF_NAME = 999  # number of a message's name; its calls have smaller ones


class Arguments(dict[str, Any]):
    """Arguments of a call: an object whose text is its JSON, because templates read either.

    Templates that write the JSON themselves (``arguments | tojson``) or look into it read the
    object, those that write a text (``arguments``, ``"..." + arguments``) the text.
    """

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


class MediaPart(dict[str, Any]):
    """A content part other than text, such as a sound that a reader of sounds has read."""


def check_messages(messages: Sequence[Message]) -> None:
    """Raise InputError unless messages are a list of objects with a role."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InputError(
            f"messages is {in_short(messages)}; expected a list such as "
            '[{"role": "user", "content": "Hello"}]'
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(
                f"messages[{index}] is {in_short(message)}; expected an object with a text as "
                'its role, such as {"role": "user", "content": "Hello"}'
            )
        _check_parts(message.get("content"), f"messages[{index}].content")


def _check_parts(content: Any, place: str) -> None:
    """Raise InputError for a part that is neither text nor read, such as an image."""
    for index, part in enumerate(content if _is_list(content) else ()):
        if isinstance(part, MediaPart):
            continue
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind != "text":
            raise InputError(
                f"{place}[{index}] is a part of type {in_short(kind)}: images and audio cannot "
                "be read, because only the text part of such models is exported; use parts of "
                "type 'text'"
            )
        if not isinstance(part.get("text") if isinstance(part, Mapping) else part, str):
            raise InputError(
                f"{place}[{index}] is {in_short(part)}; expected a text, or a part such as "
                '{"type": "text", "text": "Hello"}'
            )


def _is_list(content: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(content, Sequence) and not isinstance(content, str)


def joined_text(content: Any) -> Any:
    """Join the text parts of a checked content by line ends; other contents are unchanged."""
    if not _is_list(content) or any(isinstance(part, MediaPart) for part in content):
        return content
    return "\n".join(part if isinstance(part, str) else part["text"] for part in content)


def with_joined_parts(messages: Sequence[Message], render: Render) -> Sequence[Message]:
    """Return messages with one text each, except for parts that the template reads itself.

    The template reads the parts of a message itself if the prompt has all of them, and not written
    as a list.
    """
    joined = [_with_one_text(message) for message in messages]
    if not any(joined):
        return messages
    pairs = list(zip(messages, joined, strict=True))
    marked = [_with_marked_parts(old, i) if new else old for i, (old, new) in enumerate(pairs)]
    marks = {int(mark) for mark in _MARK_OF_PART.findall(_attempt(render, marked) or "")}

    def is_read(index: int, num_parts: int) -> bool:
        return num_parts > 0 and marks.issuperset(_number(index, i) for i in range(num_parts))

    return [
        old if new is None or is_read(index, len(old["content"])) else new
        for index, (old, new) in enumerate(pairs)
    ]


def _with_one_text(message: Message) -> Message | None:
    text = joined_text(message.get("content"))
    return None if text is message.get("content") else {**message, "content": text}


def _with_marked_parts(message: Message, index: int) -> Message:
    parts = [
        {**part, "text": _mark(_number(index, number))} if isinstance(part, Mapping) else part
        for number, part in enumerate(message["content"])
    ]
    return {**message, "content": parts}


def messages_for(source: str, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return checked messages as a template of this source reads them.

    The arguments of calls become ``Arguments``; the role ``developer``, OpenAI's later name of
    ``system``, becomes ``system`` if the template does not use it. InputError: the template does
    not read calls, or arguments are not an object.
    """
    knows_developer = _KNOWS_DEVELOPER.search(source) is not None
    prepared = []
    for index, message in enumerate(messages):
        # As in transformers, a null field is absent: such as the content with a call.
        ready = {name: value for name, value in message.items() if value is not None}
        if ready["role"] == "developer" and not knows_developer:
            ready["role"] = "system"
        if calls := ready.get("tool_calls"):
            place = f"messages[{index}].tool_calls"
            if "tool_calls" not in source:
                raise InputError(
                    f"{place} is given, but the chat template of this model does not read tool "
                    "calls; leave them out"
                )
            if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
                raise InputError(f"{place} is {in_short(calls)}; expected a list of calls")
            ready["tool_calls"] = [_call(call, f"{place}[{i}]") for i, call in enumerate(calls)]
        prepared.append(ready)
    return prepared


def _call(call: Any, place: str) -> dict[str, Any]:
    """Return a call whose arguments, or its function's, are ``Arguments``."""
    if not isinstance(call, Mapping):
        raise InputError(f"{place} is {in_short(call)}; expected an object with a function")
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"], f"{place}.function")}
    if "arguments" not in call:
        return dict(call)
    return {**call, "arguments": call_arguments(call["arguments"], f"{place}.arguments")}


def call_arguments(given: Any, place: str) -> Arguments:
    """Return arguments given as an object or its JSON ("" is {}); NaN and infinity are refused."""
    try:
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        text = text if text.strip() else "{}"
        values = json_from_text(text)
        reason = "expected an object" if not isinstance(values, dict) else None
    except (ValueError, TypeError, RecursionError) as error:
        reason = str(error)
    if reason is not None:
        raise InputError(
            f"{place} is {in_short(given)}, which is not a JSON object: {reason}; give the "
            'arguments as one, such as "{\\"city\\": \\"Rome\\"}"'
        )
    return Arguments(values, text)


def check_traces(messages: Sequence[Message], text: str, render: Render) -> None:
    """Raise InputError for the first message, call or name that has no influence on the prompt.

    The name of a result may be that of a call before it, which is in the prompt.
    messages: as the template reads them; ``text``: the prompt.
    render: returns the prompt of other messages; raises if the template refuses them.
    """
    marked = [_with_name(_marked(message, index), index) for index, message in enumerate(messages)]
    shown = _attempt(render, marked)
    marks = {int(mark) for mark in _MARK.findall(shown)} if shown is not None else set()
    called: list[Any] = []
    for index, message in enumerate(messages):
        num_calls = len(message.get("tool_calls") or ())
        is_shown, *calls = (_number(index, call) in marks for call in range(num_calls + 1))
        if any(calls) and not all(calls):
            raise _lost(f"messages[{index}].tool_calls[{calls.index(False)}]", message)
        if not is_shown and not any(calls):
            if _is_lost(messages, index, _marked(message, index), None, text, render):
                raise _lost(f"messages[{index}]", message)
        name = message.get("name")
        is_told = message["role"] == "tool" and name in called
        if name and not is_told and _number(index, _OF_NAME) not in marks:
            unnamed = {field: value for field, value in message.items() if field != "name"}
            if _is_lost(messages, index, _with_name(message, index), unnamed, text, render):
                raise _lost_name(f"messages[{index}].name", name)
        called += [_name_of(call) for call in message.get("tool_calls") or ()]


def _lost(place: str, message: Message) -> InputError:
    return InputError(
        f"{place}, of role {in_short(message['role'])}, leaves no trace in the prompt: the chat "
        "template of this model has no place for it; leave it out, or use a role and an order of "
        "messages that the template reads"
    )


def _lost_name(place: str, name: Any) -> InputError:
    return InputError(
        f"{place} is {in_short(name)}, which leaves no trace in the prompt: the chat template of "
        "this model has no place for names there; leave it out, or write it into the content"
    )


def _is_lost(
    messages: Sequence[Message],
    index: int,
    marked: Message,
    rest: Message | None,
    text: str,
    render: Render,
) -> bool:
    """Return whether a part of a message whose marks are not in the prompt has no influence on it.

    It has influence if another value gives another prompt. If a part cannot be marked, such as an
    image, or the template refuses its marks, the part is left out instead.

    marked, rest: the message with marks in that part, and without the part; None: nothing is left.
    """
    message, before, after = messages[index], messages[:index], messages[index + 1 :]
    other = None if marked == message else _attempt(render, [*before, marked, *after])
    without = [*before, *([] if rest is None else [rest]), *after]
    return (_attempt(render, without) if other is None else other) == text


def _attempt(render: Render, messages: Sequence[Message]) -> str | None:
    try:
        return render(messages)
    except Exception:  # a template may raise anything: it is the checkpoint's program
        return None


def _number(index: int, call: int = 0) -> int:
    return index * 1000 + min(call, _OF_NAME)


def _mark(number: int) -> str:
    return f"7031664{number:012d}9452738"


def _marked(message: Message, index: int) -> dict[str, Any]:
    """Return a message with marks instead of its texts and of its calls' names."""
    marked, content, mark = dict(message), message.get("content"), _mark(_number(index))
    calls = message.get("tool_calls")
    if calls:
        marked["tool_calls"] = [
            _named(call, _mark(_number(index, number))) for number, call in enumerate(calls, 1)
        ]
    if isinstance(content, Sequence) and not isinstance(content, str):
        marked["content"] = [
            {**part, "text": mark} if isinstance(part, Mapping) and "text" in part else part
            for part in content
        ]
    elif content or not calls:
        marked["content"] = mark
    return marked


def _named(call: Message, name: str) -> dict[str, Any]:
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": {**call["function"], "name": name}}
    return {**call, "name": name}


def _name_of(call: Message) -> Any:
    function = call.get("function")
    return (function if isinstance(function, Mapping) else call).get("name")


def _with_name(message: Message, index: int) -> Message:
    """Return a message with a mark instead of its name, if it has one."""
    return {**message, "name": _mark(_number(index, _OF_NAME))} if message.get("name") else message
