"""Mixtures of experts without shapes that depend on the data: every expert sees every row.

transformers gathers the rows of each expert, which no static graph can do. Here all experts are
two batched products, and the routing is a weight that is 0 for the experts not chosen. The
arithmetic grows by experts / experts per token; the weights that are read do not grow once
the rows of a call choose all experts, and a row's result cannot depend on the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from dsbd_export.errors import ExportError

EXPERTS_NAME = "dense"


def dense_experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return the weighted sum of the chosen experts, (S, H); transformers' experts interface.

    With 3 experts, top_k_index [[2, 0]] and top_k_weights [[.7, .3]] give routing [[.3, 0, .7]].

    Args:
        module: transformers' experts: gate_up_proj (E, 2I, H) or up_proj (E, I, H), and down_proj
            (E, H, I); each the other way round if ``is_transposed``.
        hidden_states: (S, H).
        top_k_index: (S, K) int64. Experts of each row.
        top_k_weights: (S, K). Their weights.
    """
    if module.has_post_expert_norm or module._is_expert_parallel:
        raise ExportError(f"{type(module).__name__} treats its experts in a way that is not known")
    inner = _product(module, "gate_up_proj" if module.has_gate else "up_proj", hidden_states[None])
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outputs = _product(module, "down_proj", inner)  # (E, S, H)
    expert_ids = torch.arange(outputs.shape[0])
    is_chosen = top_k_index[..., None] == expert_ids  # (S, K, E)
    routing = torch.where(is_chosen, top_k_weights[..., None], 0.0).sum(1)  # (S, E)
    return (outputs * routing.to(outputs.dtype).t()[..., None]).sum(0)


def use_dense_experts(model: PreTrainedModel) -> None:
    """Make all experts of ``model`` dense, in place; a model without experts stays as it is."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, dense_experts)
    model.set_experts_implementation(EXPERTS_NAME)


def _product(module: Any, name: str, rows: Tensor) -> Tensor:
    """Return rows (1 or E, S, in) times the weights of each expert: (E, S, out)."""
    weight = getattr(module, name)
    product = torch.matmul(rows, weight if module.is_transposed else weight.transpose(1, 2))
    return product + getattr(module, f"{name}_bias")[:, None] if module.has_bias else product
