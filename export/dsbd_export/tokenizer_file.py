"""The tokenizer of a checkpoint: tokenizer.json, or what transformers makes of older files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from dsbd_export.checkpoint import Checkpoint
from dsbd_export.errors import ExportError, reason_of
from dsbd_export.quiet import quiet_libraries
from dsbd_runtime.bundle import TOKENIZER_FILE

_OLDER_FILES = ("vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken")
_OPTIONAL_FILES = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def read_tokenizer(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the content of tokenizer.json, built from older files where there is none."""
    file = checkpoint.folder / TOKENIZER_FILE
    if not file.is_file():
        return _parsed(_built(checkpoint), f"what transformers made for {file}")
    return _parsed(file.read_text(encoding="utf-8"), str(file))


def write_tokenizer_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Write what turns text into tokens and back, as far as the checkpoint has it."""
    if (checkpoint.folder / TOKENIZER_FILE).is_file():
        shutil.copyfile(checkpoint.folder / TOKENIZER_FILE, folder / TOKENIZER_FILE)
    else:
        (folder / TOKENIZER_FILE).write_text(_built(checkpoint), encoding="utf-8")
    for name in _OPTIONAL_FILES:
        if (checkpoint.folder / name).is_file():
            shutil.copyfile(checkpoint.folder / name, folder / name)


def id_by_token(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Return token -> id: a dict in BPE and WordPiece, a list of (token, score) in Unigram."""
    vocabulary = tokenizer["model"].get("vocab", {})
    if isinstance(vocabulary, dict):
        return vocabulary
    return {entry[0]: index for index, entry in enumerate(vocabulary)}


def highest_token_id(tokenizer: dict[str, Any]) -> int:
    """Return the highest id that text can turn into, added tokens included; -1 without tokens."""
    added = (token["id"] for token in tokenizer.get("added_tokens", []))
    return max([*id_by_token(tokenizer).values(), *added], default=-1)


def _built(checkpoint: Checkpoint) -> str:
    """Return the text of tokenizer.json as transformers converts the checkpoint's older files.

    transformers makes an empty tokenizer where it finds no file at all, so that is looked up here.
    """
    folder = checkpoint.folder
    if not any(file for pattern in _OLDER_FILES for file in folder.glob(pattern)):
        raise ExportError(
            f"the {checkpoint.role} has no {folder / TOKENIZER_FILE} and none of "
            f"{', '.join(_OLDER_FILES)} to build it from; copy the tokenizer of its base model"
        )
    try:
        with quiet_libraries():
            tokenizer = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=checkpoint.trust_remote_code, local_files_only=True
            )
            built: str = tokenizer.backend_tokenizer.to_str()
    except Exception as error:
        raise ExportError(
            f"the {checkpoint.role} has no {folder / TOKENIZER_FILE}, and transformers cannot "
            f"build it from the files there: {reason_of(error)}; copy that of its base model"
        ) from error
    return built


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        tokenizer = json.loads(text)
    except ValueError as error:
        raise ExportError(f"{where} is no JSON ({error}); copy or make it again") from error
    if not isinstance(tokenizer, dict) or not isinstance(tokenizer.get("model"), dict):
        raise ExportError(f"{where} has no section 'model'; copy or make it again")
    return tokenizer
