"""Compute in fp32 with a model whose weights stay in a lower precision.

A copy of the weights in fp32 would double (or triple) the memory of an export. Here every
operation widens its own inputs instead, the large ones piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_LOW = (torch.float16, torch.bfloat16)
_CHUNK_ELEMENTS = 16 * 2**20  # of a weight that is widened at once: 64 MiB in fp32

# These only look at a tensor or choose a part of it: widening first would copy whole weights.
_VIEWS = frozenset(
    {"__getitem__", "chunk", "detach", "expand", "permute", "select", "size", "split", "squeeze"}
    | {"t", "transpose", "unbind", "unsqueeze", "view"}
)


class ComputeInFP32(TorchFunctionMode):
    """Inside the block every operation sees fp16 and bf16 tensors as if they were fp32.

    Results are fp32, and so is the ``dtype`` that model code reads and asks for: a weight never
    pulls the activations down to its own precision.
    """

    def __init__(self, chunk_elements: int = _CHUNK_ELEMENTS) -> None:
        """Widen at most ``chunk_elements`` of a linear layer's weight at once."""
        super().__init__()
        self._chunk_elements = chunk_elements

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operation in fp32."""
        kwargs = kwargs or {}
        if func == Tensor.dtype.__get__:  # type: ignore[attr-defined]  # a C getter
            return _widened_dtype(func(*args))
        if func is F.linear:
            return _linear(*args, **kwargs, chunk_elements=self._chunk_elements)
        if func is F.embedding:
            return _widened(func(*args, **kwargs))
        if _name_of(func) in _VIEWS or _name_of(func) == "__get__":
            return func(*args, **kwargs)
        args, kwargs = tree_map(_widened, (args, kwargs))
        return func(*args, **kwargs)


def _linear(
    inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *, chunk_elements: int
) -> Tensor:
    """Return ``inputs @ weight.T + bias`` in fp32, widening a few rows of the weight at a time.

    inputs: (..., in). weight: (out, in). bias: (out,).
    """
    inputs = _widened(inputs)
    bias = None if bias is None else _widened(bias)
    if weight.dtype not in _LOW:
        return F.linear(inputs, weight, bias)
    num_rows = max(1, chunk_elements // weight.shape[1])
    result = inputs.new_empty(*inputs.shape[:-1], weight.shape[0])
    for start in range(0, weight.shape[0], num_rows):
        rows = slice(start, start + num_rows)
        result[..., rows] = F.linear(
            inputs, weight[rows].float(), None if bias is None else bias[rows]
        )
    return result


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _LOW else value
    return _widened_dtype(value) if isinstance(value, torch.dtype) else value


def _widened_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _LOW else dtype


def _name_of(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", "")
