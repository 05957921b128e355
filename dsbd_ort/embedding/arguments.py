"""Arguments of a C caller as Python values; errors name the argument and the fix."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from dsbd_ort.decoding.option_values import did_you_mean
from dsbd_ort.engine import ServiceLimits
from dsbd_ort.pipeline import PipelineSettings
from dsbd_ort.pipeline_options import PipelineOptions
from dsbd_runtime.errors import InputError
from dsbd_runtime.typed_json import in_short


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


def opening(bundle: bytes, settings: bytes | None) -> tuple[PipelineSettings, ServiceLimits]:
    """Return the arguments of dsbd_open: a bundle to open, and the limits of its service.

    Raises:
        InputError, ConfigError: a setting is unknown or invalid.
    """
    given = json_object("settings", settings)
    of_limits = {field.name for field in fields(ServiceLimits)}
    known = of_limits | {field.name for field in fields(PipelineOptions)}
    for name in given.keys() - known:
        expected = did_you_mean(name, known) or f"; expected one of {', '.join(sorted(known))}"
        raise InputError(f"settings has {in_short(name)}{expected}")
    limits = {name: given.pop(name) for name in of_limits & given.keys()}
    options = PipelineOptions.of(given)
    folder = Path(decoded("bundle", bundle))
    return PipelineSettings(bundle=folder, **vars(options)), ServiceLimits(**limits)


def _json(name: str, content: bytes) -> Any:
    text = decoded(name, content)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is invalid JSON ({error}): {_start(content)}") from error


def _start(content: bytes) -> str:
    text = decoded("text", content)
    return text if len(text) <= 40 else f"{text[:40]}..."
