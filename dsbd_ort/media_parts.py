"""Parts of messages that are sounds or pictures, as transformers has them, or OpenAI."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

from dsbd_ort.medium_front_end import MediaLimits
from dsbd_runtime.errors import InputError
from dsbd_runtime.text.chat_messages import Message
from dsbd_runtime.typed_json import in_short

_NETWORK = ("http://", "https://")


def content_of(part: Message, place: str, part_type: str, limits: MediaLimits) -> Any:
    """Return the content of a part: bytes of a file, or what ``part_type`` itself holds.

    part_type: "audio" or "image", for parts of that type and OpenAI's for the same.

    InputError: the part is of another type, or has no content that can be read.
    """
    kind, readers = part.get("type"), _READERS[part_type]
    if not isinstance(kind, str) or kind not in readers:
        raise InputError(
            f"{place} is a part of type {in_short(kind)}, which this model cannot read; expected "
            f"parts of type 'text', {' or '.join(map(repr, readers))}"
        )
    return readers[kind](part, place, limits)


def _of_own_type(part: Message, place: str, limits: MediaLimits) -> Any:
    """Return the content of a part of transformers: ``audio`` or ``image``, or ``path``."""
    name = part["type"]
    given = [part[field] for field in (name, "path") if part.get(field) is not None]
    if len(given) != 1:
        noun, form = _CONTENTS[name]
        raise InputError(
            f"{place} has {len(given)} {noun}s; expected one, as {name!r} ({form}, bytes, a file "
            "or its path) or 'path'"
        )
    return given[0]


def _of_input_audio(part: Message, place: str, limits: MediaLimits) -> bytes:
    data = _field(part, "input_audio", "data")
    return _from_base64(data, f"{place}.input_audio.data", "a sound file in base64")


def _of_image_url(part: Message, place: str, limits: MediaLimits) -> bytes:
    url, place = _field(part, "image_url", "url"), f"{place}.image_url.url"
    expected = "a data URL such as data:image/png;base64,iVBORw0..."
    if isinstance(url, str) and url.lower().startswith(_NETWORK):
        if limits.read_url is None:
            raise InputError(
                f"{place} is {in_short(url)}, which is not fetched; expected {expected}; "
                "dsbd-serve --allow-media-urls fetches such URLs"
            )
        try:
            return limits.read_url(url)
        except InputError as error:
            raise InputError(f"{place}: {error}") from error
    head, comma, data = url.partition(",") if isinstance(url, str) else ("", "", url)
    if not (comma and head[:5].lower() == "data:" and head.endswith(";base64")):
        raise InputError(f"{place} is {in_short(url)}; expected {expected}")
    return _from_base64(data, place, expected)


def _field(part: Message, name: str, inner: str) -> object:
    given = part.get(name)
    return given.get(inner) if isinstance(given, Mapping) else None


def _from_base64(data: object, place: str, expected: str) -> bytes:
    try:
        if not isinstance(data, str):
            raise ValueError(f"it is a {type(data).__name__}")
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise InputError(f"{place} is not base64 ({error}); expected {expected}") from error


_READERS: dict[str, dict[str, Callable[[Message, str, MediaLimits], Any]]] = {
    "audio": {"audio": _of_own_type, "input_audio": _of_input_audio},
    "image": {"image": _of_own_type, "image_url": _of_image_url},
}
"""By the type of a front end's parts, those that messages may have."""

_CONTENTS = {"audio": ("sound", "samples"), "image": ("picture", "pixels, an image of Pillow")}
