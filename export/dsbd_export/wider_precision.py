"""Computation in fp32 or float64 by a model whose weights stay in a lower precision.

A widened copy would double or triple the memory: every operation widens its inputs piece by piece.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_NARROWER = {
    torch.float32: (torch.float16, torch.bfloat16),
    torch.float64: (torch.float16, torch.bfloat16, torch.float32),
}
_CHUNK_ELEMENTS = 16 * 2**20  # of a weight that is widened at once: 64 MiB in fp32

# These only inspect a tensor or select a part of it: widening first would copy whole weights.
_VIEWS = frozenset(
    {"__getitem__", "chunk", "detach", "expand", "permute", "select", "size", "split", "squeeze"}
    | {"t", "transpose", "unbind", "unsqueeze", "view"}
)


class ComputeIn(TorchFunctionMode):
    """In the block, every operation converts tensors of narrower types to ``dtype``."""

    def __init__(self, dtype: torch.dtype, chunk_elements: int = _CHUNK_ELEMENTS) -> None:
        """Widen at most ``chunk_elements`` of a linear layer's weight at once, to a ``dtype``."""
        super().__init__()
        self._dtype = dtype
        self._narrower = _NARROWER[dtype]
        self._chunk_elements = chunk_elements
        self._default_dtype = torch.get_default_dtype()

    def __enter__(self) -> Any:
        torch.set_default_dtype(self._dtype)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._default_dtype)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.dtype.__get__:  # type: ignore[attr-defined]  # a C getter
            return self._widened(func(*args))
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func is F.embedding:
            return self._widened(func(*args, **kwargs))
        if _name_of(func) in _VIEWS or _name_of(func) == "__get__":
            return func(*args, **kwargs)
        if func is Tensor.float:
            func = Tensor.to
            kwargs = {**kwargs, "dtype": self._dtype}
        args, kwargs = tree_map(self._widened, (args, kwargs))
        return func(*args, **kwargs)

    def _linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``inputs @ weight.T + bias``, widening a few rows of the weight at a time.

        inputs: (..., in). weight: (out, in). bias: (out,).
        """
        inputs, bias = self._widened(inputs), self._widened(bias)
        if weight.dtype not in self._narrower:
            return F.linear(inputs, weight, bias)
        num_rows = max(1, self._chunk_elements // weight.shape[1])
        result = inputs.new_empty(*inputs.shape[:-1], weight.shape[0])
        for start in range(0, weight.shape[0], num_rows):
            rows = slice(start, start + num_rows)
            result[..., rows] = F.linear(
                inputs, weight[rows].to(self._dtype), None if bias is None else bias[rows]
            )
        return result

    def _widened(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self._dtype) if value.dtype in self._narrower else value
        is_narrower = isinstance(value, torch.dtype) and value in self._narrower
        return self._dtype if is_narrower else value


def _name_of(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", "")
