"""Do target and draft speak the same tokens, and the tokenizer files that go into the bundle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from dsbd_export.checkpoint import Checkpoint
from dsbd_export.errors import ExportError
from dsbd_runtime.bundle import TOKENIZER_FILE

_OPTIONAL_FILES = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja")
_MEND = "choose a pair that was trained with the same tokenizer"


def check_agreement(target: Checkpoint, draft: Checkpoint) -> None:
    """Raise unless both have the same tokenizer, vocabulary size and special tokens."""
    for field in ("vocab_size", "bos_token_id", "eos_token_ids"):
        of_target, of_draft = getattr(target, field), getattr(draft, field)
        if of_target != of_draft:
            raise ExportError(
                f"{field} is {of_target} in the target and {of_draft} in the draft; {_MEND}"
            )
    of_target, of_draft = _read_tokenizer(target), _read_tokenizer(draft)
    _check_vocabulary(_id_by_token(of_target), _id_by_token(of_draft))
    _check_merges(_merges(of_target), _merges(of_draft))
    for section in ("model", "added_tokens"):
        if of_target.get(section) != of_draft.get(section):
            raise ExportError(
                f"the tokenizers of target ({target.folder}) and draft ({draft.folder}) differ in "
                f"section {section!r} of {TOKENIZER_FILE}; {_MEND}"
            )


def copy_tokenizer_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy what turns text into tokens and back, as far as the checkpoint has it."""
    shutil.copyfile(checkpoint.folder / TOKENIZER_FILE, folder / TOKENIZER_FILE)
    for name in _OPTIONAL_FILES:
        if (checkpoint.folder / name).is_file():
            shutil.copyfile(checkpoint.folder / name, folder / name)


def _read_tokenizer(checkpoint: Checkpoint) -> dict[str, Any]:
    file = checkpoint.folder / TOKENIZER_FILE
    if not file.is_file():
        raise ExportError(
            f"the {checkpoint.role} has no {file}; make it with "
            f"AutoTokenizer.from_pretrained({str(checkpoint.folder)!r}).save_pretrained(...)"
        )
    try:
        tokenizer = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ExportError(f"{file} is no JSON ({error}); copy or make it again") from error
    if not isinstance(tokenizer, dict) or not isinstance(tokenizer.get("model"), dict):
        raise ExportError(f"{file} has no section 'model'; copy or make it again")
    return tokenizer


def _id_by_token(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Return token -> id: a dict in BPE and WordPiece, a list of (token, score) in Unigram."""
    vocabulary = tokenizer["model"].get("vocab", {})
    if isinstance(vocabulary, dict):
        return vocabulary
    return {entry[0]: index for index, entry in enumerate(vocabulary)}


def _merges(tokenizer: dict[str, Any]) -> list[Any]:
    merges: list[Any] = tokenizer["model"].get("merges", [])
    # Older files write a merge as "a b", newer ones as ["a", "b"].
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]


def _check_vocabulary(target: dict[str, int], draft: dict[str, int]) -> None:
    if len(target) != len(draft):
        raise ExportError(
            f"the vocabularies differ: {len(target)} tokens in the target's tokenizer, "
            f"{len(draft)} in the draft's; {_MEND}"
        )
    for token, index in target.items():
        if draft.get(token) != index:
            raise ExportError(
                f"the vocabularies differ: token {token!r} is {index} in the target's tokenizer "
                f"and {draft.get(token)} in the draft's; {_MEND}"
            )


def _check_merges(target: list[Any], draft: list[Any]) -> None:
    if target == draft:
        return
    pairs = zip(target, draft, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(target), len(draft)))
    raise ExportError(
        f"merge {index} is {target[index : index + 1]} in the target's tokenizer and "
        f"{draft[index : index + 1]} in the draft's; {_MEND}"
    )
