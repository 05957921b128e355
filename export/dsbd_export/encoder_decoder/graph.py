"""Graphs of an encoder-decoder: the encoder with the cross rows, the decoder over a forest.

The model itself is captured, by what transformers' own cache of both kinds of rows does: a first
call hands the cross rows to it, and a layer that finds them there reads them. So neither the names
of projections nor the form of the head need be known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from dsbd_export.capture.cache_probe import RecordingCache
from dsbd_export.capture.forest_graph import (
    ForestCache,
    GraphNames,
    LayerCache,
    captured_graph,
    empty_caches,
    input_names,
    output_names,
)
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.model_loading import cache_name
from dsbd_export.draft_vocabulary import spread
from dsbd_export.encoder_decoder.attention import (
    DistanceBiases,
    SourcePlaces,
    forest_positions,
    rows_of_sources,
)
from dsbd_export.progress import Report
from dsbd_runtime.parts.attention_rows import ROW_POSITIONS
from dsbd_runtime.parts.encoder_entry import (
    HIDDEN_STATES,
    INPUT_FEATURES,
    SOURCE_IDS,
    SOURCE_LENGTHS,
    SOURCE_PLACES,
    SOURCE_ROWS,
    EncoderEntry,
)


class FixedCrossRows(Cache):  # type: ignore[misc]  # transformers has no types
    """Cross rows that are there already: every layer reads them, none writes."""

    def __init__(self, rows: Sequence[LayerCache]) -> None:
        """rows: key and value of each layer, (B, H, N, D)."""
        super().__init__(layers=[])
        self.layers = [SimpleNamespace(keys=keys, values=values) for keys, values in rows]

    def __len__(self) -> int:
        return len(self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return a number above 0: the rows are there."""
        return 1


class EncoderGraph(nn.Module):
    """A source to the cross rows of every decoder layer, and its hidden states.

    A source is tokens, or features of sound.
    """

    def __init__(self, model: PreTrainedModel, encoder: EncoderEntry) -> None:
        super().__init__()
        self.model = model
        self._encoder = encoder
        self._biases = DistanceBiases(model.get_encoder())

    def forward(self, source: Tensor) -> list[LayerCache] | tuple[list[LayerCache], Tensor]:
        """Return key and value of each layer, (1, H, N, D), and the hidden states, (1, N, W).

        source: (1, N) int64 tokens, or (1, M, F) features.
        """
        if self._encoder.speech is not None:
            hidden = self.model.get_encoder()(source).last_hidden_state
        else:
            places = torch.arange(source.shape[1])
            with self._biases.between(places, places):
                hidden = self.model.get_encoder()(input_ids=source).last_hidden_state
        rows = cross_rows(self.model, self._encoder, hidden)
        if not self._encoder.returns_hidden:
            return rows
        return rows, hidden


class SharedRowsGraph(nn.Module):
    """The hidden states of the target's encoder to the cross rows of a draft that shares it."""

    def __init__(self, model: PreTrainedModel, encoder: EncoderEntry) -> None:
        super().__init__()
        self.model = model
        self._encoder = encoder

    def forward(self, hidden: Tensor) -> list[LayerCache]:
        """Return key and value of each layer, (1, H, N, D), of hidden states (1, N, W)."""
        return cross_rows(self.model, self._encoder, hidden)


def cross_rows(model: PreTrainedModel, encoder: EncoderEntry, hidden: Tensor) -> list[LayerCache]:
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
    return [rows.rows[each.layer] for each in encoder.cross]


class DecoderGraph(nn.Module):
    """The decoder behind the inputs and outputs of the contract; see ``ForestGraph``."""

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.model = model
        self._places = [(cache.layer, cache.kind) for cache in checkpoint.caches]
        self._biases = DistanceBiases(model.get_decoder())
        tokens = checkpoint.proposed_tokens
        self._tokens = None if tokens is None else torch.from_numpy(tokens)
        self._vocab_size = checkpoint.vocab_size

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor,
        write_indices: Tensor,
        logit_rows: Tensor,
        past: list[LayerCache],
        cross: list[LayerCache],
        source_rows: Tensor,
        source_places: Tensor,
        source_lengths: Tensor,
        row_positions: Tensor | None = None,
    ) -> tuple[Tensor, list[LayerCache]]:
        """Return the logits (R, V) in float32, and the caches with the S new rows."""
        decoder, positions = self.model.get_decoder(), position_ids[0]
        own = ForestCache(dict(zip(self._places, past, strict=True)), write_indices)
        unread = torch.zeros(1, 1, self.model.config.hidden_size, dtype=self.model.dtype)
        with (
            forest_positions(decoder, input_ids[0], positions),
            rows_of_sources(SourcePlaces(source_rows, source_places, source_lengths)),
            contextlib.nullcontext()
            if row_positions is None
            else self._biases.between(positions, row_positions),
            only_rows(self.model, logit_rows),
        ):
            output = self.model(
                encoder_outputs=BaseModelOutput(last_hidden_state=unread),
                decoder_input_ids=input_ids,
                decoder_attention_mask=mask,
                use_cache=True,
                **{cache_name(self.model): EncoderDecoderCache(own, FixedCrossRows(cross))},
            )
        logits = spread(output.logits.squeeze(0).float(), self._tokens, self._vocab_size)
        return logits, own.present()


