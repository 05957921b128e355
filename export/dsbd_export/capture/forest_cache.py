"""The external cache of a graph: every update is a TensorScatter from graph input to output."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from dsbd_export.config import OPSET
from dsbd_export.errors import ExportError
from dsbd_runtime.parts.cache_entries import ATTENTION_ROWS, CONVOLUTION_ROWS

LayerCache = tuple[Tensor, ...]  # the parts of one layer's cache, (1, heads, rows, width) each


class ForestCache(Cache):  # type: ignore[misc]  # transformers has no types
    """The cache that a model is handed: ``present`` is ``past`` with the new rows scattered in."""

    def __init__(
        self, past: Mapping[tuple[int, str], LayerCache], write_indices: Mapping[str, Tensor]
    ) -> None:
        """Take the caches by layer and kind, and by kind the first of the new rows, (1,) int64."""
        super().__init__(layers=[])
        # By kind of rows: functions that get a layer's rows, and what was appended to them.
        self.readers: dict[str, Callable[[Tensor, Tensor], None]] = {}
        self.recurrent_layer = 0
        self._past, self._write_indices = past, write_indices
        self._present: dict[tuple[int, str], LayerCache] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> LayerCache:
        """Return (1, Hkv, C, D) each: the old rows of a layer and the new ones, (1, Hkv, S, D)."""
        return self._appended(layer_idx, ATTENTION_ROWS, (key_states, value_states))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None: what a convolution has read before are rows of the cache."""

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> Tensor:
        """Keep the inputs of a layer's convolution, and give it the rows of all paths.

        conv_states: (1, W, S). Returned in the precision of the cache; see ``PathConvolutions``.
        """
        (past,) = self.unwritten(layer_idx, CONVOLUTION_ROWS)
        conv_states = conv_states.to(past.dtype)
        new = conv_states.transpose(1, 2)[:, None]
        (rows,) = self._appended(layer_idx, CONVOLUTION_ROWS, (new,))
        self.readers[CONVOLUTION_ROWS](rows, conv_states)
        return conv_states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None: a recurrence is over rows of the cache; the next one is this layer's."""
        self.recurrent_layer = layer_idx

    def update_recurrent_state(self, *_: object, **__: object) -> None:
        """Keep no state: what replaces the recurrence has kept rows."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions come in from outside, nothing may be counted here."""
        return 0

    def present(self) -> list[LayerCache]:
        if silent := [layer for layer, kind in self._past if (layer, kind) not in self._present]:
            raise ExportError(f"layers {silent} write no cache, though they have before")
        return [self._present[place] for place in self._past]

    def keep(self, layer: int, kind: str, present: LayerCache) -> None:
        self._present[layer, kind] = present

    def unwritten(self, layer: int, kind: str) -> LayerCache:
        """Return what a layer has kept before this call, of one kind."""
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
