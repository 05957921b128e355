"""JSON files of a checkpoint, which anybody may have written; errors are one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dsbd_export.errors import ExportError, reason_of


def json_object(file: Path) -> dict[str, Any]:
    """Return the content of a file; raise ExportError unless it is an object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ExportError(
            f"{file} cannot be read as JSON: {reason_of(error)}; copy it again"
        ) from error
    if not isinstance(content, dict):
        raise ExportError(f"{file} has a {type(content).__name__}, expected an object of JSON")
    return content


def json_object_or_none(file: Path) -> dict[str, Any] | None:
    """Return the content of a file, None unless it is there and an object."""
    try:
        return json_object(file)
    except ExportError:
        return None