@contextlib.contextmanager
def only_rows(model: PreTrainedModel, rows: Tensor) -> Iterator[None]:
    """Let the head of a model read some rows alone: encoder-decoders take no ``logits_to_keep``."""
    head: Any = model.get_output_embeddings()
    own = head.forward
    head.forward = lambda hidden: own(hidden[:, rows])
    try:
        yield
    finally:
        del head.forward


def encoder_names(encoder: EncoderEntry) -> GraphNames:
    """Return the inputs and outputs of the encoder's graph."""
    if encoder.is_shared:
        source = HIDDEN_STATES
    else:
        source = SOURCE_IDS if encoder.speech is None else INPUT_FEATURES
    hidden = [HIDDEN_STATES] if encoder.returns_hidden else []
    return GraphNames([source], [*encoder.cross_shapes, *hidden])


def decoder_names(checkpoint: Checkpoint) -> GraphNames:
    """Return the inputs and outputs of the decoder's graph."""
    assert checkpoint.encoder is not None  # the caller has asked
    more = [SOURCE_ROWS, SOURCE_PLACES, SOURCE_LENGTHS]
    more += [ROW_POSITIONS] if checkpoint.encoder.reads_positions else []
    names = [*input_names(checkpoint), *checkpoint.encoder.cross_shapes, *more]
    return GraphNames(names, output_names(checkpoint))


def capture_encoder_graph(
    model: PreTrainedModel, checkpoint: Checkpoint, report: Report
) -> ir.Model:
    """Return the graph of the encoder of a model that was prepared.

    Of a draft that shares the target's encoder it is what makes cross rows of hidden states.
    """
    encoder = checkpoint.encoder
    assert encoder is not None  # the caller has asked
    module: nn.Module = EncoderGraph(model, encoder)
    if encoder.is_shared:
        module = SharedRowsGraph(model, encoder)
    width = model.config.hidden_size
    if (speech := encoder.speech) is not None:
        shape = (speech.num_mels, speech.num_frames)
        example = torch.zeros(1, *((speech.num_positions, width) if encoder.is_shared else shape))
        dynamic_axes = None
    else:
        example = torch.zeros(1, 7, width) if encoder.is_shared else torch.arange(7)[None]
        dynamic_axes = {1: torch.export.Dim("N", min=1, max=encoder.context_length)}
    return captured_graph(
        module,
        checkpoint,
        encoder_names(encoder),
        (example,),
        (dynamic_axes,),
        report,
        "capturing the encoder",
    )


def capture_decoder_graph(
    model: PreTrainedModel, checkpoint: Checkpoint, report: Report
) -> ir.Model:
    """Return the forest graph of the decoder of a model that was prepared."""
    arguments, dynamic_shapes = _example(checkpoint)
    module = DecoderGraph(model, checkpoint)
    names = decoder_names(checkpoint)
    return captured_graph(module, checkpoint, names, arguments, dynamic_shapes, report)


def _example(checkpoint: Checkpoint) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return example arguments of ``DecoderGraph.forward`` and which axes are dynamic."""
    encoder = checkpoint.encoder
    assert encoder is not None  # the caller has asked
    num_nodes, capacity, num_logits, num_tokens, num_sources, num_places = 5, 13, 3, 11, 2, 4
    limits = (("S", 1), ("C", 1), ("R", 0), ("N", 1), ("B", 1), ("P", 1))
    nodes, rows, logits, tokens, sources, places = (
        torch.export.Dim(name, min=low) for name, low in limits
    )
    caches = empty_caches(checkpoint.caches, capacity)
    cross = [
        tuple(part.expand(num_sources, -1, -1, -1).clone() for part in layer)
        for layer in empty_caches(encoder.cross, num_tokens)
    ]
    arguments = (
        torch.zeros(1, num_nodes, dtype=torch.int64),
        torch.arange(num_nodes)[None],
        torch.ones(1, 1, num_nodes, capacity, dtype=torch.bool),
        torch.tensor([3]),
        torch.arange(num_logits),
        caches,
        cross,
        torch.zeros(num_sources, num_places, dtype=torch.int64),
        torch.arange(num_nodes),
        torch.full((num_sources,), num_tokens),
    )
    dynamic_shapes = (
        {1: nodes},
        {1: nodes},
        {2: nodes, 3: rows},
        None,
        {0: logits},
        [tuple({2: rows} for _ in cache) for cache in caches],
        [tuple({0: sources, 2: tokens} for _ in layer) for layer in cross],
        {0: sources, 1: places},
        {0: nodes},
        {0: sources},
    )
    if not encoder.reads_positions:
        return arguments, dynamic_shapes
    return (*arguments, torch.arange(capacity)), (*dynamic_shapes, {0: rows})
