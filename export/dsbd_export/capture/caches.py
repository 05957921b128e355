"""Caches that are passed to a model: one records its layers' rows, the other is part of a graph.

In a graph every update is a TensorScatter from graph input to output. The recording cache stores
the kinds of rows, heads, widths and values of the model's layers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from dsbd_export.capture.path_recurrences import MOST_NEW_ROWS, Recurrence, replaced_recurrences
from dsbd_export.checkpoints.checkpoint import Checkpoint, quiet_libraries
from dsbd_export.checkpoints.model_loading import cache_name
from dsbd_export.config import OPSET
from dsbd_export.errors import ExportError, own_error_in, reason_of
from dsbd_export.parity_cases import ComputeIn, ForestCase, num_drawn, text_case
from dsbd_runtime.parts.attention.cache_entries import (
    ATTENTION_ROWS,
    CONVOLUTION_ROWS,
    AttentionRows,
    CacheEntry,
    ConvolutionRows,
    RecurrentRows,
)

LayerCache = tuple[Tensor, ...]  # the parts of one layer's cache, (1, heads, rows, width) each


class ForestCache(Cache):  # type: ignore[misc]  # transformers has no types
    """Cache of a captured model: ``present`` is ``past`` with the new rows scattered into it."""

    def __init__(
        self, past: Mapping[tuple[int, str], LayerCache], write_indices: Mapping[str, Tensor]
    ) -> None:
        """Take the caches by layer and kind, and for each kind the first new row, (1,) int64."""
        super().__init__(layers=[])
        # By kind of rows: functions that receive a layer's rows, and the values appended to them.
        self.readers: dict[str, Callable[[Tensor, Tensor], None]] = {}
        self.recurrent_layer = 0
        self._past, self._write_indices = past, write_indices
        self._present: dict[tuple[int, str], LayerCache] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> LayerCache:
        """Return all rows of a layer, (1, Hkv, C, D) each, with the new rows, (1, Hkv, S, D)."""
        return self._appended(layer_idx, ATTENTION_ROWS, (key_states, value_states))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None: earlier inputs of a convolution are rows of the cache."""

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> Tensor:
        """Append the inputs of a layer's convolution, and pass the rows of all paths to its reader.

        conv_states: (1, W, S). They are returned in the cache's precision; see
        ``PathConvolutions``.
        """
        (past,) = self.unwritten(layer_idx, CONVOLUTION_ROWS)
        conv_states = conv_states.to(past.dtype)
        new = conv_states.transpose(1, 2)[:, None]
        (rows,) = self._appended(layer_idx, CONVOLUTION_ROWS, (new,))
        self.readers[CONVOLUTION_ROWS](rows, conv_states)
        return conv_states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None: the state is in rows of the cache. The next recurrence is this layer's."""
        self.recurrent_layer = layer_idx

    def update_recurrent_state(self, *_: object, **__: object) -> None:
        """Keep no state: the replaced recurrence has already kept rows."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are inputs, so the cache must not count rows."""
        return 0

    def present(self) -> list[LayerCache]:
        if silent := [layer for layer, kind in self._past if (layer, kind) not in self._present]:
            raise ExportError(f"layers {silent} write no cache, though they have before")
        return [self._present[place] for place in self._past]

    def keep(self, layer: int, kind: str, present: LayerCache) -> None:
        self._present[layer, kind] = present

    def unwritten(self, layer: int, kind: str) -> LayerCache:
        """Return a layer's rows before this call, of one kind; ExportError if already written."""
        if (layer, kind) in self._present:
            raise ExportError(f"layer {layer} writes its cache twice; the family is not known")
        if (layer, kind) not in self._past:
            raise ExportError(f"layer {layer} writes a cache that it did not have before")
        return self._past[layer, kind]

    def scattered(self, layer: int, kind: str, past: Tensor, new: Tensor) -> Any:
        """Return rows of a layer, (1, heads, C, width), with new ones, (1, heads, S, width)."""
        if (past.shape[1], past.shape[3]) != (new.shape[1], new.shape[3]):
            raise ExportError(
                f"layer {layer} caches {new.shape[1]} heads of {new.shape[3]}, expected "
                f"{past.shape[1]} of {past.shape[3]} as before"
            )
        return torch.onnx.ops.symbolic(
            "TensorScatter",
            [past, new, self._write_indices[kind]],
            {"axis": 2, "mode": "linear"},
            dtype=past.dtype,
            shape=past.shape,
            version=OPSET,
        )

    def _appended(self, layer: int, kind: str, new: Sequence[Tensor]) -> LayerCache:
        pairs = zip(self.unwritten(layer, kind), new, strict=True)
        present = tuple(self.scattered(layer, kind, *pair) for pair in pairs)
        self.keep(layer, kind, present)
        return present


_NUM_ROWS = 2


