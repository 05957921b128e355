"""The two hooks through which a Hugging Face decoder becomes a forest graph.

The attention hook turns every attention call into one Attention node that sees the given mask
and nothing else. The cache hook turns every cache update into TensorScatter nodes that go from a
graph input straight to a graph output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
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


def forest_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend with one Attention node; the interface is that of transformers' attention functions.

    query: (1, H, S, D). key, value: (1, Hkv, C, D). attention_mask: (1, 1, S, C) bool.
    Returns (1, S, H, D).
    """
    if attention_mask is None:
        raise ExportError(f"{type(module).__name__} attends without a mask; it cannot be exported")
    if s_aux is not None:
        raise ExportError(f"{type(module).__name__} uses attention sinks, which are not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attributes: dict[str, Any] = {"is_causal": 0, "scale": float(scale)}
    if softcap is not None:
        attributes["softcap"] = float(softcap)
    attended = torch.onnx.ops.symbolic(
        "Attention",
        [query, key, value, attention_mask],
        attributes,
        dtype=query.dtype,
        shape=(*query.shape[:-1], value.shape[-1]),
        version=OPSET,
    )
    return attended.transpose(1, 2).contiguous(), None


def refuse_own_mask(**_: object) -> Tensor:
    """Stand where transformers would build a mask: ours is complete, so nothing may ask for one."""
    raise ExportError("the model builds a mask of its own, which the forest mask cannot replace")
