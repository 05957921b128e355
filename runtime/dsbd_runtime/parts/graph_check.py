"""Check of a graph, as an engine describes it, against its contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from dsbd_runtime.errors import BundleError
from dsbd_runtime.parts.part import GraphContract, TensorSpec


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


def check_graph(
    model_path: Path,
    contract: GraphContract,
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
) -> None:
    """Raise BundleError naming the first tensor that differs from the contract."""
    _check_tensors(model_path, "input", contract.inputs, inputs)
    _check_tensors(model_path, "output", contract.outputs, outputs)


def _check_tensors(
    model_path: Path,
    kind: str,
    expected_by_name: Mapping[str, TensorSpec],
    found: Sequence[TensorInfo],
) -> None:
    found_by_name = {tensor.name: tensor for tensor in found}
    if missing := [name for name in expected_by_name if name not in found_by_name]:
        raise _contradiction(model_path, f"lacks the {kind} {missing[0]}")
    if unknown := [name for name in found_by_name if name not in expected_by_name]:
        raise _contradiction(model_path, f"has an {kind} {unknown[0]} that the manifest excludes")
    for name, expected in expected_by_name.items():
        tensor = found_by_name[name]
        if tensor.type != expected.type:
            raise _contradiction(
                model_path, f"has {kind} {name} of {tensor.type}, the manifest says {expected.type}"
            )
        if not _fits(tensor.shape, expected.shape):
            raise _contradiction(
                model_path,
                f"has {kind} {name} of shape {list(tensor.shape)}, expected "
                f"{_shown(expected.shape)} (None: dynamic)",
            )


def _fits(found: Sequence[int | str | None], expected: Sequence[int | str | None]) -> bool:
    """Return whether each static dimension equals the expected one; dynamic ones always fit."""
    return len(found) == len(expected) and all(
        not isinstance(dim, int) or dim == expected_dim
        for dim, expected_dim in zip(found, expected, strict=True)
    )


def _shown(shape: Sequence[int | str | None]) -> list[int | None]:
    return [dim if isinstance(dim, int) else None for dim in shape]


def _contradiction(model_path: Path, problem: str) -> BundleError:
    return BundleError(f"{model_path} {problem}; export the bundle again")
