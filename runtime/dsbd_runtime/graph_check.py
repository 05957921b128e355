"""Check that an engine's inputs and outputs are those of the graph contract and the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from dsbd_runtime import graph
from dsbd_runtime.errors import BundleError
from dsbd_runtime.head import head_outputs
from dsbd_runtime.manifest import ModelEntry

INT64 = "tensor(int64)"
BOOL = "tensor(bool)"
FLOAT32 = "tensor(float)"
_HEAD_TYPES: dict[type[np.generic], str] = {np.float32: FLOAT32, np.int64: INT64}
FLOAT_TYPES = {"fp32": FLOAT32, "fp16": "tensor(float16)", "bf16": "tensor(bfloat16)"}


class TensorInfo(Protocol):
    """One input or output as ONNX Runtime describes it."""

    @property
    def name(self) -> str:
        """Name in the graph."""

    @property
    def type(self) -> str:
        """Type such as "tensor(float)"."""

    @property
    def shape(self) -> Sequence[int | str | None]:
        """Shape; a name or None stands for a dynamic dimension."""


@dataclass(frozen=True)
class Wanted:
    """Type and shape of one tensor of the contract; a None is a dynamic dimension."""

    type: str
    shape: tuple[int | None, ...]


def check_graph(
    model_path: Path,
    entry: ModelEntry,
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
) -> None:
    """Raise BundleError naming the first tensor that differs from the contract."""
    caches = Wanted(FLOAT_TYPES[entry.kv.dtype], (1, entry.kv.num_heads, None, entry.kv.head_dim))
    layers_and_parts = [(i, p) for i in range(entry.kv.num_layers) for p in graph.CACHE_PARTS]
    wanted_inputs = {
        graph.INPUT_IDS: Wanted(INT64, (1, None)),
        graph.POSITION_IDS: Wanted(INT64, (1, None)),
        **{mask: Wanted(BOOL, (1, 1, None, None)) for mask in entry.masks},
        graph.WRITE_INDICES: Wanted(INT64, (1,)),
        graph.LOGIT_ROWS: Wanted(INT64, (None,)),
        **{graph.past_name(layer, part): caches for layer, part in layers_and_parts},
    }
    wanted_outputs = {
        **{
            output.name: Wanted(_HEAD_TYPES[output.dtype], (None, *output.row_shape))
            for output in head_outputs(entry.logits, entry.vocab_size)
        },
        **{graph.present_name(layer, part): caches for layer, part in layers_and_parts},
    }
    _check_tensors(model_path, "input", wanted_inputs, inputs)
    _check_tensors(model_path, "output", wanted_outputs, outputs)


def _check_tensors(
    model_path: Path, kind: str, wanted_by_name: dict[str, Wanted], found: Sequence[TensorInfo]
) -> None:
    found_by_name = {tensor.name: tensor for tensor in found}
    if missing := [name for name in wanted_by_name if name not in found_by_name]:
        raise _contradiction(model_path, f"lacks the {kind} {missing[0]}")
    if unknown := [name for name in found_by_name if name not in wanted_by_name]:
        raise _contradiction(model_path, f"has an {kind} {unknown[0]} that the manifest excludes")
    for name, wanted in wanted_by_name.items():
        tensor = found_by_name[name]
        if tensor.type != wanted.type:
            raise _contradiction(
                model_path, f"has {kind} {name} of {tensor.type}, the manifest says {wanted.type}"
            )
        if not _fits(tensor.shape, wanted.shape):
            raise _contradiction(
                model_path,
                f"has {kind} {name} of shape {list(tensor.shape)}, expected {list(wanted.shape)} "
                "(None: dynamic)",
            )


def _fits(found: Sequence[int | str | None], wanted: Sequence[int | None]) -> bool:
    """Return whether each static dimension is the wanted one; a dynamic one may be anything."""
    return len(found) == len(wanted) and all(
        not isinstance(dim, int) or dim == wanted_dim
        for dim, wanted_dim in zip(found, wanted, strict=True)
    )


def _contradiction(model_path: Path, problem: str) -> BundleError:
    return BundleError(f"{model_path} {problem}; export the bundle again")
