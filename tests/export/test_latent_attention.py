"""Latent attention in the space of the latents: the same numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from dsbd_export.capture.latent_attention import absorb_expansions, latents_of

HEADS, KEY_WIDTH, ROTATED, VALUE_WIDTH, RANK = 3, 5, 2, 7, 4


class Layer(nn.Module):
    """The names that transformers' layers have, and its expansion."""

    qk_nope_head_dim, v_head_dim = KEY_WIDTH, VALUE_WIDTH

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(RANK, HEADS * (KEY_WIDTH + VALUE_WIDTH), bias=bias)

    def expand_kv(self, latents, rotated):
        both = self.kv_b_proj(latents).unflatten(-1, (HEADS, -1))[:, 0].transpose(1, 2)
        keys, values = both.split([KEY_WIDTH, VALUE_WIDTH], dim=-1)
        return torch.cat([keys, rotated.expand(-1, HEADS, -1, -1)], dim=-1), values


def test_the_absorbed_form_attends_alike():
    torch.manual_seed(0)
    layer, query = Layer(), torch.randn(1, HEADS, 6, KEY_WIDTH + ROTATED)
    latents, rotated = torch.randn(1, 1, 9, RANK), torch.randn(1, 1, 9, ROTATED)
    mask = torch.rand(6, 9) < 0.7
    wanted = F.scaled_dot_product_attention(query, *layer.expand_kv(latents, rotated), mask)
    absorb_expansions(layer)
    own = latents_of(layer)
    found = F.scaled_dot_product_attention(
        own.query(query),
        *layer.expand_kv(latents, rotated),
        mask,
        scale=query.shape[-1] ** -0.5,
        enable_gqa=True,
    )
    torch.testing.assert_close(own.attended(found), wanted)


def test_other_layers_stay():
    for layer in (Layer(bias=True), nn.Linear(2, 2)):
        absorb_expansions(layer)
        assert latents_of(layer) is None
    assert Layer().expand_kv(torch.zeros(1, 1, 9, RANK), torch.zeros(1, 1, 9, 1))[0].shape[1] == 3
