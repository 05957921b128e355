"""JSON files of a checkpoint: any object, and the tokens that a draft was trained to propose."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


PROPOSED_TOKENS_FILE = "proposed_tokens.json"


def write_proposed_tokens(folder: Path, tokens: NDArray[np.int64]) -> None:
    """Write tokens, (n,) int64 ascending, into the folder of a draft."""
    text = json.dumps(tokens.tolist())
    (folder / PROPOSED_TOKENS_FILE).write_text(f"{text}\n", encoding="utf-8")


def read_proposed_tokens(folder: Path, vocab_size: int) -> NDArray[np.int64] | None:
    """Return the tokens that a draft was trained to propose, None for all; or raise ExportError."""
    file = folder / PROPOSED_TOKENS_FILE
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ExportError(
            f"{file} is not JSON ({error}); copy it again from the trained draft"
        ) from error
    if not _are_tokens(content, vocab_size):
        raise ExportError(
            f"{file} is not an ascending list of distinct token ids from 0 to {vocab_size - 1}; "
            "copy it again from the trained draft"
        )
    return np.array(content, np.int64)


def _are_tokens(content: Any, vocab_size: int) -> bool:
    if not isinstance(content, list) or any(type(each) is not int for each in content):
        return False
    return content == sorted(set(content) & set(range(vocab_size))) and bool(content)
