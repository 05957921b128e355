"""Drafts of encoder-decoders: one or two layers of the target's decoder over its encoder.

The encoder is the target's and stays as it is, so that the export shares it: a source is read once
for both. So do embeddings and head where the encoder has them too. What is learned are the layers
of the decoder, which begin as some of the target's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from dsbd_export.checkpoint import Checkpoint, quiet_libraries
from dsbd_export.distill.acceptance import (
    Acceptance,
    Best,
    HeldOutSamples,
    acceptance_by_depth,
)
from dsbd_export.distill.config import FEATURE, DistillConfig
from dsbd_export.distill.draft_head import DraftHead
from dsbd_export.distill.draft_model import kept_layers
from dsbd_export.distill.loss import Coverage, distance, selected
from dsbd_export.distill.source_teacher import hidden_states
from dsbd_export.distill.sources import SourceRows
from dsbd_export.distill.teaching import Teaching
from dsbd_export.encoder_decoder.checkpoint import num_decoder_layers
from dsbd_export.errors import ExportError, reason_of
from dsbd_export.proposed_tokens import write_proposed_tokens

_LAYER = re.compile(r"(?<=decoder\.)(layers|block)\.(\d+)\.")
_COUNTS = ("num_decoder_layers", "decoder_layers")
_DEFAULT_LAYERS = 1


class SourceDrafts:
    """Decoders of few layers over the target's encoder; see DraftKind."""

    bounds_logits = False

    def __init__(
        self, config: DistillConfig, teaching: Teaching, proposed: NDArray[np.int64] | None
    ) -> None:
        """See DraftKind."""
        self._config = config
        self._teaching = teaching
        self._proposed = proposed
        self._coverage = None if config.coverage is None else Coverage(config.coverage)
        self._head = DraftHead(teaching.checkpoint.vocab_size, proposed, teaching.device)

    @staticmethod
    def check(config: DistillConfig, target: Checkpoint) -> None:
        """See DraftKind."""
        family = f"the target (family {target.family}), an encoder-decoder"
        if config.kind == FEATURE:
            raise ExportError(f"kind={FEATURE!r} has no form for {family}; leave it out")
        if config.params is not None:
            raise ExportError(
                f"params={config.params!r} has no form for {family}, whose draft is some layers of "
                "its decoder; give target_layers, 1 or 2, instead"
            )
        if config.learn_answers:
            raise ExportError(f"learn_answers has no meaning for {family}; leave it out")
        num_layers, wanted = num_decoder_layers(target.config), _num_layers(config)
        if wanted >= num_layers:
            raise ExportError(
                f"target_layers={wanted} is no draft: the target's decoder has {num_layers} "
                "layers; use fewer, as 1"
            )
        if config.draft_vocab is not None and config.draft_vocab >= target.vocab_size:
            raise ExportError(
                f"draft_vocab={config.draft_vocab} leaves out none of {target.vocab_size} tokens; "
                "use fewer, or leave it out"
            )

    def first_draft(self) -> PreTrainedModel:
        """See DraftKind."""
        teaching = self._teaching
        return cut_decoder(teaching.target, teaching.checkpoint, _num_layers(self._config))

    def loss(self, draft: Any, batch: tuple[Tensor, ...]) -> Tensor:
        """See DraftKind."""
        tokens, ids, log_p, counted, tv_weight = batch
        logits = self._logits(draft, tokens, counted)
        ids = selected(ids, counted)
        log_p, mass = self._head.proposable(ids, selected(log_p, counted))
        log_q = self._head.log_probs_of_logits(logits, ids)
        return (mass * distance(log_q, log_p, tv_weight, self._coverage)).mean()

    def acceptance(self, draft: Any, samples: list[HeldOutSamples]) -> Acceptance:
        """See DraftKind: the same at every depth of a draft."""

        def best_of(tokens: Tensor, counted: Tensor) -> Iterable[Best]:
            yield self._head.best_of_logits(self._logits(draft, tokens, counted))

        teaching = self._teaching
        return acceptance_by_depth(
            draft, best_of, samples, teaching.held_out.sampling, teaching.device
        )

    def write(self, draft: Any, folder: Path) -> None:
        """See DraftKind; the encoder too, so that the draft is a checkpoint of its own."""
        with quiet_libraries():
            draft.save_pretrained(folder)
        if self._proposed is not None:
            write_proposed_tokens(folder, self._proposed)

    def _logits(self, draft: Any, tokens: Tensor, counted: Tensor) -> Tensor:
        """Return the logits behind the tokens of targets that count, (n, V) float32."""
        rows = SourceRows.of(tokens, counted, self._teaching.num_begin)
        with self._teaching.device.autocast():
            hidden = hidden_states(self._teaching.target, rows.sources, rows.is_source)
            out = draft(
                encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
                attention_mask=rows.is_source,
                decoder_input_ids=rows.targets,
                use_cache=False,
            )
        logits: Tensor = selected(out.logits, rows.counted).float()
        return logits


def cut_decoder(target: PreTrainedModel, checkpoint: Checkpoint, num_kept: int) -> PreTrainedModel:
    """Return the target with some layers of its decoder, which alone can be trained.

    Raises:
        ExportError: the layers of its family are not found.
    """
    kept = kept_layers(num_decoder_layers(checkpoint.config), num_kept)
    content = checkpoint.config.to_dict()
    content |= {name: num_kept for name in _COUNTS if content.get(name) is not None}
    config = type(checkpoint.config).from_dict(content)
    weights = target.state_dict()
    try:
        with quiet_libraries():
            draft: PreTrainedModel = type(target)(config).float()
        draft.load_state_dict(
            {name: weights[_name_in_target(name, kept, weights)] for name in draft.state_dict()}
        )
    except Exception as error:
        raise ExportError(
            f"layers of the target's decoder (family {checkpoint.family}) make no draft: "
            f"{reason_of(error)}; export the target with a smaller one of its tokenizer as draft"
        ) from error
    draft.generation_config = target.generation_config
    for parameter in draft.get_encoder().parameters():
        parameter.requires_grad_(False)
    return draft.eval()  # no dropout: it learns from the same rows the same way


def decoder_parameters(model: PreTrainedModel) -> int:
    """Return the number of parameters of a model that an engine of its decoder has."""
    if not model.config.is_encoder_decoder:
        return int(model.num_parameters())
    parts: list[nn.Module] = [model.get_decoder(), model.get_output_embeddings()]
    return sum(p.numel() for p in {p for part in parts for p in part.parameters()})


def decoder_layers(model: PreTrainedModel) -> int:
    """Return the number of layers of a model, of an encoder-decoder those of its decoder."""
    is_reader = model.config.is_encoder_decoder
    return num_decoder_layers(model.config) if is_reader else model.config.num_hidden_layers


def _num_layers(config: DistillConfig) -> int:
    return _DEFAULT_LAYERS if config.target_layers is None else config.target_layers


def _name_in_target(name: str, kept: list[int], weights: dict[str, Tensor]) -> str:
    """Return the name of a draft's weight in the target.

    The biases by distance that T5 has in its first layer alone are the first's in both.
    """
    found = _LAYER.search(name)
    if found is None:
        return name
    begin, end = name[: found.start()], name[found.end() :]
    layer = kept[int(found[2])]
    own = f"{begin}{found[1]}.{layer}.{end}"
    return own if own in weights else f"{begin}{found[1]}.0.{end}"