class RecordingCache(DynamicCache):  # type: ignore[misc]  # transformers has no types
    """A cache for one call that stores what each layer passes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values
        self.convolutions: dict[int, tuple[torch.Size, int]] = {}  # shapes, and kernel sizes
        self.recurrences: dict[int, Recurrence] = {}
        self._recurrent_layer = 0

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **more: object,
    ) -> tuple[Tensor, Tensor]:
        self.rows[layer_idx] = key_states, value_states
        present: tuple[Tensor, Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **more
        )
        return present

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None: there are no earlier inputs."""

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, *, conv_kernel_size: int, **_: object
    ) -> Tensor:
        self.convolutions[layer_idx] = conv_states.shape, conv_kernel_size
        return conv_states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self._recurrent_layer = layer_idx

    def update_recurrent_state(
        self, recurrent_states: object, layer_idx: int, *_: object, **__: object
    ) -> None:
        """Keep nothing; raise ExportError for a recurrence whose state cannot be stored as rows."""
        if layer_idx not in self.recurrences:
            raise ExportError(
                f"layer {layer_idx} keeps a recurrent state of another kind than the gated delta "
                "rule and Mamba2, which a forest has no rows for; choose another checkpoint"
            )

    def record(self, recurrence: Recurrence) -> Tensor:
        """Record the shapes of a recurrence, and return zeros as its outputs."""
        self.recurrences[self._recurrent_layer] = recurrence
        return torch.zeros_like(recurrence.value)


def probed_caches(
    model: PreTrainedModel, checkpoint: Checkpoint, dtype: str
) -> tuple[CacheEntry, ...]:
    """Return the caches of a model's engine in ``dtype``, found by a run over two tokens.

    Raises ExportError for layers that cache anything except rows of attention, convolutions and
    known recurrences.
    """
    cache = RecordingCache()
    with (
        torch.no_grad(),
        quiet_libraries(),
        ComputeIn(torch.float32),
        replaced_recurrences(model, cache.record),
    ):
        token_ids = torch.zeros(1, _NUM_ROWS, dtype=torch.int64)
        try:
            model(input_ids=token_ids, **{cache_name(model): cache})
        except Exception as error:  # a family may do anything with an unexpected cache class
            raise own_error_in(error) or ExportError(
                f"the {checkpoint.role} (family {checkpoint.family}) keeps more than rows of keys "
                f"and values, convolutions and known recurrences ({reason_of(error)}); choose "
                "another checkpoint"
            ) from error
    if not cache.rows and not cache.recurrences:
        raise ExportError(
            f"the {checkpoint.role} (family {checkpoint.family}) hands no keys and values to a "
            "cache, so no row of it can be kept; choose another checkpoint"
        )
    entries: list[CacheEntry] = [*attention_rows(cache, checkpoint, dtype, _NUM_ROWS)]
    entries += [
        ConvolutionRows(layer=layer, width=shape[1], num_ancestors=kernel_size - 1, dtype=dtype)
        for layer, (shape, kernel_size) in cache.convolutions.items()
    ]
    entries += _recurrent_rows(cache)
    return tuple(sorted(entries, key=lambda entry: entry.layer))


def largest_values(
    model: PreTrainedModel, checkpoint: Checkpoint, more: Sequence[ForestCase] = ()
) -> dict[int, NDArray[np.float32]]:
    """Return the largest magnitudes of values, (Hkv, D) by layer.

    They are computed for a text, for random tokens, and for the cases ``more``.
    """
    text = text_case(checkpoint)
    size = len(text.node_ids)
    noise = np.random.default_rng(0).integers(0, num_drawn(checkpoint), size, dtype=np.int64)
    seen: dict[int, NDArray[np.float32]] = {}
    for case in (text, replace(text, node_ids=noise), *more):
        cache = RecordingCache()
        ids = torch.from_numpy(np.concatenate([case.prefix_ids, case.node_ids])[None])
        inputs = {"input_ids": ids, **case.arguments_of(ids), cache_name(model): cache}
        with torch.no_grad(), ComputeIn(torch.float32):
            model(**inputs, use_cache=True)
        for layer, (_, values) in cache.rows.items():
            largest = values.abs().amax((0, 2)).numpy()
            seen[layer] = np.maximum(seen.get(layer, largest), largest)
    return seen


def attention_rows(
    cache: RecordingCache, checkpoint: Checkpoint, dtype: str, num_rows: int
) -> Iterator[AttentionRows]:
    """Yield the entries of layers; ExportError unless each cached ``num_rows`` keys and values."""
    for layer, rows in cache.rows.items():
        key, value = (part.shape for part in rows)
        if len(key) != 4 or key[:3] != value[:3] or key[2] != num_rows:
            raise ExportError(
                f"layer {layer} of the {checkpoint.role} (family {checkpoint.family}) caches "
                f"{list(key)} and {list(value)} of {num_rows} tokens, expected a key and a value "
                "of each token for each head; choose another checkpoint"
            )
        yield AttentionRows(
            layer=layer, num_heads=key[1], key_width=key[3], value_width=value[3], dtype=dtype
        )


def _recurrent_rows(cache: RecordingCache) -> Iterator[RecurrentRows]:
    """Yield the entries of recurrent layers, which compute in fp32 whatever the engine's type."""
    for layer, recurrence in cache.recurrences.items():
        yield RecurrentRows(
            layer=layer,
            num_heads=recurrence.value.shape[0],
            value_width=recurrence.value.shape[2],
            num_key_heads=recurrence.key.shape[0],
            key_width=recurrence.key.shape[2],
            most_new_rows=MOST_NEW_ROWS,
            dtype="fp32",
        )
