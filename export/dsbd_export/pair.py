"""Target and draft with one tokenizer: what must agree is checked, what may differ is aligned.

Tokens must agree: vocabulary, merges and added tokens of the two tokenizers. Three things may
differ between checkpoints that were trained with one tokenizer, and are then aligned:

* The size of the vocabulary, which some families pad by model size. Rows beyond the smaller size
  belong to no token; they are cut. Where the target was exported before, as it is, a draft that has
  fewer rows gets more.
* The tokens that end a sequence: a base draft knows its end of text, an instruct target its end
  of turn as well. A sequence ends where the target ends it, so the target's list holds for both.
* The token that begins a sequence. The prompt is tokenized once, with the target's.

The last two change the draft's acceptance, never the generated text.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

from dsbd_export.checkpoint import Checkpoint, quiet_libraries
from dsbd_export.errors import ExportError, reason_of
from dsbd_export.feature_draft.agreement import agreed_features
from dsbd_runtime.bundle import TOKENIZER_FILE, Bundle, ModelEntry

_FIX = "choose a pair that was trained with the same tokenizer"

_OLDER_FILES = ("vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken")
_OPTIONAL_FILES = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def agreed_pair(
    target: Checkpoint, draft: Checkpoint, report: Callable[[str], None]
) -> tuple[Checkpoint, Checkpoint]:
    """Return both with one vocabulary size and the target's special tokens; report each change.

    Raises:
        ExportError: the tokenizers differ, or a model has no logits for some of their tokens.
    """
    of_target = read_tokenizer(target)
    if draft.features is None or (draft.folder / TOKENIZER_FILE).is_file():
        _check_tokens(target.folder, of_target, target.vocab_size, draft)
    if draft.features is not None:
        return target, replace(agreed_features(draft, target), target_folder=target.folder)
    agreed_target = replace(target, vocab_size=min(target.vocab_size, draft.vocab_size))
    agreed_draft = _aligned(draft, agreed_target)
    _report_changes(target, agreed_target, report)
    _report_changes(draft, agreed_draft, report)
    return agreed_target, agreed_draft


def agreed_draft(bundle: Bundle, draft: Checkpoint, report: Callable[[str], None]) -> Checkpoint:
    """Return a draft with vocabulary size and special tokens of a bundle; report each change.

    Raises as ``agreed_pair``.
    """
    target, file = bundle.entry("target"), bundle.path / TOKENIZER_FILE
    of_target = _parsed(file.read_text(encoding="utf-8"), str(file))
    if draft.features is None or (draft.folder / TOKENIZER_FILE).is_file():
        _check_tokens(bundle.path, of_target, target.vocab_size, draft)
    if draft.features is not None:
        return agreed_features(draft, target)
    agreed = _aligned(draft, target)
    _report_changes(draft, agreed, report)
    return agreed


def _aligned(draft: Checkpoint, target: Checkpoint | ModelEntry) -> Checkpoint:
    return replace(
        draft,
        vocab_size=target.vocab_size,
        bos_token_id=target.bos_token_id,
        eos_token_ids=target.eos_token_ids,
    )


def _report_changes(own: Checkpoint, agreed: Checkpoint, report: Callable[[str], None]) -> None:
    for field in ("vocab_size", "bos_token_id", "eos_token_ids"):
        before, now = getattr(own, field), getattr(agreed, field)
        if before != now:
            report(f"{own.role}: {field} is {before} in the checkpoint, {now} here")


def context_warning(
    target: Checkpoint | ModelEntry, draft: Checkpoint | None, max_context: int | None
) -> str | None:
    """Return a line where the bundle's context is shorter than the target's, or than asked for."""
    models = [target] if draft is None else [target, draft]
    length = min(model.context_length for model in models)
    if length < target.context_length:
        return (
            f"warning: requests can use {length} tokens, the context of the draft; that of the "
            f"target is {target.context_length}: choose a draft with a longer one to use it"
        )
    if max_context is not None and length < max_context:
        return (
            f"warning: requests can use {length} tokens, the context of the "
            f"{'target' if draft is None else 'checkpoints'}; max_context asks for {max_context}"
        )
    return None


def resize_vocabulary(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Give embedding and output head the vocabulary size that was agreed on, in place.

    Rows beyond the checkpoint's are copies of its last one, which is padding of its own or a token
    that ends the vocabulary: as rare as they come, whatever the scale of the model's logits.
    """
    num_own = model.config.vocab_size
    if num_own == checkpoint.vocab_size:
        return
    model.resize_token_embeddings(checkpoint.vocab_size, mean_resizing=False)
    if num_own > checkpoint.vocab_size:
        return
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        for parameter in layer.parameters():  # weight and bias, of one row for each token
            parameter.data[num_own:] = parameter.data[num_own - 1]


