"""Do target and draft speak the same tokens? What must agree is checked, what may differ is set.

Tokens must agree: vocabulary, merges and added tokens of the two tokenizers. Three things may
differ between checkpoints that were trained with one tokenizer, and are then made the same:

* The size of the vocabulary, which some families pad by model size. Rows behind the smaller size
  belong to no token; they are cut.
* The tokens that end a sequence: a base draft knows its end of text, an instruct target its end
  of turn as well. A sequence ends where the target ends it, so the target's list holds for both.
* The token that begins a sequence. The prompt is tokenized once, as the target wants it.

The last two change how well the draft guesses, never what is generated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from dsbd_export.checkpoint import Checkpoint
from dsbd_export.errors import ExportError
from dsbd_export.tokenizer_file import highest_token_id, id_by_token, read_tokenizer
from dsbd_runtime.bundle import TOKENIZER_FILE

_MEND = "choose a pair that was trained with the same tokenizer"


def agreed_pair(
    target: Checkpoint, draft: Checkpoint, report: Callable[[str], None]
) -> tuple[Checkpoint, Checkpoint]:
    """Return both with one vocabulary size and the target's special tokens; report each change.

    Raises:
        ExportError: the tokenizers differ, or a model has no logits for some of their tokens.
    """
    of_target, of_draft = read_tokenizer(target), read_tokenizer(draft)
    _check_tokenizers(target, of_target, draft, of_draft)
    vocab_size = min(target.vocab_size, draft.vocab_size)
    if target.vocab_size != draft.vocab_size:
        _check_size(vocab_size, target, draft, highest_token_id(of_target))
    agreed_target = replace(target, vocab_size=vocab_size)
    agreed_draft = replace(
        draft,
        vocab_size=vocab_size,
        bos_token_id=target.bos_token_id,
        eos_token_ids=target.eos_token_ids,
    )
    for checkpoint, agreed in ((target, agreed_target), (draft, agreed_draft)):
        for field in ("vocab_size", "bos_token_id", "eos_token_ids"):
            own, now = getattr(checkpoint, field), getattr(agreed, field)
            if own != now:
                report(f"{checkpoint.role}: {field} is {own} in the checkpoint, {now} here")
    return agreed_target, agreed_draft


def cut_vocabulary(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Cut embedding and output head to the vocabulary that was agreed on, in place."""
    if model.config.vocab_size != checkpoint.vocab_size:
        model.resize_token_embeddings(checkpoint.vocab_size)


def _check_size(vocab_size: int, target: Checkpoint, draft: Checkpoint, highest_id: int) -> None:
    if vocab_size <= highest_id:
        raise ExportError(
            f"vocab_size is {target.vocab_size} in the target and {draft.vocab_size} in the draft, "
            f"but their tokenizer has ids up to {highest_id}; {_MEND}"
        )


def _check_tokenizers(
    target: Checkpoint, of_target: dict[str, Any], draft: Checkpoint, of_draft: dict[str, Any]
) -> None:
    _check_vocabulary(id_by_token(of_target), id_by_token(of_draft))
    _check_merges(_merges(of_target), _merges(of_draft))
    for section in ("model", "added_tokens"):
        if _without_merges(of_target.get(section)) != _without_merges(of_draft.get(section)):
            raise ExportError(
                f"the tokenizers of target ({target.folder}) and draft ({draft.folder}) differ in "
                f"section {section!r} of {TOKENIZER_FILE}; {_MEND}"
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
