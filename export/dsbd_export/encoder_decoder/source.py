"""Model source of an encoder-decoder: the decoder as for any model, and the encoder's graph.

A draft with the same encoder as the target shares the target's encoder.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.trocr.modeling_trocr import TrOCRSinusoidalPositionalEmbedding

from dsbd_export.capture.caches import RecordingCache, attention_rows
from dsbd_export.capture.forest_graph import (
    Axis,
    Example,
    ExportContract,
    ExportPart,
)
from dsbd_export.capture.source_attention import (
    DistanceBiases,
    forest_positions,
    has_distance_bias,
    take_over_source_attention,
)
from dsbd_export.checkpoints.checkpoint import Checkpoint, quiet_libraries
from dsbd_export.checkpoints.families import AttentionForm
from dsbd_export.checkpoints.model_config import reads_picture
from dsbd_export.checkpoints.model_loading import cache_name, hash_weights
from dsbd_export.errors import ExportError
from dsbd_export.model_source import EngineGraph, ModelSource
from dsbd_export.parity_cases import TREE, ComputeIn, ForestCase, forest_cases, num_drawn, text_case
from dsbd_export.parts.sources import entry_of, fixed_sources
from dsbd_export.progress import Report
from dsbd_runtime.parts.source.encoder_entry import HIDDEN_STATES, SOURCE_IDS, EncoderEntry
from dsbd_runtime.parts.source.source_values import SourceValues

_OF_OTHERS = re.compile(
    r"_name_or_path|architectures|transformers_version|(torch_)?dtype|.*init.*|.*drop.*"
    r"|(decoder|forced)_.*|num_decoder_layers|num_hidden_layers|scale_decoder_outputs"
    r"|.*vocab_size|.*_token_id|tie_word_embeddings|share_encoder_decoder_embeddings"
    r"|is_decoder|is_encoder_decoder|use_cache|return_dict|output_.*|chunk_size_feed_forward"
    r"|id2label|label2id|num_labels|problem_type|task_specific_params|max_length|num_beams"
)
"""Fields of a config that do not affect an encoder's hidden states: fields about the decoder,
training, outputs or requests. Unknown fields are compared."""


def with_hidden_states(
    model: PreTrainedModel, checkpoint: Checkpoint, encoder: EncoderEntry
) -> EncoderEntry:
    """Return the entry of an encoder that returns hidden states, or shares the target's."""
    own_fingerprint = fingerprint(model)
    width = int(model.get_encoder().config.hidden_size)
    if checkpoint.role == "target":
        return replace(encoder, hidden_width=width, fingerprint=own_fingerprint)
    target = checkpoint.target_encoder
    if target is None or target.fingerprint != own_fingerprint:
        return encoder
    return replace(
        encoder,
        hidden_width=width,
        is_shared=True,
        vocab_size=target.vocab_size,
        context_length=target.context_length,
    )


def fingerprint(model: PreTrainedModel) -> str:
    """Return the sha256 (hex) of an encoder's config and weights (hashed in fp32)."""
    encoder = model.get_encoder()
    digest = hashlib.sha256()
    config = encoder.config if reads_picture(model.config) else model.config
    content = {
        name: value for name, value in config.to_dict().items() if not _OF_OTHERS.fullmatch(name)
    }
    digest.update(json.dumps(content, sort_keys=True, default=repr).encode())
    hash_weights(encoder.state_dict(), digest)
    return digest.hexdigest()


_SOURCE_LENGTHS = (1, 9, 40, 150)  # the last one exceeds the distances that biases distinguish
_NUM_TOKENS = 3  # tokens of the probed source; the target has two, so that they differ


