"""The JSON of a request: one object, the same for ``--json`` and for a line of a batch."""

from __future__ import annotations

import dataclasses
import json
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


def json_text(fields: dict[str, Any]) -> str:
    """Return one line of JSON. Characters stand for themselves but for lone surrogates."""
    text = json.dumps(fields, ensure_ascii=False)
    has_surrogate = any("\ud800" <= character <= "\udfff" for character in text)
    return json.dumps(fields) if has_surrogate else text
