"""Outlier channels: a few inputs of a product that dwarf all others, and spoil their row's scale.

An int8 row has one scale, its largest magnitude over 127. Real models have input channels that are
hundreds of times larger than the median one (Dettmers et al. 2022, LLM.int8()), most of all before
the second product of an MLP: what is left of the others then is a few integers. So these channels
are multiplied in fp32, and the row of all others gets its own scale:

    rows @ weight = int8(rows without outliers) @ int8(weight) + rows[outliers] @ weight[outliers]

Which they are is seen in a run of the checkpoint over a text. Both terms of a row depend on that
row alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

NUMBERS = (0, 16, 32, 64)
"""Channels of a product that may be kept, fewest first."""
_TOLERABLE, _ENOUGH = 1.5e-3, 5e-4
"""Square error of an int8 row over the square of its ordinary channels, mean: up to which none is
kept, since each product that keeps some takes longer, and down to which more are.

Rows of normal numbers have about 1e-4."""
_TAIL = 1.8
"""The first channels that are kept make the error so many times smaller, or they are a tail."""
_NEAR = 1.2
"""So many times the error that the most channels would leave is as good."""
_FIRST_WEIGHTS = 64

Outliers = dict[bytes, NDArray[np.int64]]
"""The channels that are kept, increasing, by the first weights of a product; see ``key_of``."""


def key_of(weight: NDArray[Any]) -> bytes:
    """Return what tells products apart, of a weight (out, in): its first weights, and its width.

    Names do not: a graph has its own. Products that are merged have those of the first of them.
    """
    first = np.ascontiguousarray(weight[0, :_FIRST_WEIGHTS], dtype=np.float32)
    return bytes(first.tobytes()) + int(weight.shape[1]).to_bytes(8, "little")


@contextmanager
def observed_outliers(model: nn.Module) -> Iterator[Outliers]:
    """Yield the outliers of every product of the runs in the block; the last run counts.

    Products are modules with a matrix and rows: linear layers, and transformers' Conv1D, which has
    its weight turned around.
    """
    found: Outliers = {}

    def observe(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        weight: Any = module.weight
        by_output = weight if isinstance(module, nn.Linear) else weight.T
        rows = inputs[0].detach().float().reshape(-1, by_output.shape[1])
        if len(rows):
            found[key_of(by_output[:1].detach().float().numpy())] = outliers_of(rows)

    products = [module for module in model.modules() if _is_product(module)]
    hooks = [module.register_forward_pre_hook(observe) for module in products]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _is_product(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    is_matrix = isinstance(weight, Tensor) and weight.dim() == 2
    return is_matrix and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")


def outliers_of(rows: Tensor) -> NDArray[np.int64]:
    """Return the channels of rows (n, in) to keep, as few as make int8 exact enough."""
    order = rows.abs().amax(0).argsort(descending=True, stable=True)
    allowed = [number for number in NUMBERS if number < rows.shape[1]]
    ordinary = _without(rows, order[: allowed[-1]]).square().sum(1).clamp(min=1e-30)
    errors = [
        float((_error(_without(rows, order[:number])) / ordinary).mean()) for number in allowed
    ]
    if len(allowed) < 2 or errors[0] < max(_TOLERABLE, _TAIL * errors[1]):
        return np.arange(0)
    enough = max(_ENOUGH, _NEAR * errors[-1])
    number = next(number for number, error in zip(allowed, errors, strict=True) if error <= enough)
    return np.sort(order[:number].numpy()).astype(np.int64)


def _error(rows: Tensor) -> Tensor:
    """Return the square error of int8 rows, (n,), each by its own scale."""
    scales = (rows.abs().amax(1, keepdim=True) / 127.0).clamp(min=1e-30)
    return ((rows / scales).round() * scales - rows).square().sum(1)


def _without(rows: Tensor, channels: Tensor) -> Tensor:
    others = rows.clone()
    others[:, channels] = 0.0
    return others
