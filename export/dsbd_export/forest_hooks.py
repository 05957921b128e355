"""The cache of the forest graph: every update becomes TensorScatter nodes.

They go from a graph input straight to a graph output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from dsbd_export.errors import ExportError

OPSET = 24

CachePair = tuple[Tensor, Tensor]  # key and value of one layer, (1, Hkv, C, D) each


class ForestCache(Cache):  # type: ignore[misc]  # transformers has no types
    """The external cache of the graph: ``present`` is ``past`` with the new rows scattered in."""

    def __init__(self, past: Sequence[CachePair], write_indices: Tensor) -> None:
        super().__init__(layers=[])
        self._past = past
        self._write_indices = write_indices
        self._present: dict[int, CachePair] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> CachePair:
        """Return keys and values of one layer, (1, Hkv, C, D): the old rows and the S new ones.

        key_states, value_states: (1, Hkv, S, D).
        """
        if layer_idx in self._present:
            raise ExportError(f"layer {layer_idx} writes its cache twice; the family is not known")
        past_key, past_value = self._past[layer_idx]
        self._present[layer_idx] = (
            self._scatter(layer_idx, past_key, key_states),
            self._scatter(layer_idx, past_value, value_states),
        )
        return self._present[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions come in from outside, nothing may be counted here."""
        return 0

    def present(self) -> list[CachePair]:
        """Return the updated caches, layer by layer."""
        silent = [layer for layer in range(len(self._past)) if layer not in self._present]
        if silent:
            raise ExportError(
                f"layers {silent} write no cache; layers that share one are not known"
            )
        return [self._present[layer] for layer in range(len(self._past))]

    def _scatter(self, layer: int, past: Tensor, new: Tensor) -> Tensor:
        if (past.shape[1], past.shape[3]) != (new.shape[1], new.shape[3]):
            raise ExportError(
                f"layer {layer} caches {new.shape[1]} heads of {new.shape[3]}, expected "
                f"{past.shape[1]} of {past.shape[3]}; add the family to families.py"
            )
        return torch.onnx.ops.symbolic(
            "TensorScatter",
            [past, new, self._write_indices],
            {"axis": 2, "mode": "linear"},
            dtype=past.dtype,
            shape=past.shape,
            version=OPSET,
        )
