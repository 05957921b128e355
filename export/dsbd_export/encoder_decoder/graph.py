"""Graph of an encoder: a source to the cross rows that the decoder's layers read.

The model itself is captured, by what transformers' own cache of both kinds of rows does: a first
call hands the cross rows to it, and a layer that finds them there reads them. So neither the names
of projections nor the form of the head need be known.
"""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from dsbd_export.capture.cache_probe import RecordingCache
from dsbd_export.capture.forest_graph import captured_graph
from dsbd_export.capture.part import Axis, Example, ExportContract
from dsbd_export.capture.source_attention import DistanceBiases, forest_positions
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.model_loading import cache_name
from dsbd_export.parts.sources import entry_of
from dsbd_export.progress import Report
from dsbd_runtime.parts.encoder_entry import (
    HIDDEN_STATES,
    INPUT_FEATURES,
    SOURCE_IDS,
    EncoderEntry,
)

_NUM_TOKENS = 7  # of the example


class EncoderGraph(nn.Module):
    """A source to the cross rows of every decoder layer, and its hidden states.

    A source is tokens, or features of sound.
    """

    def __init__(self, model: PreTrainedModel, encoder: EncoderEntry) -> None:
        super().__init__()
        self.model = model
        self._encoder = encoder
        self._biases = DistanceBiases(model.get_encoder())

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return key and value of each layer, (1, H, N, D), and the hidden states, (1, N, W).

        tensors: the source, (1, N) int64 tokens or (1, M, F) features.
        """
        [source] = tensors
        if self._encoder.speech is not None:
            hidden = self.model.get_encoder()(source).last_hidden_state
        else:
            places = torch.arange(source.shape[1])
            with self._biases.between(places, places):
                hidden = self.model.get_encoder()(input_ids=source).last_hidden_state
        rows = cross_rows(self.model, self._encoder, hidden)
        return [*rows, hidden] if self._encoder.returns_hidden else rows


class SharedRowsGraph(nn.Module):
    """The hidden states of the target's encoder to the cross rows of a draft that shares it."""

    def __init__(self, model: PreTrainedModel, encoder: EncoderEntry) -> None:
        super().__init__()
        self.model = model
        self._encoder = encoder

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return key and value of each layer, (1, H, N, D), of hidden states (1, N, W)."""
        [hidden] = tensors
        return cross_rows(self.model, self._encoder, hidden)


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
    axes = {1: Axis("N", _NUM_TOKENS, most=encoder.context_length)}
    num_positions = _NUM_TOKENS
    if (speech := encoder.speech) is not None:
        axes, num_positions = {}, speech.num_positions
    if encoder.is_shared:
        name, example = HIDDEN_STATES, torch.zeros(1, num_positions, width)
    elif speech is not None:
        name, example = INPUT_FEATURES, torch.zeros(1, speech.num_mels, speech.num_frames)
    else:
        name, example = SOURCE_IDS, torch.arange(num_positions)[None]
    hidden = (HIDDEN_STATES,) if encoder.returns_hidden else ()
    return ExportContract(
        inputs={name: Example(example, axes)}, outputs=(*encoder.cross_shapes, *hidden)
    )


def capture_encoder_graph(
    model: PreTrainedModel, checkpoint: Checkpoint, report: Report
) -> ir.Model:
    """Return the graph of the encoder of a model that was prepared.

    Of a draft that shares the target's encoder it is what makes cross rows of hidden states.
    """
    encoder = entry_of(checkpoint)
    module = (SharedRowsGraph if encoder.is_shared else EncoderGraph)(model, encoder)
    contract = encoder_contract(checkpoint)
    return captured_graph(module, checkpoint, contract, report, "capturing the encoder")