def _check_tokens(
    target: Path, of_target: dict[str, Any], target_size: int, draft: Checkpoint
) -> None:
    """Raise ExportError unless a draft has the tokens of a target, and logits for all of them.

    Args:
        target: the folder of the target's tokenizer.
        of_target: its content.
        target_size: vocabulary size of the target.
        draft: as it is.
    """
    _check_tokenizers(target, of_target, draft.folder, read_tokenizer(draft))
    highest_id = highest_token_id(of_target)
    if target_size != draft.vocab_size and min(target_size, draft.vocab_size) <= highest_id:
        raise ExportError(
            f"vocab_size is {target_size} in the target and {draft.vocab_size} in the draft, "
            f"but their tokenizer has ids up to {highest_id}; {_FIX}"
        )


def _check_tokenizers(
    target: Path, of_target: dict[str, Any], draft: Path, of_draft: dict[str, Any]
) -> None:
    _check_vocabulary(id_by_token(of_target), id_by_token(of_draft))
    _check_merges(_merges(of_target), _merges(of_draft))
    for section in ("model", "added_tokens"):
        if _without_merges(of_target.get(section)) != _without_merges(of_draft.get(section)):
            raise ExportError(
                f"the tokenizers of target ({target}) and draft ({draft}) differ in section "
                f"{section!r} of {TOKENIZER_FILE}; {_FIX}"
            )


def _merges(tokenizer: dict[str, Any]) -> list[Any]:
    merges: list[Any] = tokenizer["model"].get("merges", [])
    # Older files write a merge as "a b", newer ones as ["a", "b"].
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]


def _without_merges(section: Any) -> Any:
    if not isinstance(section, dict):
        return section
    return {name: content for name, content in section.items() if name != "merges"}


def _check_vocabulary(target: dict[str, int], draft: dict[str, int]) -> None:
    if len(target) != len(draft):
        raise ExportError(
            f"the vocabularies differ: {len(target)} tokens in the target's tokenizer, "
            f"{len(draft)} in the draft's; {_FIX}"
        )
    for token, index in target.items():
        if draft.get(token) != index:
            raise ExportError(
                f"the vocabularies differ: token {token!r} is {index} in the target's tokenizer "
                f"and {draft.get(token)} in the draft's; {_FIX}"
            )


def _check_merges(target: list[Any], draft: list[Any]) -> None:
    if target == draft:
        return
    pairs = zip(target, draft, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(target), len(draft)))
    raise ExportError(
        f"merge {index} is {target[index : index + 1]} in the target's tokenizer and "
        f"{draft[index : index + 1]} in the draft's; {_FIX}"
    )


def read_tokenizer(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the content of tokenizer.json, built from older files where there is none."""
    file = checkpoint.folder / TOKENIZER_FILE
    if not file.is_file():
        return _parsed(_built(checkpoint), f"the tokenizer that transformers built for {file}")
    return _parsed(file.read_text(encoding="utf-8"), str(file))


def write_tokenizer_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the tokenizer files that the checkpoint has."""
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
        raise ExportError(f"{where} is invalid JSON ({error}); copy or create it again") from error
    if not isinstance(tokenizer, dict) or not isinstance(tokenizer.get("model"), dict):
        raise ExportError(f"{where} has no section 'model'; copy or create it again")
    return tokenizer