def probed_sources(model: PreTrainedModel, checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    """Return the checkpoint with its caches and cross rows; ExportError for other caches."""
    encoder = entry_of(checkpoint)
    own_cache, cross_cache = RecordingCache(), RecordingCache()
    source = {"input_ids": torch.arange(_NUM_TOKENS)[None]}
    if (fixed := encoder.fixed) is not None:
        source = {fixed.input_name: torch.zeros(1, *fixed.shape)}
    with torch.no_grad(), quiet_libraries(), ComputeIn(torch.float32):
        output = model(
            **source,
            decoder_input_ids=torch.zeros(1, 2, dtype=torch.int64),
            use_cache=True,
            **{cache_name(model): EncoderDecoderCache(own_cache, cross_cache)},
        )
    num_rows = output.encoder_last_hidden_state.shape[1]
    if not own_cache.rows or not cross_cache.rows:
        raise ExportError(
            f"the {checkpoint.role} (family {checkpoint.family}) stores no keys and values in a "
            "cache, for its tokens or its source; choose another checkpoint"
        )
    cross_entries = attention_rows(cross_cache, checkpoint, dtype, num_rows)
    by_layer = sorted(cross_entries, key=lambda rows: rows.layer)
    if (picture := encoder.picture) is not None:
        picture = replace(picture, num_positions=num_rows)
        encoder = replace(encoder, picture=picture, context_length=num_rows)
    probed = replace(encoder, cross=by_layer, reads_positions=has_distance_bias(model))
    probed = with_hidden_states(model, checkpoint, probed)
    caches = sorted(attention_rows(own_cache, checkpoint, dtype, 2), key=lambda rows: rows.layer)
    return replace(checkpoint, caches=tuple(caches), encoder=probed)


def source_cases(checkpoint: Checkpoint) -> list[ForestCase]:
    """Return forests whose sources have several lengths, alone and together, and the text."""
    if entry_of(checkpoint).fixed is not None:
        forests = [*forest_cases(checkpoint), text_case(checkpoint)]
        sources = fixed_sources(entry_of(checkpoint))
        return [
            _with_source(case, sources[index * len(sources) // len(forests)], checkpoint)
            for index, case in enumerate(forests)
        ]
    rng = np.random.default_rng(1)
    num_tokens = min(entry_of(checkpoint).vocab_size, num_drawn(checkpoint))
    cases = []
    for index, case in enumerate(forest_cases(checkpoint)):
        length = _SOURCE_LENGTHS[index % len(_SOURCE_LENGTHS)]
        source = rng.integers(0, num_tokens, length, dtype=np.int64)
        cases.append(_with_source(case, source, checkpoint))
    first, *others = (case for case in cases if case.name == TREE)
    together = dataclasses.replace(first, name="sources", together=tuple(others))
    text = text_case(checkpoint)
    return [*cases, together, with_own_source(text, checkpoint)]


def with_own_source(case: ForestCase, checkpoint: Checkpoint) -> ForestCase:
    """Return a case whose source is the case's own text, or a sound or picture."""
    if entry_of(checkpoint).fixed is not None:
        return _with_source(case, fixed_sources(entry_of(checkpoint))[1], checkpoint)
    return _with_source(case, case.node_ids, checkpoint)


def _with_source(
    case: ForestCase, source: NDArray[np.int64] | SourceValues, checkpoint: Checkpoint
) -> ForestCase:
    """Return a case with a source; padding tokens are replaced, as requests have none."""
    padding = checkpoint.config.pad_token_id
    other = 0 if padding != 0 else 1

    def without(ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.where(ids == padding, other, ids)

    prefix, nodes = without(case.prefix_ids), without(case.node_ids)
    case = dataclasses.replace(case, prefix_ids=prefix, node_ids=nodes)
    if isinstance(source, SourceValues):
        return dataclasses.replace(case, values=source)
    source_ids = without(source[: entry_of(checkpoint).context_length])
    return dataclasses.replace(case, source_ids=source_ids)


class EncoderGraph(nn.Module):
    """Maps a source (tokens, sound, hidden states) to all layers' cross rows, and hidden states."""

    def __init__(self, model: PreTrainedModel, encoder: EncoderEntry) -> None:
        super().__init__()
        self.model = model
        self._encoder = encoder
        self._biases = DistanceBiases(model.get_encoder())

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return each layer's key and value, (1, H, N, D), and the hidden states, (1, N, W).

        tensors: the source, (1, N) int64 tokens, (1, M, F) features, (1, 3, H, W) pixels or
            (1, N, W) hidden states.
        """
        [source] = tensors
        if self._encoder.is_shared:
            hidden = source
        elif self._encoder.fixed is not None:
            hidden = self.model.get_encoder()(source).last_hidden_state
        else:
            places = torch.arange(source.shape[1])
            with self._biases.between(places, places):
                hidden = self.model.get_encoder()(input_ids=source).last_hidden_state
        rows = cross_rows(self.model, self._encoder, hidden)
        return [*rows, hidden] if self._encoder.returns_hidden else rows


def cross_rows(model: PreTrainedModel, encoder: EncoderEntry, hidden: Tensor) -> list[Tensor]:
    """Return key and value of each layer, (1, H, N, D), for hidden states (1, N, W)."""
    start = torch.full((1, 1), encoder.start_token_id)
    rows = RecordingCache()
    cache = EncoderDecoderCache(RecordingCache(), rows)
    with forest_positions(model, start[0], torch.zeros(1, dtype=torch.int64)) as positions:
        model(
            **positions,
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
            decoder_input_ids=start,
            decoder_attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool),
            use_cache=True,
            **{cache_name(model): cache},
        )
    return [row for each in encoder.cross for row in rows.rows[each.layer]]


def encoder_contract(checkpoint: Checkpoint) -> ExportContract:
    """Return the inputs and outputs of the encoder's graph."""
    encoder = entry_of(checkpoint)
    positions: int | Axis = Axis("N", 7, max_size=encoder.context_length)
    name, example = SOURCE_IDS, Example((1, positions))
    if (fixed := encoder.fixed) is not None:
        positions = fixed.num_positions
        name, example = fixed.input_name, Example((1, *fixed.shape), torch.float32)
    if encoder.is_shared:
        assert encoder.hidden_width is not None  # the target's
        shape = (1, positions, encoder.hidden_width)
        name, example = HIDDEN_STATES, Example(shape, torch.float32)
    hidden = (HIDDEN_STATES,) if encoder.returns_hidden else ()
    return ExportContract(inputs={name: example}, outputs=(*encoder.cross_shapes, *hidden))


class EncoderDecoderSource(ModelSource):
    """An encoder-decoder of transformers, whose decoder is the engine."""

    def load(self, dtype: str, report: Report) -> Any:
        """See ModelSource; also computes tables of sinusoids that transformers leaves empty."""
        model = super().load(dtype, report)
        for module in model.modules():
            if isinstance(module, TrOCRSinusoidalPositionalEmbedding) and module.weights.is_meta:
                module.weights = module.get_embedding(*module.weights.shape, module.padding_idx)
        return model

    def probed(self, model: Any, dtype: str) -> Checkpoint:
        self._checkpoint = probed_sources(model, self._checkpoint, dtype)
        return self._checkpoint

    def _cases(self) -> list[ForestCase]:
        return source_cases(self._checkpoint)

    def _calibration_case(self, texts: Sequence[str]) -> ForestCase:
        return with_own_source(super()._calibration_case(texts), self._checkpoint)

    def capture(self, model: Any, parts: Sequence[ExportPart], report: Report) -> list[EngineGraph]:
        graphs = super().capture(model, parts, report)
        self._prepare(model)
        module = EncoderGraph(model, entry_of(self._checkpoint))
        contract = encoder_contract(self._checkpoint)
        return [*graphs, self.capture_encoder(module, contract, report)]

    def _prepare(self, model: Any) -> AttentionForm | None:
        """See ModelSource; None if masks are parts of biases."""
        take_over_source_attention(model)
        return None if has_distance_bias(model) else AttentionForm.NODE
