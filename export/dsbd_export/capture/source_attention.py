"""Attention and positions of an encoder-decoder in a graph.

The decoder's self-attention uses the forest mask; attention in the encoder sees all tokens. The
rows of a call may have several sources, each an item of a batch (``SourcePlaces``). Three parts of
models compute positions by counting the rows of a cache. They use the positions of the forest
instead:

* tables of positions that take positions as an argument (BART, Marian, ...) receive the forest's
  positions, as does a decoder without such a table (BERT);
* M2M100's table: its positions begin after the id of the padding, and padding has no position;
* relative position biases (T5): the model's own code makes a table of biases by distance, and the
  distances between nodes and rows of the cache are looked up in it.
"""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bart.modeling_bart import BartAttention
from transformers.models.trocr.modeling_trocr import TrOCRAttention

from dsbd_export.capture.replacements import attention_node, refuse_unknown
from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_export.checkpoints.model_config import reads_picture
from dsbd_export.config import HIDDEN
from dsbd_export.errors import ExportError

SOURCE_ATTENTION = "forest-and-source"


def take_over_source_attention(model: PreTrainedModel) -> None:
    """Make encoder and decoder attend by ``source_attention``, in place; or raise ExportError."""
    ALL_ATTENTION_FUNCTIONS.register(SOURCE_ATTENTION, source_attention)
    with quiet_libraries():
        model.set_attn_implementation(SOURCE_ATTENTION)
    for module in model.modules():
        if isinstance(module, TrOCRAttention):  # like BART's, but with separate arithmetic
            module.config = model.config.decoder
            module.config._attn_implementation = SOURCE_ATTENTION
            module.forward = BartAttention.forward.__get__(module)
    encoders = (
        [] if reads_picture(model.config) else [model.get_encoder()]
    )  # a picture encoder is left as it is
    for part in (*encoders, model.get_decoder()):
        implementation = part.config._attn_implementation
        if implementation != SOURCE_ATTENTION:
            raise ExportError(
                f"{type(part).__name__} attends by {implementation!r}, which cannot be replaced; "
                "choose another checkpoint"
            )


@dataclass(frozen=True)
class SourcePlaces:
    """The source that each row of a call reads: inputs of the graph, see ``encoder_entry``.

    If rows 0, 2 and 3 read source 0 and row 1 reads source 1, ``rows`` is [[0, 2, 3], [1, 0, 0]]
    (the last two are padding) and ``places`` is [0, 3, 1, 2].
    """

    rows: Tensor  # (B, P) int64. The rows that read each source, padded with any row.
    places: Tensor  # (S,) int64. Index of each row in the flattened ``rows``.
    lengths: Tensor  # (B,) int64. Number of tokens of each source.

    def by_source(self, query: Tensor) -> Tensor:
        """Return the rows of a call, (1, H, S, D), by source: (B, H, P, D)."""
        _, num_heads, num_rows, width = query.shape
        flat = query.transpose(1, 2).reshape(num_rows, num_heads * width)
        gathered = F.embedding(self.rows, flat)  # (B, P, H * D)
        return torch.unflatten(gathered, 2, (num_heads, width)).transpose(1, 2)

    def by_row(self, attended: Tensor) -> Tensor:
        """Return rows by source, (B, H, P, D), in the order of the call: (1, S, H, D)."""
        _, num_heads, _, width = attended.shape
        flat = attended.transpose(1, 2).reshape(-1, num_heads * width)
        gathered = F.embedding(self.places, flat)  # (S, H * D)
        return torch.unflatten(gathered, 1, (num_heads, width))[None]


@contextlib.contextmanager
def rows_of_sources(places: SourcePlaces) -> Iterator[None]:
    """Make each row of a decoder's call read its source, inside the block."""
    read = partial(source_attention, places=places)
    ALL_ATTENTION_FUNCTIONS.register(SOURCE_ATTENTION, read)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS.register(SOURCE_ATTENTION, source_attention)


