"""Dense experts give what transformers' gathered ones give, row by row."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, PreTrainedConfig
from transformers.integrations.moe import use_experts_implementation
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from dsbd_export.capture.replacements import dense_experts
from dsbd_export.errors import ExportError

NUM_EXPERTS, HIDDEN, INNER = 4, 8, 6
ROWS = torch.tensor([[2, 0], [1, 3], [3, 2], [0, 1], [2, 1]])  # (rows, experts of each)


@use_experts_implementation(is_transposed=True, has_bias=True, has_gate=False)
class PlainExperts(nn.Module):
    """No gate, a bias, weights (in, out)."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = NUM_EXPERTS
        self.up_proj = nn.Parameter(torch.empty(NUM_EXPERTS, HIDDEN, INNER))
        self.up_proj_bias = nn.Parameter(torch.empty(NUM_EXPERTS, INNER))
        self.down_proj = nn.Parameter(torch.empty(NUM_EXPERTS, INNER, HIDDEN))
        self.down_proj_bias = nn.Parameter(torch.empty(NUM_EXPERTS, HIDDEN))
        self.act_fn = nn.GELU()


def gated():
    return MixtralExperts(
        MixtralConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=NUM_EXPERTS)
    )


def routed(experts):
    """The module with random weights, rows, chosen experts and their weights."""
    torch.manual_seed(0)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    return experts, torch.randn(len(ROWS), HIDDEN), ROWS, torch.rand(ROWS.shape)


@pytest.mark.parametrize("make", [gated, lambda: PlainExperts(PreTrainedConfig())])
def test_the_same_as_gathered_experts(make):
    experts, rows, chosen, weights = routed(make())
    experts.config._experts_implementation = "batched_mm"
    with torch.no_grad():
        wanted = experts(rows, chosen, weights)
        torch.testing.assert_close(dense_experts(experts, rows, chosen, weights), wanted)


def test_a_row_does_not_depend_on_the_others():
    experts, rows, chosen, weights = routed(gated())
    with torch.no_grad():
        together = dense_experts(experts, rows, chosen, weights)
        rows[1:] = 1e6
        with_others = dense_experts(experts, rows, chosen, weights)
    assert torch.equal(together[0], with_others[0])


def test_experts_with_a_norm_of_their_own_are_named():
    experts, rows, chosen, weights = routed(gated())
    experts.has_post_expert_norm = True
    with pytest.raises(ExportError, match="MixtralExperts treats its experts in an unknown way"):
        dense_experts(experts, rows, chosen, weights)
