"""Rows that the products of a checkpoint multiply, seen in runs over a text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

_MOST_ROWS = 128  # of a run that are kept: of 7 B parameters 0.5 GB
_FIRST_WEIGHTS = 64


@dataclass(frozen=True)
class ProductRows:
    """Statistics of the rows of one product, seen over a text."""

    rows: NDArray[np.float32]  # (n, in) float32. Some of them, evenly spread.
    # (in,) float32. The largest magnitude of every channel, in all of them.
    largest: NDArray[np.float32]


RowsOfProducts = dict[bytes, ProductRows]
"""Rows by the first weights of a product; see ``key_of``."""


def key_of(weight: NDArray[Any]) -> bytes:
    """Return the key of a product (out, in): its width, and the first weights, if merged."""
    first = np.ascontiguousarray(weight[0, :_FIRST_WEIGHTS], dtype=np.float32)
    return bytes(first.tobytes()) + int(weight.shape[1]).to_bytes(8, "little")


@contextmanager
def observed_rows(model: nn.Module) -> Iterator[RowsOfProducts]:
    """Yield the rows of every product of the runs in the block; the last run counts."""
    found: RowsOfProducts = {}
    last: list[tuple[Tensor, ProductRows]] = []  # query, key and value multiply one tensor

    def observe(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        weight: Any = module.weight
        by_output = weight if isinstance(module, nn.Linear) else weight.T
        if not inputs[0].numel():
            return
        if not last or last[0][0] is not inputs[0]:
            rows = inputs[0].detach().float().reshape(-1, by_output.shape[1])
            last[:] = [(inputs[0], rows_of(rows.numpy()))]
        found[key_of(by_output[:1].detach().float().numpy())] = last[0][1]

    products = [module for module in model.modules() if _is_product(module)]
    hooks = [module.register_forward_pre_hook(observe) for module in products]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def rows_of(rows: NDArray[np.float32]) -> ProductRows:
    """Return the statistics of rows (n, in)."""
    some = np.linspace(0, len(rows) - 1, min(len(rows), _MOST_ROWS)).astype(np.int64)
    return ProductRows(rows[some], np.abs(rows).max(0))


def _is_product(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    is_matrix = isinstance(weight, Tensor) and weight.dim() == 2
    return is_matrix and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
