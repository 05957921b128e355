"""The tensors of a twin: the trained weights in place, random ones around, nothing comes of them.

The residual stream gets further dimensions that stay zero: the embedding and the output projections
(o_proj, down_proj) write nothing there. RMSNorm then divides by a mean over more dimensions; its
weights and eps (see shape.py) make up for it: with r = new / old hidden size,
x / sqrt(mean(x^2) / r + eps / r) * w / sqrt(r) is what the trained model computes.

Added heads, head dimensions and MLP rows have random weights, so they cost and look like real ones;
the output projections' columns that would read them are zero. A dimension i of a trained head lies
at k * i of one that is k times as wide: there the rotary frequency is the same.

An added layer is a widened copy of a trained one whose output projections are zero.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig


@dataclass(frozen=True)
class Placement:
    """Where the trained part of a matrix lies.

    Attributes:
        rows, columns: names of axes.
        is_silent: whether what is added must be zero, because it would be heard.
    """

    rows: str
    columns: str
    is_silent: bool = False


PLACEMENTS = {
    "embed_tokens": Placement("vocab", "hidden", is_silent=True),
    "q_proj": Placement("query", "hidden"),
    "k_proj": Placement("key", "hidden"),
    "v_proj": Placement("key", "hidden"),
    "o_proj": Placement("hidden", "query", is_silent=True),
    "gate_proj": Placement("mlp", "hidden"),
    "up_proj": Placement("mlp", "hidden"),
    "down_proj": Placement("hidden", "mlp", is_silent=True),
    "lm_head": Placement("vocab", "hidden"),
}


class TwinWeights:
    """Makes the tensors of a twin by name, one at a time, each from its own seed."""

    def __init__(
        self, source: Mapping[str, Tensor], old: LlamaConfig, new: LlamaConfig, seed: int
    ) -> None:
        """Take the trained tensors in fp32 and both configs."""
        self._source = source
        self._old = old
        self._new = new
        self._seed = seed
        self._axes = _axes(old, new)  # by name: where the trained part lies
        self._matrix_dtype = old.dtype or torch.float32

    def tensor(self, name: str, shape: torch.Size) -> Tensor:
        """Return the tensor ``name`` of the twin.

        Matrices have the type of the trained checkpoint: they hold its numbers, or those times a
        power of two. Norms are fp32: theirs are divided by a root.
        """
        source_name, is_added_layer = self._trained_name(name)
        trained = self._source[source_name]
        if len(shape) == 1:
            return self._norm(trained, shape)
        kind = name.split(".")[-2]
        placement = PLACEMENTS[kind]
        if is_added_layer and placement.is_silent:
            return torch.zeros(shape, dtype=self._matrix_dtype)
        widened = self._around(name, trained, shape, placement)
        if kind == "q_proj":  # attention divides by the root of the head's width
            trained = trained * math.sqrt(self._new.head_dim / self._old.head_dim)
        if kind == "k_proj":  # the random query dimensions of trained heads meet zero keys
            widened[: self._old.num_key_value_heads * self._new.head_dim] = 0.0
            widened[self._axes["key"]] = self._around(
                name, trained, torch.Size((len(trained), shape[1])), placement
            )
        rows, columns = self._axes[placement.rows], self._axes[placement.columns]
        widened[rows[:, None], columns] = trained
        return widened.to(self._matrix_dtype)

    def _trained_name(self, name: str) -> tuple[str, bool]:
        parts = name.split(".")
        if parts[1] != "layers":
            return name, False
        index, count = int(parts[2]), self._old.num_hidden_layers
        parts[2] = str(index % count)
        return ".".join(parts), index >= count

    def _norm(self, trained: Tensor, shape: torch.Size) -> Tensor:
        scale = math.sqrt(len(trained) / shape[0])
        widened = torch.full(shape, scale)
        widened[: len(trained)] = trained * scale
        return widened

    def _around(
        self, name: str, trained: Tensor, shape: torch.Size, placement: Placement
    ) -> Tensor:
        """Return what lies around the trained part: zeros, or random numbers of its size.

        Uniform up to the root mean square of the trained weights: no added weight or activation
        stands out, so scales of quantized rows and tokens stay those of the trained part.
        """
        if placement.is_silent:
            return torch.zeros(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        bound = float(trained.square().mean().sqrt())
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _axes(old: LlamaConfig, new: LlamaConfig) -> dict[str, Tensor]:
    """Return by name of an axis the indices of the trained entries in the widened one."""
    stride = new.head_dim // old.head_dim

    def heads(count: int) -> Tensor:
        starts = torch.arange(count)[:, None] * new.head_dim
        places: Tensor = starts + stride * torch.arange(old.head_dim)  # (count, old head_dim)
        return places.flatten()

    return {
        "vocab": torch.arange(old.vocab_size),
        "hidden": torch.arange(old.hidden_size),
        "mlp": torch.arange(old.intermediate_size),
        "query": heads(old.num_attention_heads),
        "key": heads(old.num_key_value_heads),
    }
