"""One line of the input: a prompt or messages, an id, and options of its own."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsbd_ort.batch.errors import BatchError
from dsbd_ort.decoding import DecodingConfig
from dsbd_runtime.errors import InputError
from dsbd_runtime.typed_json import in_short

MOST_LEVELS = 64
"""Of lists and objects within each other: what parsers, pickle and templates take everywhere."""
_OPTIONS = frozenset(option.name for option in dataclasses.fields(DecodingConfig))
_OTHERS = frozenset(("id", "prompt", "messages"))
_BOM = b"\xef\xbb\xbf"
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)|[\[\]{}]', re.DOTALL)


@dataclass(frozen=True)
class RawLine:
    """A line as it stands in the input.

    Attributes:
        number: counted from 1; lines of white space count, but are no requests.
        content: its bytes without white space around.
    """

    number: int
    content: bytes

    def request_hash(self, fingerprint: str) -> str:
        """Return what tells an answered line from one that has changed since.

        ``fingerprint`` is that of all other things that an answer depends on.
        """
        parts = f"{fingerprint}\n{self.number}\n".encode() + self.content
        return hashlib.sha256(parts).hexdigest()[:24]

    def seed(self, seed: int) -> int:
        """Return the line's seed: that of the batch, hashed with the line's number."""
        digest = hashlib.sha256(f"{seed} {self.number}".encode()).digest()
        return int.from_bytes(digest[:6])  # 48 bits: exact in every reader of JSON


@dataclass(frozen=True, kw_only=True)
class PromptLine:
    """A line, understood.

    Attributes:
        prompt: text to continue; None where there are messages.
        messages: a conversation for the chat template; None where there is a prompt.
        options: fields of DecodingConfig that this line sets.
    """

    prompt: str | None = None
    messages: list[Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def read_lines(file: Path) -> Iterator[RawLine]:
    """Yield the requests of a JSONL file."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                content = (line.removeprefix(_BOM) if number == 1 else line).strip()
                if content:
                    yield RawLine(number, content)
    except OSError as error:
        raise BatchError(f"--input {file} cannot be read: {error.strerror or error}") from error


def parsed_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object of a line; ``check_field`` says which of its values are usable.

    What is nested too deep to parse is cut at a level that ``check_field`` refuses. A whole number
    of more digits than Python converts becomes infinite, which it refuses too.
    """
    try:
        try:
            fields = json.loads(content, parse_int=_whole)
        except RecursionError:
            fields = json.loads(_cut(content, MOST_LEVELS + 2), parse_int=_whole)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the line is no JSON ({error}); write one object a line") from error
    if not isinstance(fields, dict):
        raise InputError(
            f"the line is a JSON {type(fields).__name__}; expected an object such as "
            '{"prompt": "Hello"}'
        )
    return fields


def check_field(name: str, value: Any) -> None:
    """Refuse a value that cannot be written as JSON again, or not read everywhere."""
    layer, num_levels = [value], 0
    while layer:
        for entry in layer:
            if isinstance(entry, float) and not math.isfinite(entry):
                raise InputError(
                    f"{name} holds {entry}, which JSON does not have; give a finite number, or a "
                    "text"
                )
        nested = [entry for entry in layer if isinstance(entry, list | dict)]
        num_levels += bool(nested)
        if num_levels > MOST_LEVELS:
            raise InputError(
                f"{name} is nested deeper than {MOST_LEVELS} levels; expected a flatter value"
            )
        layer = [child for entry in nested for child in _children(entry)]


def prompt_line(fields: dict[str, Any]) -> PromptLine:
    """Return what a line asks for."""
    for name, value in fields.items():
        check_field(in_short(name) if name not in _OPTIONS | _OTHERS else name, value)
    given = [name for name in ("prompt", "messages") if name in fields]
    if len(given) != 1:
        raise InputError(
            f"the line has {' and '.join(given) or 'neither prompt nor messages'}; expected one "
            'of them, as in {"prompt": "Hello"}'
        )
    options = {key: value for key, value in fields.items() if key not in (given[0], "id")}
    if unknown := sorted(set(options) - _OPTIONS):
        raise InputError(
            f"the line has {in_short(unknown[0])}; expected id, prompt or messages, and fields of "
            f"DecodingConfig: {', '.join(sorted(_OPTIONS))}"
        )
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if given == ["prompt"] and not isinstance(prompt, str):
        raise InputError(f"prompt is {in_short(prompt)}; expected a text")
    if given == ["messages"] and not isinstance(messages, list):
        raise InputError(f"messages is {in_short(messages)}; expected a list of messages")
    return PromptLine(prompt=prompt, messages=messages, options=options)


def _children(value: list[Any] | dict[str, Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _whole(digits: str) -> int | float:
    try:
        return int(digits)
    except ValueError:  # more digits than sys.get_int_max_str_digits()
        return float(digits)


def _cut(content: bytes, num_levels: int) -> bytes:
    """Return JSON without what lies deeper than ``num_levels``: of 2, [1, [2, [3]]] is [1, [[]]].

    The innermost level that is left is empty.
    """
    kept: list[bytes] = []
    begin = level = 0
    for found in _STRING_OR_BRACKET.finditer(content):
        bracket = found[0]
        if bracket in (b"[", b"{"):
            level += 1
            if level == num_levels:
                kept.append(content[begin : found.end()])
        elif bracket in (b"]", b"}"):
            if level == num_levels:
                begin = found.start()
            level -= 1
    return b"".join(kept) + content[begin:] if kept else content
