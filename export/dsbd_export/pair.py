"""Target and draft with one tokenizer: tokens must agree, some settings are aligned.

The vocabularies and merges of the two tokenizers, and the meaning of each id, must agree. The
draft's normalization and splitting are not compared: the target's tokenizer reads every prompt.
Checkpoints that were trained with the same tokenizer may differ in three settings, which are
aligned:

* The size of the vocabulary: some families pad it differently for each model size. Rows beyond the
  smaller size belong to no token and are cut. If the target is already exported, a draft with fewer
  rows is extended instead.
* The tokens that end a sequence: a base draft has only an end of text, an instruct target also an
  end of turn. The target decides when a sequence ends, so its list is used for both.
* The token that begins a sequence: prompts are tokenized once, with the target's tokenizer.

Added tokens that only one model has, such as a padding token, are reported. The last two settings
change the draft's acceptance, never the generated text.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.errors import ExportError
from dsbd_export.tokenizers.tokenizer_files import id_by_token, read_tokenizer, tokenizer_content
from dsbd_runtime.bundle_files.bundle import TOKENIZER_FILE, Bundle, ModelEntry

_FIX = "choose a pair that was trained with the same tokenizer"


def agreed_pair(
    target: Checkpoint, draft: Checkpoint, report: Callable[[str], None]
) -> tuple[Checkpoint, Checkpoint]:
    """Return both with one vocabulary size and the target's special tokens; else ExportError."""
    check_tokens(read_tokenizer(target), target.vocab_size, draft, report)
    agreed_target = replace(target, vocab_size=min(target.vocab_size, draft.vocab_size))
    agreed_draft = _aligned(draft, agreed_target)
    _report_changes(target, agreed_target, report)
    _report_changes(draft, agreed_draft, report)
    return agreed_target, agreed_draft


def agreed_draft(bundle: Bundle, draft: Checkpoint, report: Callable[[str], None]) -> Checkpoint:
    """Return a draft with vocabulary size and special tokens of a bundle; report each change."""
    target = bundle.entry("target")
    of_target = tokenizer_content(bundle.path / TOKENIZER_FILE)
    check_tokens(of_target, target.vocab_size, draft, report)
    agreed = _aligned(draft, target)
    _report_changes(draft, agreed, report)
    return agreed


def _aligned(draft: Checkpoint, target: Checkpoint | ModelEntry) -> Checkpoint:
    encoder = draft.encoder
    if encoder is not None and target.encoder is not None:
        encoder = replace(encoder, start_token_id=target.encoder.start_token_id)
    return replace(
        draft,
        vocab_size=target.vocab_size,
        bos_token_id=target.bos_token_id,
        eos_token_ids=target.eos_token_ids,
        encoder=encoder,
    )


def _report_changes(
    checkpoint: Checkpoint, agreed: Checkpoint, report: Callable[[str], None]
) -> None:
    for field in ("vocab_size", "bos_token_id", "eos_token_ids"):
        before, now = getattr(checkpoint, field), getattr(agreed, field)
        if before != now:
            report(f"{checkpoint.role}: {field} is {before} in the checkpoint, {now} here")


def context_warning(
    target: Checkpoint | ModelEntry, draft: Checkpoint | None, max_context: int | None
) -> str | None:
    """Return a warning if the bundle's context is shorter than the target's or than requested."""
    length = target.context_length
    reads_media = getattr(target, "given", None) is not None
    if draft is not None and (draft.reads_whole_path or reads_media):
        length = min(length, draft.context_length)
    if length < target.context_length:
        return (
            f"warning: requests can use {length} tokens, the context of the draft; that of the "
            f"target is {target.context_length}: choose a draft with a longer one to use it"
        )
    if max_context is not None and length < max_context:
        return (
            f"warning: requests can use {length} tokens, the context of the target; max_context is "
            f"{max_context}"
        )
    longest = getattr(getattr(target, "config", None), "max_position_embeddings", None) or length
    if max_context is None and length < longest:
        return (
            f"warning: requests can use {length} tokens; up to this length the target's rotary "
            f"frequencies are those of short texts; max_context={longest} exports those of long "
            "texts, for all texts"
        )
    return None


def resize_vocabulary(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Give embedding and output head the agreed vocabulary size, in place."""
    num_rows = model.config.get_text_config().vocab_size
    if num_rows == checkpoint.vocab_size:
        return
    model.resize_token_embeddings(checkpoint.vocab_size, mean_resizing=False)
    if num_rows > checkpoint.vocab_size:
        return
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        for parameter in layer.parameters():  # weight and bias, with one row for each token
            parameter.data[num_rows:] = parameter.data[num_rows - 1]


def check_tokens(
    of_target: dict[str, Any], target_size: int, draft: Checkpoint, report: Callable[[str], None]
) -> None:
    """Raise ExportError unless a draft has the target's tokens, and logits for all of them."""
    of_draft = read_tokenizer(draft)
    _check_vocabulary(id_by_token(of_target), id_by_token(of_draft))
    _check_merges(_merges(of_target), _merges(of_draft))
    for name in ("type", "vocab"):  # Unigram's vocabulary has scores too
        if of_target["model"].get(name) != of_draft["model"].get(name):
            raise ExportError(
                f"the tokenizers of target and draft differ in {name!r} of section 'model' of "
                f"{TOKENIZER_FILE}; {_FIX}"
            )
    _check_added(_added(of_target), _added(of_draft), report)
    added_below = [i for i in _added(of_target).values() if i < target_size]
    highest_id = max([*id_by_token(of_target).values(), *added_below], default=-1)
    if target_size != draft.vocab_size and min(target_size, draft.vocab_size) <= highest_id:
        raise ExportError(
            f"vocab_size is {target_size} in the target and {draft.vocab_size} in the draft, "
            f"but their tokenizer has ids up to {highest_id}; {_FIX}"
        )


def _check_added(
    target: dict[str, int], draft: dict[str, int], report: Callable[[str], None]
) -> None:
    """Raise ExportError for an added token with another meaning in the draft."""
    token_by_id = {index: token for token, index in draft.items()}
    for token, index in target.items():
        theirs = token_by_id.get(index, token)
        if theirs != token or draft.get(token, index) != index:
            raise ExportError(
                f"the added tokens differ: {index} is {token!r} in the target's tokenizer; in the "
                f"draft's it is {theirs!r}, and {token!r} is {draft.get(token)}; {_FIX}"
            )
    for whose, tokens, other_tokens in (("target", target, draft), ("draft", draft, target)):
        if alone := sorted(tokens.keys() - other_tokens.keys(), key=tokens.__getitem__):
            report(f"only the {whose}'s tokenizer has the added tokens {', '.join(alone[:5])}")


def _added(tokenizer: dict[str, Any]) -> dict[str, int]:
    return {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}


def _merges(tokenizer: dict[str, Any]) -> list[Any]:
    merges: list[Any] = tokenizer["model"].get("merges", [])
    # Older files write a merge as "a b", newer ones as ["a", "b"].
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]


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
