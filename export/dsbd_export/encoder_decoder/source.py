"""Model source of an encoder-decoder: a decoder as for any model, and the graph of its encoder."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from dsbd_export.capture.cache_probe import RecordingCache
from dsbd_export.capture.forest_graph import captured_graph
from dsbd_export.capture.part import Axis, Example, ExportContract, ExportPart
from dsbd_export.capture.source_attention import (
    DistanceBiases,
    forest_positions,
    has_distance_bias,
    take_over_source_attention,
)
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.families import AttentionForm
from dsbd_export.checkpoints.model_loading import cache_name
from dsbd_export.encoder_decoder.reference import probed_sources, source_cases, with_own_source
from dsbd_export.model_source import EngineGraph, ModelSource
from dsbd_export.parity_cases import ForestCase
from dsbd_export.parts.sources import entry_of
from dsbd_export.passes.optimize import optimize_graph
from dsbd_export.progress import Report
from dsbd_runtime.bundle_files.bundle import ENCODER_FILE, ENCODER_WEIGHTS_FILE
from dsbd_runtime.parts.encoder_entry import (
    HIDDEN_STATES,
    INPUT_FEATURES,
    SOURCE_IDS,
    EncoderEntry,
)


class EncoderGraph(nn.Module):
    """A source (tokens, sound, hidden states) to the layers' cross rows and its hidden states."""

    def __init__(self, model: PreTrainedModel, encoder: EncoderEntry) -> None:
        super().__init__()
        self.model = model
        self._encoder = encoder
        self._biases = DistanceBiases(model.get_encoder())

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return each layer's key and value, (1, H, N, D), and the hidden states, (1, N, W).

        tensors: the source, (1, N) int64 tokens, (1, M, F) features or (1, N, W) hidden states.
        """
        [source] = tensors
        if self._encoder.is_shared:
            hidden = source
        elif self._encoder.speech is not None:
            hidden = self.model.get_encoder()(source).last_hidden_state
        else:
            places = torch.arange(source.shape[1])
            with self._biases.between(places, places):
                hidden = self.model.get_encoder()(input_ids=source).last_hidden_state
        rows = cross_rows(self.model, self._encoder, hidden)
        return [*rows, hidden] if self._encoder.returns_hidden else rows


def cross_rows(model: PreTrainedModel, encoder: EncoderEntry, hidden: Tensor) -> list[Tensor]:
    """Return key and value of each layer, (1, H, N, D), of hidden states (1, N, W)."""
    start = torch.full((1, 1), encoder.start_token_id)
    rows = RecordingCache()
    cache = EncoderDecoderCache(RecordingCache(), rows)
    with forest_positions(model.get_decoder(), start[0], torch.zeros(1, dtype=torch.int64)):
        model(
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
            decoder_input_ids=start,
            decoder_attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool),
            use_cache=True,
            **{cache_name(model): cache},
        )
    return [row for each in encoder.cross for row in rows.rows[each.layer]]


def encoder_contract(checkpoint: Checkpoint) -> ExportContract:
    """Return the inputs and outputs of the encoder's graph."""
    encoder, width = entry_of(checkpoint), int(checkpoint.config.hidden_size)
    positions: int | Axis = Axis("N", 7, most=encoder.context_length)
    name, example = SOURCE_IDS, Example((1, positions))
    if (speech := encoder.speech) is not None:
        positions = speech.num_positions
        shape = (1, speech.num_mels, speech.num_frames)
        name, example = INPUT_FEATURES, Example(shape, torch.float32)
    if encoder.is_shared:
        name, example = HIDDEN_STATES, Example((1, positions, width), torch.float32)
    hidden = (HIDDEN_STATES,) if encoder.returns_hidden else ()
    return ExportContract(inputs={name: example}, outputs=(*encoder.cross_shapes, *hidden))


class EncoderDecoderSource(ModelSource):
    """An encoder-decoder of transformers, whose decoder is the engine."""

    def probed(self, model: Any, dtype: str) -> Checkpoint:
        """See ModelSource; with cross rows."""
        self._checkpoint = probed_sources(model, self._checkpoint, dtype)
        return self._checkpoint

    def _cases(self) -> list[ForestCase]:
        return source_cases(self._checkpoint)

    def _calibration_case(self, texts: Sequence[str]) -> ForestCase:
        return with_own_source(super()._calibration_case(texts), self._checkpoint)

    def capture(self, model: Any, parts: Sequence[ExportPart], report: Report) -> list[EngineGraph]:
        """See ModelSource; with the encoder."""
        graphs = super().capture(model, parts, report)
        self._prepare(model)
        module = EncoderGraph(model, entry_of(self._checkpoint))
        contract = encoder_contract(self._checkpoint)
        phase = "capturing the encoder"
        encoder = captured_graph(module, self._checkpoint, contract, report, phase)
        optimize_graph(encoder)
        return [*graphs, EngineGraph(encoder, ENCODER_FILE, ENCODER_WEIGHTS_FILE, "encoder")]

    def _prepare(self, model: Any) -> AttentionForm | None:
        """See ModelSource; None if masks are parts of biases."""
        take_over_source_attention(model)
        return None if has_distance_bias(model) else AttentionForm.NODE
