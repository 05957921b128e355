"""Sounds and pictures in messages: parts as in transformers or OpenAI's API, and their front ends.

A front end turns the content of a part into rows of the prompt.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.given.given_prompt import GivenPiece
from dsbd_runtime.text.chat_messages import Message
from dsbd_runtime.typed_json import in_short

T = TypeVar("T")

_OPENAI_TYPES = {"audio": "input_audio", "image": "image_url"}  # by the type of transformers
_CONTENTS = {"audio": ("sound", "samples"), "image": ("picture", "pixels, an image of Pillow")}


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Limits of the media of one conversation.

    Attributes:
        max_seconds: longest sound.
        read_url: returns the file at an http or https URL; None: such URLs are refused.
    """

    max_seconds: float = 3600.0
    read_url: Callable[[str], bytes] | None = None


OWN_LIMITS = MediaLimits()


@dataclass(frozen=True, kw_only=True)
class ReadMedium:
    """A sound or a picture that was read and measured.

    Attributes:
        num_rows: number of given rows in the prompt.
        expansion: replaces the placeholder in the rendered text; one placeholder for each row.
        pieces: makes the inputs of the encoder; called after the prompt's length was checked.
        grid: number of rows in time, height and width, for a picture whose rows have three
            positions; else None.
    """

    num_rows: int
    expansion: str
    pieces: Callable[[], list[GivenPiece]]
    grid: tuple[int, int, int] | None = None


class MediumFrontEnd(Protocol):
    """The front end of a model.

    Attributes:
        part_type: type of the parts that the chat template reads: "audio" or "image".
        noun: "sound" or "picture", for messages to users.
        shorten: advice for a prompt that is too long, such as "give shorter sounds, or fewer".
    """

    part_type: str
    noun: str
    shorten: str

    def read(self, content: Any, most_rows: int, limits: MediaLimits) -> ReadMedium:
        """Read a medium; InputError: it is invalid, or much longer than ``most_rows`` rows."""
        ...


def read_part(
    part: Message, place: str, part_type: str, limits: MediaLimits, read: Callable[[Any], T]
) -> T:
    """Read the content of a part; any InputError, also of ``read``, names the part's place."""
    content = _content_of(part, place, part_type, limits)
    try:
        return read(content)
    except InputError as error:
        raise InputError(f"{place}: {error}") from error


def _content_of(part: Message, place: str, part_type: str, limits: MediaLimits) -> Any:
    """Return the content of a part: the bytes of a file, or any value that users may give.

    part_type: "audio" or "image". The part must have this type, or OpenAI's corresponding type.

    InputError: the part has another type, or no readable content.
    """
    kind, of_openai = part.get("type"), _OPENAI_TYPES[part_type]
    if kind == part_type:
        given = [part[field] for field in (part_type, "path") if part.get(field) is not None]
        if len(given) == 1:
            return given[0]
        noun, form = _CONTENTS[part_type]
        raise InputError(
            f"{place} has {len(given)} {noun}s; expected one, as {kind!r} ({form}, bytes, a file "
            "or its path) or 'path'"
        )
    if kind != of_openai:
        raise InputError(
            f"{place} is a part of type {in_short(kind)}, which this model cannot read; expected "
            f"parts of type 'text', {part_type!r} or {of_openai!r}"
        )
    field = "data" if kind == "input_audio" else "url"
    holder = part.get(kind)
    content = holder.get(field) if isinstance(holder, Mapping) else None
    place = f"{place}.{kind}.{field}"
    if kind == "image_url":
        return _at_url(content, place, limits)
    return _from_base64(content, place, "a sound file in base64")


def _at_url(url: object, place: str, limits: MediaLimits) -> bytes:
    expected = "a data URL such as data:image/png;base64,iVBORw0..."
    text = url if isinstance(url, str) else ""
    if text.lower().startswith(("http://", "https://")):
        if limits.read_url is None:
            raise InputError(
                f"{place} is {in_short(url)}, which is not fetched; expected {expected}; "
                "dsbd-serve --allow-media-urls fetches such URLs"
            )
        try:
            return limits.read_url(text)
        except InputError as error:
            raise InputError(f"{place}: {error}") from error
    head, comma, data = text.partition(",")
    if not (comma and head[:5].lower() == "data:" and head.endswith(";base64")):
        raise InputError(f"{place} is {in_short(url)}; expected {expected}")
    return _from_base64(data, place, expected)


def _from_base64(data: object, place: str, expected: str) -> bytes:
    try:
        if not isinstance(data, str):
            raise ValueError(f"it is a {type(data).__name__}")
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise InputError(f"{place} is not base64 ({error}); expected {expected}") from error
