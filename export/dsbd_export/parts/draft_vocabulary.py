"""Draft that proposes only some tokens of the vocabulary: choice of the tokens, cut of the head.

With a large vocabulary, the head is most of a small draft. The target decides on every token, so a
shorter head only lowers the acceptance (FR-Spec, arXiv 2502.14856).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.config import LARGE_VOCABULARY, DraftedOptions
from dsbd_export.errors import ExportError
from dsbd_export.parity_cases import Reference
from dsbd_export.progress import Report
from dsbd_export.texts import readable_files, texts_of
from dsbd_export.tokenizers.tokenizer_files import tokenizer_json

_SHORTER, _SHORT = (
    8_192,
    32_768,
)  # tokens of a shorter head; the latter for vocabularies of many languages
_WORTH_IT = 0.8  # share of the weights that a call may still read for the advice to be given


def with_draft_vocabulary(draft: Checkpoint, options: DraftedOptions, report: Report) -> Checkpoint:
    """Return the draft with the tokens that it may propose; ExportError for unusable options."""
    num_tokens = options.draft_vocab
    if draft.proposed_tokens is not None:
        return _as_trained(draft, options, report)
    if num_tokens is None:
        return draft
    if draft.names_proposed:
        raise ExportError(
            f"draft_vocab={num_tokens} has no form for a feature draft, whose d2t names the tokens "
            "that it proposes; leave it out"
        )
    if num_tokens >= draft.vocab_size:
        raise ExportError(
            f"draft_vocab={num_tokens} leaves out none of {draft.vocab_size} tokens; use fewer, or "
            "leave it out"
        )
    counts = _token_counts(draft, options.draft_texts)
    tokens = most_frequent_tokens(counts, draft.eos_token_ids, num_tokens)
    if total := counts.sum():
        share = f", {counts[tokens].sum() / total:.2%} of the texts"
    else:
        share = ", the lowest ids"
    report(f"draft: proposes {num_tokens:,} of {draft.vocab_size:,} tokens{share}")
    return dataclasses.replace(draft, proposed_tokens=tokens)


def _as_trained(draft: Checkpoint, options: DraftedOptions, report: Report) -> Checkpoint:
    """Return a draft that was trained to propose some tokens; ExportError for other options."""
    assert draft.proposed_tokens is not None
    num_tokens = len(draft.proposed_tokens)
    if options.draft_vocab is not None:
        raise ExportError(
            f"draft_vocab={options.draft_vocab} has no meaning for the draft at {draft.folder}, "
            f"which was trained to propose {num_tokens} tokens; leave it out"
        )
    if num_tokens < options.num_top_logits:
        raise ExportError(
            f"logits={options.logits!r} has more logits than the {num_tokens} tokens that the "
            f"draft at {draft.folder} was trained to propose; use topk:{num_tokens} or less"
        )
    report(f"draft: proposes {num_tokens:,} of {draft.vocab_size:,} tokens, as it was trained")
    return draft


def most_frequent_tokens(
    counts: NDArray[np.int64], always: Sequence[int], num_tokens: int
) -> NDArray[np.int64]:
    """Return the most frequent tokens by counts (V,), with ``always``; (num_tokens,) ascending."""
    ranks = counts.copy()
    ranks[list(always)] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-ranks, kind="stable")[:num_tokens])


def _token_counts(draft: Checkpoint, texts: tuple[str, ...]) -> NDArray[np.int64]:
    """Return how often each token is in the texts, (V,) int64; zeros without texts."""
    counts = np.zeros(draft.vocab_size, np.int64)
    if not texts:
        return counts
    tokenizer = Tokenizer.from_str(tokenizer_json(draft))
    for file in readable_files("draft_texts", texts):
        for _name, pieces in texts_of(file):
            for piece in pieces:
                ids = np.array(tokenizer.encode(piece, add_special_tokens=False).ids, np.int64)
                counts += np.bincount(ids[ids < len(counts)], minlength=len(counts))
    return counts


def cut_head(model: PreTrainedModel, tokens: NDArray[np.int64]) -> None:
    """Keep only the rows of ``tokens`` in a model's head; ExportError if that is impossible."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ExportError(
            f"draft_vocab={len(tokens)} has no form for the draft's head, "
            f"{type(head).__name__}; leave it out"
        )
    has_bias = head.bias is not None
    short: nn.Linear = nn.utils.skip_init(  # type: ignore[no-untyped-call]
        nn.Linear, head.in_features, len(tokens), bias=has_bias, dtype=head.weight.dtype
    )
    with torch.no_grad():
        for parameter, whole in zip(short.parameters(), head.parameters(), strict=True):
            parameter.copy_(whole[torch.from_numpy(tokens)])
    model.set_output_embeddings(short)
    bias = getattr(model, "final_logits_bias", None)  # added after the head, by Marian and BART
    if bias is not None:
        model.final_logits_bias = bias[:, torch.from_numpy(tokens)]


def shorter_head_advice(model: PreTrainedModel, draft: Checkpoint) -> str | None:
    """Return advice about a shorter head of a draft, None if it would save little."""
    head, whole = model.get_output_embeddings(), draft.vocab_size
    is_settled = draft.proposed_tokens is not None or draft.names_proposed
    if draft.role != "draft" or is_settled or whole < LARGE_VOCABULARY:
        return None
    if not isinstance(head, nn.Linear):
        return None
    weights = {id(weight): weight.numel() for weight in model.parameters()}
    encoder = model.get_encoder() if model.config.is_encoder_decoder else None
    for unread in (model.get_input_embeddings(), encoder):
        for weight in unread.parameters() if unread is not None else ():
            if weight is not head.weight:
                weights.pop(id(weight), None)
    num_read, num_tokens = sum(weights.values()), _SHORTER if whole <= 8 * _SHORTER else _SHORT
    num_left = num_read - head.weight.numel() * (whole - num_tokens) // whole
    if num_left > _WORTH_IT * num_read:
        return None
    return (
        f"draft: its head over {whole:,} tokens is {head.weight.numel() / num_read:.0%} of the "
        f"weights that a call reads; with --draft-vocab {num_tokens} --draft-texts TEXTS a call "
        f"would read {num_left / num_read:.0%} of them, and agree less where other tokens come"
    )


def spread(logits: Tensor, tokens: Tensor | None, vocab_size: int) -> Tensor:
    """Return logits of some tokens, (R, n), as logits over the vocabulary, (R, V), else -inf.

    tokens: (n,) int64; None: all. A scatter is used: gathering single numbers is ten times slower.
    """
    if tokens is None:
        return logits
    every_row = logits[..., :1] == logits[..., :1]
    nothing = torch.full((1,), -torch.inf, dtype=logits.dtype)
    others = torch.where(every_row, nothing, nothing).expand(*logits.shape[:-1], vocab_size)
    return others.scatter(-1, torch.where(every_row, tokens, tokens), logits)


def without_others(reference: Reference, tokens: NDArray[np.int64] | None) -> Reference:
    """Return a reference in which only ``tokens`` keep their logits, the others have -inf.

    tokens: None leaves the reference as it is.
    """
    if tokens is None:
        return reference
    logits = np.full_like(reference.logits, -np.inf)
    logits[:, tokens] = reference.logits[:, tokens]
    return dataclasses.replace(reference, logits=logits)