def source_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    places: SourcePlaces | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attend; the interface is that of transformers' attention functions.

    query: (1, H, S, D). key, value: (1, H, rows, D), for sources (B, H, rows, D). attention_mask:
    (1, 1, S, C) bool, None for sources. position_bias: (1, H, S, rows). Returns (1, S, H, D).
    """
    refuse_unknown(module, others)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if attention_mask is None and getattr(module, "is_decoder", False):
        position_bias = None  # T5 passes zeros to the attention over a source
    if places is not None and attention_mask is None:
        by_source = places.by_source(query)
        attended = attention_node(by_source, key, value, None, scale, places.lengths)
        return places.by_row(attended), None
    mask = attention_mask
    if position_bias is not None:
        hidden = torch.full((), HIDDEN, dtype=query.dtype)
        mask = position_bias if mask is None else torch.where(mask, position_bias, hidden)
    return attention_node(query, key, value, mask, scale).transpose(1, 2), None


class DistanceBiases:
    """Relative position biases of an encoder's or a decoder's layers, looked up in tables."""

    def __init__(self, stack: nn.Module) -> None:
        self._modules: list[Any] = [module for module in stack.modules() if _has_bias(module)]
        self._max_distances = [
            int(module.relative_attention_max_distance) for module in self._modules
        ]
        with torch.no_grad():
            self._tables = [
                module.compute_bias(1, 2 * limit + 1, past_seen_tokens=limit)[0, :, 0]
                .t()
                .contiguous()
                for module, limit in zip(self._modules, self._max_distances, strict=True)
            ]  # (2 * limit + 1, H) each

    @contextlib.contextmanager
    def between(self, nodes: Tensor, rows: Tensor) -> Iterator[None]:
        """Make the layers add biases for nodes at positions (S,) and rows at positions (C,)."""
        distances = rows[None, :] - nodes[:, None]  # (S, C)
        tables = zip(self._modules, self._tables, self._max_distances, strict=True)
        for module, table, limit in tables:
            biases = F.embedding(distances.clamp(-limit, limit) + limit, table)
            bias = biases.permute(2, 0, 1)[None]  # (1, H, S, C)
            module.compute_bias = lambda *_, bias=bias, **__: bias
        try:
            yield
        finally:
            for module in self._modules:
                del module.compute_bias


def has_distance_bias(model: PreTrainedModel) -> bool:
    """Return whether the decoder's self-attention adds a relative position bias."""
    return any(_has_bias(module) for module in model.get_decoder().modules())


def _has_bias(module: Any) -> bool:
    return bool(getattr(module, "has_relative_attention_bias", False)) and hasattr(
        module, "compute_bias"
    )


@contextlib.contextmanager
def forest_positions(
    model: PreTrainedModel, token_ids: Tensor, positions: Tensor
) -> Iterator[dict[str, Tensor]]:
    """Make a decoder use the positions of the nodes; token_ids, positions: (S,) int64 each.

    Its table of positions, if it has one, is replaced inside the block. Yields arguments for the
    model's call, which set the positions of a decoder without a table.
    """
    decoder: Any = model.get_decoder()
    table: Any = getattr(_stack_of(decoder), "embed_positions", None)
    if table is None:
        takes = "position_ids" in inspect.signature(decoder.forward).parameters
        yield {"decoder_position_ids": positions[None]} if takes else {}
        return
    original = table.forward
    if "position_ids" in inspect.signature(original).parameters:
        table.forward = lambda *arguments, **more: original(
            *arguments, **{**more, "position_ids": positions}
        )
    elif hasattr(table, "padding_idx") and isinstance(getattr(table, "weights", None), Tensor):
        padding = table.padding_idx
        rows = torch.where(token_ids == padding, padding, positions + (padding + 1))
        table.forward = lambda *_, **__: F.embedding(rows[None], table.weights)
    else:
        raise ExportError(
            f"{type(table).__name__} counts the rows of the cache in a way that is not supported; "
            "choose another checkpoint"
        )
    try:
        yield {}
    finally:
        del table.forward


def _stack_of(decoder: Any) -> Any:
    """Return the layers of a decoder; ``decoder`` may be a model with a head."""
    return getattr(getattr(decoder, "model", None), "decoder", decoder)
