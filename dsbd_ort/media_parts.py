"""Parts of messages that are media: the sound that each has, as a file, samples or base64."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

from dsbd_runtime.errors import InputError
from dsbd_runtime.text.chat_messages import Message
from dsbd_runtime.typed_json import in_short


def content_of(part: Message, place: str, part_type: str) -> Any:
    """Return the content of a part, for a front end; InputError: the part is of another type.

    part_type: that of the front end.
    """
    kind, readers = part.get("type"), _READERS[part_type]
    if not isinstance(kind, str) or kind not in readers:
        raise InputError(
            f"{place} is a part of type {in_short(kind)}, which this model cannot read; expected "
            f"parts of type 'text', {' or '.join(map(repr, readers))}"
        )
    return readers[kind](part, place)


def _of_audio(part: Message, place: str) -> Any:
    """Return the sound of a part as transformers has it: ``audio`` or ``path``."""
    given = [part[name] for name in ("audio", "path") if part.get(name) is not None]
    if len(given) != 1:
        raise InputError(
            f"{place} has {len(given)} sounds; expected one, as 'audio' (samples, bytes, a file or "
            "its path) or 'path'"
        )
    return given[0]


def _of_input_audio(part: Message, place: str) -> bytes:
    """Return the sound of a part as OpenAI has it: a file in base64."""
    given = part.get("input_audio")
    data = given.get("data") if isinstance(given, Mapping) else None
    return from_base64(data, f"{place}.input_audio.data", "a sound file")


def from_base64(data: object, place: str, expected: str) -> bytes:
    """Return decoded bytes; InputError: ``data`` is not base64."""
    try:
        if not isinstance(data, str):
            raise ValueError(f"it is a {type(data).__name__}")
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise InputError(
            f"{place} is not base64 ({error}); expected {expected} in base64"
        ) from error


_READERS: dict[str, dict[str, Callable[[Message, str], Any]]] = {
    "audio": {"audio": _of_audio, "input_audio": _of_input_audio},
}
"""By the type of a front end's parts, those that messages may have."""
