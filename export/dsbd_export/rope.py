"""Rotary positions whose frequencies depend on the length of the sequence.

Two kinds do, both only beyond a limit that their config names: "longrope" switches to its long
factors, "dynamic" widens its base. Up to the limit both are constant, and so they can be fixed
in a graph that never sees a longer sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

_FIXED = "default"  # any name that transformers' update of the frequencies does not know


def constant_rope_length(config: PreTrainedConfig) -> int | None:
    """Return the longest sequence with constant frequencies, None where no length changes them."""
    limits = [
        parameters.get("original_max_position_embeddings", config.max_position_embeddings)
        # transformers widens a dynamic base from max_position_embeddings on, whatever else is given
        if parameters["rope_type"] == "longrope"
        else config.max_position_embeddings
        for parameters in _rope_parameters(getattr(config, "rope_parameters", None))
        if parameters["rope_type"] in ("dynamic", "longrope")
    ]
    return min(limits, default=None)


def fix_rope(model: nn.Module) -> None:
    """Fix the frequencies of ``model`` at those of short sequences, in place."""
    for module in model.modules():
        rotary: Any = module  # torch types every attribute as a tensor or a module
        kind = getattr(rotary, "rope_type", None)
        if isinstance(kind, dict):  # one kind for each layer type
            rotary.rope_type = dict.fromkeys(kind, _FIXED)
            prefixes = [f"{layer_type}_" for layer_type in kind]
        elif isinstance(kind, str):
            rotary.rope_type = _FIXED
            prefixes = [""]
        else:
            continue
        for prefix in prefixes:
            original = getattr(rotary, f"{prefix}original_inv_freq", None)
            if original is not None:  # a sequence beyond the limit may have been seen before
                getattr(rotary, f"{prefix}inv_freq").data = original.data.clone()


def _rope_parameters(content: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the rope parameters of a config: one dict, or one dict for each layer type."""
    content = content or {}
    if "rope_type" in content:
        yield content
    for value in content.values():
        if isinstance(value, dict):
            yield from _rope_parameters(value)
