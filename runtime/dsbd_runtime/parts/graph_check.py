"""Check of a graph, as an engine describes it, against its contract."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsbd_runtime.errors import BundleError, CapacityError, EngineError
from dsbd_runtime.parts.part import GraphContract, TensorSpec

_NO_MEMORY = ("Failed to allocate memory", "bad allocation", "bad_alloc")


def check_graph(path: Path, contract: GraphContract, engine: Any) -> None:
    """Raise BundleError naming the first tensor of a session that differs from the contract."""
    _check_tensors(path, "input", contract.inputs, engine.get_inputs())
    _check_tensors(path, "output", contract.outputs, engine.get_outputs())


def call_error(
    path: Path, sizes: str, error: Exception, remedy: str
) -> CapacityError | EngineError:
    """Return the error of a failed call of ONNX Runtime; ``remedy``: against a lack of memory."""
    reason = " ".join(str(error).split())
    if any(sign in reason for sign in _NO_MEMORY):
        return CapacityError(f"no memory for a call of {path} ({sizes}): {reason}; {remedy}")
    return EngineError(
        f"ONNX Runtime failed in a call of {path} ({sizes}): {reason}; copy the bundle or export "
        "again"
    )


def _check_tensors(
    model_path: Path, kind: str, expected_by_name: Mapping[str, TensorSpec], tensors: Sequence[Any]
) -> None:
    tensor_by_name = {tensor.name: tensor for tensor in tensors}
    if missing := [name for name in expected_by_name if name not in tensor_by_name]:
        raise _contradiction(model_path, f"lacks the {kind} {missing[0]}")
    if unknown := [name for name in tensor_by_name if name not in expected_by_name]:
        raise _contradiction(model_path, f"has an {kind} {unknown[0]} that the manifest excludes")
    for name, expected in expected_by_name.items():
        tensor = tensor_by_name[name]
        if tensor.type != expected.type:
            raise _contradiction(
                model_path, f"has {kind} {name} of {tensor.type}, the manifest says {expected.type}"
            )
        if not _fits(tensor.shape, expected.shape):
            wanted = [dim if isinstance(dim, int) else None for dim in expected.shape]
            raise _contradiction(
                model_path,
                f"has {kind} {name} of shape {list(tensor.shape)}, expected {wanted} "
                "(None: dynamic)",
            )


def _fits(shape: Sequence[int | str | None], expected: Sequence[int | str | None]) -> bool:
    """Return whether each static dimension equals the expected one; dynamic ones always fit."""
    return len(shape) == len(expected) and all(
        not isinstance(dim, int) or dim == expected_dim
        for dim, expected_dim in zip(shape, expected, strict=True)
    )


def _contradiction(model_path: Path, problem: str) -> BundleError:
    return BundleError(f"{model_path} {problem}; export the bundle again")
