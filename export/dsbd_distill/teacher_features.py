"""Features of a target: hidden states that enter some of its layers, for drafts that read them.

They come from the pass that labels a row, and are kept in bf16, which has the range of fp32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dsbd_export.parts.features import layers_of


class TeacherFeatures:
    """Takes features from the passes through a target."""

    def __init__(self, target: PreTrainedModel, layers: Sequence[int], hidden_size: int) -> None:
        """Take a target, which of its layers the hidden states enter, and their width."""
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
