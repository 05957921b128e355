"""The JSON of a request: one object, the same for ``--json`` and for a line of a batch."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import Any

from dsbd_ort.generated import GenerationResult

JSON_VERSION = 1
"""Raised when a name goes or changes its meaning; a new name alone does not raise it."""


def result_object(result: GenerationResult) -> dict[str, Any]:
    """Return the fields of an answered request."""
    return {"version": JSON_VERSION, **dataclasses.asdict(result)}


def error_object(message: str) -> dict[str, Any]:
    """Return the fields of a request that was not answered."""
    return {"version": JSON_VERSION, "error": message}


def json_text(fields: Any, *, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Return JSON, on one line without ``indent``; NaN and infinity, which it lacks, become null.

    Characters stand for themselves but for lone surrogates, or all beyond ASCII.
    """
    dumps = functools.partial(json.dumps, allow_nan=False, indent=indent)
    try:
        text = dumps(fields, ensure_ascii=ensure_ascii)
    except ValueError:
        fields = _finite(fields)
        text = dumps(fields, ensure_ascii=ensure_ascii)
    try:
        text.encode()
    except UnicodeEncodeError:
        return dumps(fields, ensure_ascii=True)
    return text


def _finite(value: Any) -> Any:
    """Return a copy with None for every number that is not finite."""
    if isinstance(value, dict):
        return {_finite(name): _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
