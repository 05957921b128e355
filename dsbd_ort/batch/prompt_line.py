"""One line of the input: a prompt or messages, an id, and options of its own."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsbd_ort.batch.errors import BatchError
from dsbd_ort.decoding import DecodingConfig
from dsbd_runtime.errors import InputError

_OPTIONS = frozenset(option.name for option in dataclasses.fields(DecodingConfig))
_BOM = b"\xef\xbb\xbf"


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
    """Return the JSON object of a line."""
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the line is no JSON ({error}); write one object a line") from error
    if not isinstance(fields, dict):
        raise InputError(
            f"the line is a JSON {type(fields).__name__}; expected an object such as "
            '{"prompt": "Hello"}'
        )
    return fields


def prompt_line(fields: dict[str, Any]) -> PromptLine:
    """Return what a line asks for."""
    given = [name for name in ("prompt", "messages") if name in fields]
    if len(given) != 1:
        raise InputError(
            f"the line has {' and '.join(given) or 'neither prompt nor messages'}; expected one "
            'of them, as in {"prompt": "Hello"}'
        )
    options = {key: value for key, value in fields.items() if key not in (given[0], "id")}
    if unknown := sorted(set(options) - _OPTIONS):
        raise InputError(
            f"the line has {unknown[0]!r}; expected id, prompt or messages, and fields of "
            f"DecodingConfig: {', '.join(sorted(_OPTIONS))}"
        )
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if given == ["prompt"] and not isinstance(prompt, str):
        raise InputError(f"prompt is {prompt!r}; expected a text")
    if given == ["messages"] and not isinstance(messages, list):
        raise InputError(f"messages is {messages!r}; expected a list of messages")
    return PromptLine(prompt=prompt, messages=messages, options=options)
