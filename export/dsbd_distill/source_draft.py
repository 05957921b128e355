"""Drafts for encoder-decoders: one or two layers of the target's decoder over its encoder.

Not trained: the target's encoder, which the export shares, and embeddings and head if the encoder
has them too, or in speech models.
"""

import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from dsbd_distill.acceptance import Best
from dsbd_distill.config import FEATURE, DistillConfig
from dsbd_distill.draft_kind import ProposingDrafts, check_draft_vocab
from dsbd_distill.draft_model import kept_layers
from dsbd_distill.loss import selected
from dsbd_distill.sources import SourceRows
from dsbd_export.checkpoints.checkpoint import Checkpoint, quiet_libraries
from dsbd_export.checkpoints.model_config import num_decoder_layers
from dsbd_export.encoder_decoder.speech import feature_extractor
from dsbd_export.errors import ExportError, reason_of

_LAYER = re.compile(r"(?<=decoder\.)(layers|block)\.(\d+)\.")
_COUNTS = ("num_decoder_layers", "decoder_layers")
_DEFAULT_LAYERS = 1


class SourceDrafts(ProposingDrafts):
    """Decoders of few layers over the target's encoder; see DraftKind."""

    @staticmethod
    def check(config: DistillConfig, target: Checkpoint) -> None:
        family = f"the target (family {target.family}), an encoder-decoder"
        if config.kind == FEATURE:
            raise ExportError(f"kind={FEATURE!r} is not supported for {family}; leave it out")
        if config.params is not None:
            raise ExportError(
                f"params={config.params!r} is not supported for {family}, whose draft is some "
                "layers of its decoder; give target_layers, 1 or 2, instead"
            )
        if config.learn_answers:
            raise ExportError(f"learn_answers has no meaning for {family}; leave it out")
        num_layers, wanted = num_decoder_layers(target.config), _num_layers(config)
        if wanted >= num_layers:
            raise ExportError(
                f"target_layers={wanted} makes no draft: the target's decoder has {num_layers} "
                "layers; use fewer, such as 1"
            )
        check_draft_vocab(config, target)

    def first_draft(self) -> PreTrainedModel:
        teaching = self._teaching
        return cut_decoder(teaching.target, teaching.checkpoint, _num_layers(self._config))

    def _rows(self, tokens: Tensor, counted: Tensor) -> tuple[SourceRows, Tensor, Tensor | None]:
        """Return separated rows of a pool, and the encoder's output for their sources."""
        reader = self._teaching.reader
        assert reader is not None  # as the target reads sources
        rows = SourceRows.of(tokens, counted, reader)
        return rows, *reader.hidden_states(rows.sources, rows.is_source)


class TextSourceDrafts(SourceDrafts):
    """Drafts for targets that read text; each family has a head of its own."""

    bounds_logits = False

    def _read(self, draft: Any, tokens: Tensor, counted: Tensor) -> Tensor:
        """Return the logits, (n, V)."""
        rows, hidden, is_source = self._rows(tokens, counted)
        out = draft(
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
            attention_mask=is_source,
            decoder_input_ids=rows.targets,
            use_cache=False,
        )
        return selected(out.logits, rows.counted)

    def _log_probs(self, draft: Any, read: Tensor, ids: Tensor) -> Tensor:
        return self._head.log_probs_of_logits(read.float(), ids)

    def _best(self, draft: Any, read: Tensor) -> Best:
        return self._head.best_of_logits(read)


class SoundDrafts(SourceDrafts):
    """Drafts for targets that read sound: Whisper's decoders, whose head is the embedding."""

    def _read(self, draft: Any, tokens: Tensor, counted: Tensor) -> Tensor:
        rows, hidden, _ = self._rows(tokens, counted)
        out = draft.get_decoder()(
            input_ids=rows.targets, encoder_hidden_states=hidden, use_cache=False
        )
        return selected(out.last_hidden_state, rows.counted)

    def write(self, draft: Any, folder: Path) -> None:
        """See DraftKind; with the settings of the sound features."""
        super().write(draft, folder)
        checkpoint = self._teaching.checkpoint
        made_by = feature_extractor("target", checkpoint.folder, checkpoint.config)
        with quiet_libraries():
            made_by.save_pretrained(folder)


def cut_decoder(target: PreTrainedModel, checkpoint: Checkpoint, num_kept: int) -> PreTrainedModel:
    """Return the target with some trainable layers of its decoder; or raise ExportError."""
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
    frozen: list[nn.Module] = [draft.get_encoder()]
    if checkpoint.encoder is not None and checkpoint.encoder.speech is not None:
        frozen.append(draft.get_output_embeddings())
    for parameter in {p for module in frozen for p in module.parameters()}:
        parameter.requires_grad_(False)
    return draft.eval()  # without dropout, which would not be reproducible


def decoder_parameters(model: PreTrainedModel) -> int:
    """Return the number of parameters in the engine of a model's decoder."""
    if not model.config.is_encoder_decoder:
        return int(model.num_parameters())
    parts: list[nn.Module] = [model.get_decoder(), model.get_output_embeddings()]
    return sum(p.numel() for p in {p for part in parts for p in part.parameters()})


def decoder_layers(model: PreTrainedModel) -> int:
    """Return the number of layers of a model, or of an encoder-decoder's decoder."""
    is_reader = model.config.is_encoder_decoder
    return num_decoder_layers(model.config) if is_reader else model.config.num_hidden_layers


def _num_layers(config: DistillConfig) -> int:
    return _DEFAULT_LAYERS if config.target_layers is None else config.target_layers


def _name_in_target(name: str, kept: list[int], weights: dict[str, Tensor]) -> str:
    """Return the name of a draft's weight in the target.

    T5 has biases by distance in its first layer alone; the draft's first layer gets these.
    """
    found = _LAYER.search(name)
    if found is None:
        return name
    begin, end = name[: found.start()], name[found.end() :]
    layer = kept[int(found[2])]
    own = f"{begin}{found[1]}.{layer}.{end}"
    return own if own in weights else f"{begin}{found[1]}.0.{end}"
