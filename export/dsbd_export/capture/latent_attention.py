"""Latent attention without expanding the rows of the cache.

A layer with latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.2) caches
per row a latent c of r numbers and a rotated key of dr numbers, shared by all heads. In every call
transformers expands keys and values of every head from all cached rows, k = W_k c and v = W_v c.
Since

    q . (W_k c) = (W_k' q) . c      and      sum_c p_c W_v c = W_v sum_c p_c c

queries are mapped to the space of the latents instead, and the weighted sum is mapped back. The
layer then has one key head of r + dr numbers, and its value is the same array as its key.
"""

from typing import Any

import torch
from torch import Tensor, nn

_PROJECTION = "kv_b_proj"  # transformers' names, the same in all families
_EXPANSION = "expand_kv"


class Latents(nn.Module):
    """Maps the queries of one layer to the space of its latents, and values back."""

    def __init__(self, weight: Tensor, key_width: int, value_width: int) -> None:
        """Split the weights (H * (dn + dv), r) of the keys and values that are not rotated."""
        super().__init__()
        by_head = weight.detach().reshape(-1, key_width + value_width, weight.shape[1])
        keys, values = by_head[:, :key_width], by_head[:, key_width:]
        self.keys = nn.Parameter(keys.contiguous(), requires_grad=False)  # (H, dn, r)
        self.values = nn.Parameter(values.transpose(1, 2).contiguous(), requires_grad=False)

    def query(self, query: Tensor) -> Tensor:
        """Return a query (1, H, S, dn + dr) in the space of the latents, (1, H, S, r + dr)."""
        unrotated, rotated = query[..., : self.keys.shape[1]], query[..., self.keys.shape[1] :]
        return torch.cat([unrotated @ self.keys, rotated], dim=-1)

    def attended(self, sums: Tensor) -> Tensor:
        """Return the values (1, H, S, dv) of weighted sums of rows (1, H, S, r + dr)."""
        return sums[..., : self.values.shape[1]] @ self.values


def absorb_expansions(model: nn.Module) -> None:
    """Make layers with latent attention pass latents to their attention function, in place."""
    for module in list(model.modules()):
        layer: Any = module
        projection = getattr(layer, _PROJECTION, None)
        if not hasattr(layer, _EXPANSION) or projection is None or projection.bias is not None:
            continue
        layer.forest_latents = Latents(projection.weight, layer.qk_nope_head_dim, layer.v_head_dim)
        delattr(layer, _PROJECTION)
        setattr(layer, _EXPANSION, _as_one_head)


def latents_of(module: nn.Module) -> Latents | None:
    """Return the ``Latents`` of a layer whose expansion is absorbed, None for other layers."""
    return getattr(module, "forest_latents", None)


def _as_one_head(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Return the key and the value of the single head, (1, 1, C, r + dr) each."""
    rows = torch.cat([latents, rotated], dim=-1)
    return rows, rows
