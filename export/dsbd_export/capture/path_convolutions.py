"""Short convolutions over the paths of a forest (docs/algorithm.md 3.11).

A token reads its own input and those of its last k - 1 ancestors, rows of a cache that an input of
the graph names.
"""

from typing import Any

import torch
from torch import Tensor

from dsbd_export.errors import ExportError


class PathConvolutions:
    """Replacement for torch's ``conv1d``: a convolution over each node's path."""

    def __init__(self, ancestors: Tensor) -> None:
        """ancestors: (S, A) int64, cache rows, the oldest first; -1 before the path begins."""
        self._ancestors = ancestors
        self._rows: Tensor | None = None
        self._new: Tensor | None = None

    def read(self, rows: Tensor, new: Tensor) -> None:
        """Let the next convolution read rows of a cache, (1, 1, C, W), with new ones, (1, W, S)."""
        self._rows, self._new = rows, new

    def convolved(
        self, states: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Return (1, W, S): products of k rows and k weights, added in the order of the path."""
        rows, new = self._rows, self._new
        self._rows = self._new = None
        num_channels, group, size = weight.shape
        if rows is None or new is None or (group, options.get("groups")) != (1, num_channels):
            raise ExportError(
                "a convolution over the sequence reads inputs that are in no cache; the family is "
                "not supported"
            )
        if size - 1 > self._ancestors.shape[1]:
            raise ExportError(
                f"a convolution reads {size} rows, expected {self._ancestors.shape[1] + 1} at most"
            )
        weight = weight[:, 0].to(new.dtype)
        total = new[0].t() * weight[:, -1]  # (S, W)
        for place in range(1, size):
            above = self._ancestors[:, -place]
            found = rows[0, 0][above.clamp(min=0)]
            seen = torch.where(above[:, None] >= 0, found, torch.zeros((), dtype=found.dtype))
            total = total + seen * weight[:, -1 - place]
        if bias is not None:
            total = total + bias
        return total.t()[None]
