"""Arguments of a C caller as Python values; errors name the argument and the fix."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from dsbd_errors import DsbdError
from dsbd_ort.decoding.option_values import did_you_mean
from dsbd_ort.engine import ServiceLimits
from dsbd_ort.pipeline import PipelineSettings
from dsbd_ort.pipeline_options import PipelineOptions
from dsbd_ort.results import json_text
from dsbd_runtime.errors import InputError
from dsbd_runtime.typed_json import in_short

_PIPELINE_TYPES = get_type_hints(PipelineOptions)
_LIMIT_TYPES = get_type_hints(ServiceLimits)
_JSON_NAMES = {str: "a text", int: "a whole number", bool: "true or false", NoneType: "null"}


@dataclass(frozen=True)
class Opening:
    """A bundle to open, and the limits of its service."""

    pipeline: PipelineSettings
    limits: ServiceLimits


def decoded(name: str, content: bytes) -> str:
    """Decode UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is invalid UTF-8: byte 0x{content[error.start]:02x} at {error.start}"
        ) from error


def json_object(name: str, content: bytes | None) -> dict[str, Any]:
    """Return the fields of a JSON object; None has none."""
    if content is None:
        return {}
    fields = _json(name, content)
    if not isinstance(fields, dict):
        raise InputError(f"{name} is {_start(content)}; expected a JSON object")
    return fields


def json_messages(content: bytes) -> list[Any]:
    """Return the messages of a chat."""
    messages = _json("messages", content)
    if not isinstance(messages, list):
        raise InputError(
            f"messages is {_start(content)}; expected a JSON array such as "
            '[{"role": "user", "content": "Hello"}]'
        )
    return messages


def opening(bundle: bytes, settings: bytes | None) -> Opening:
    """Return the arguments of dsbd_open."""
    given = json_object("settings", settings)
    hint_by_name = _PIPELINE_TYPES | _LIMIT_TYPES
    for name, value in given.items():
        if name not in hint_by_name:
            close = did_you_mean(name, hint_by_name)
            expected = close or f"; expected one of {', '.join(sorted(hint_by_name))}"
            raise InputError(f"settings has {in_short(name)}{expected}")
        hint = hint_by_name[name]
        if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
            wanted = " or ".join(_JSON_NAMES[kind] for kind in get_args(hint) or (hint,))
            raise InputError(f"settings has {name} {_shown(value)}; expected {wanted}")
    limits = {name: value for name, value in given.items() if name in _LIMIT_TYPES}
    opened = {name: value for name, value in given.items() if name in _PIPELINE_TYPES}
    folder = Path(decoded("bundle", bundle))
    return Opening(PipelineSettings(bundle=folder, **opened), ServiceLimits(**limits))


def _json(name: str, content: bytes) -> Any:
    try:
        return json.loads(decoded(name, content))
    except DsbdError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is invalid JSON ({error}): {_start(content)}") from error


def _shown(value: Any) -> str:
    try:
        return _start(json_text(value).encode())
    except (ValueError, RecursionError):  # a number of too many digits, or nested too deep
        return in_short(value)


def _start(content: bytes) -> str:
    text = decoded("text", content)
    return text if len(text) <= 40 else f"{text[:40]}..."
