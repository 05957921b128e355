"""Features of a target: hidden states that enter some of its layers, for drafts that read them.

To compute them takes a pass through most of the target, which on a CPU costs more than all that a
draft learns from them. So they are taken from the pass that labels a row, and kept: in bf16, whose
range is that of fp32, as hidden states of some families are beyond that of fp16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from dsbd_export.parts.features import layers_of

FeatureRows = tuple[NDArray[np.int16], ...]
"""Features by row, (num_tokens, width) each: the bits of bf16, which numpy does not know."""

BYTES_A_NUMBER = 2


class TeacherFeatures:
    """What takes features from passes through a target.

    Attributes:
        width: numbers of a feature, num_layers * Ht.
    """

    def __init__(self, target: PreTrainedModel, layers: Sequence[int], hidden_size: int) -> None:
        """Take a target, which of its layers the hidden states enter, and their width.

        Raises:
            ExportError: its transformer layers are not found.
        """
        self.width = len(layers) * hidden_size
        modules = layers_of(target)
        self._modules = [modules[layer] for layer in layers]
        self._last = modules[max(layers)]

    @contextlib.contextmanager
    def taken(self) -> Iterator[list[Tensor]]:
        """Yield a list that gets the features, (B, n, width) bf16, of each call of the target."""
        parts: list[Tensor] = []
        entering: dict[nn.Module, Tensor] = {}

        def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            entering[module] = hidden.detach().bfloat16()
            if module is self._last:
                parts.append(torch.cat([entering[each] for each in self._modules], dim=-1))

        hooks = [
            module.register_forward_pre_hook(take, with_kwargs=True) for module in {*self._modules}
        ]
        try:
            yield parts
        finally:
            for hook in hooks:
                hook.remove()


def packed(features: Tensor) -> NDArray[np.int16]:
    """Return the bits of features in bf16, of the same shape."""
    bits: NDArray[np.int16] = features.view(torch.int16).cpu().numpy()
    return bits


def unpacked(rows: Sequence[NDArray[np.int16]], num_tokens: int, device: str) -> Tensor:
    """Return features of rows in one array, (B, num_tokens, width) float32, zeros behind the last.

    rows: (n, width) each, the bits of bf16, of which ``num_tokens`` at most are taken.
    """
    bits = np.zeros((len(rows), num_tokens, rows[0].shape[1]), np.int16)
    for index, row in enumerate(rows):
        bits[index, : len(row)] = row[:num_tokens]
    return torch.from_numpy(bits).view(torch.bfloat16).to(device).float()
