"""Replacements for the parts of a transformers model that a static graph cannot express.

Attention sees the given mask and nothing else. Three ways are tried in this order: transformers'
attention interface, a call of torch's ``scaled_dot_product_attention``, and the model's own
arithmetic with an additive mask.

Mixtures of experts: transformers gathers the rows of each expert, so shapes depend on the data.
Here all experts are computed by two batched products. The routing is a weight that is 0 for experts
that are not chosen. A row's result does not depend on other rows.

Rotary frequencies that depend on the sequence length are made constant. Beyond a limit in their
config, "longrope" switches to its long factors and "dynamic" widens its base.
"""

from collections.abc import Callable, Mapping
from functools import partial
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dsbd_export.capture.latent_attention import absorb_expansions, latents_of
from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_export.checkpoints.families import AttentionForm
from dsbd_export.config import HIDDEN, OPSET
from dsbd_export.errors import ExportError

ATTENTION_NAME = "forest"

EXPERTS_NAME = "dense"

# Arguments of transformers' attention functions that cannot change the result here: masks are
# complete, positions are in the rotated queries and keys, and the rest requests further outputs.
_WITHOUT_EFFECT = frozenset(
    "sliding_window position_ids cache_position use_cache logits_to_keep output_attentions "
    "output_hidden_states output_router_logits".split()
)
_NEUTRAL: dict[str, object] = {"dropout": 0.0, "is_causal": True, "kwargs": {}}
_NEVER = object()

_FIXED = "default"  # a type whose frequencies transformers never updates


def prepare_for_capture(model: PreTrainedModel) -> AttentionForm:
    """Replace the parts of ``model`` that a graph cannot express; return its form of attention."""
    fix_rope(model)
    fix_sparsity(model)
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, dense_experts)
    model.set_experts_implementation(EXPERTS_NAME)
    absorb_expansions(model)
    return take_over_attention(model)


def take_over_attention(model: PreTrainedModel) -> AttentionForm:
    """Make ``model`` attend by the forest mask alone; return the form, or raise ExportError."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, forest_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, refuse_own_mask)
    with quiet_libraries():
        model.set_attn_implementation(ATTENTION_NAME)
    config = model.config.get_text_config()
    implementation = config._attn_implementation
    if implementation == "eager":
        return AttentionForm.OWN
    if implementation not in (ATTENTION_NAME, "sdpa"):
        raise ExportError(
            f"{type(model).__name__} attends by {implementation!r}, which cannot be captured; "
            "choose another checkpoint"
        )
    is_capped = getattr(config, "attn_logit_softcapping", None) is not None
    has_sinks = any(name.rpartition(".")[2] == "sinks" for name, _ in model.named_parameters())
    return AttentionForm.CAPPED if is_capped or has_sinks else AttentionForm.NODE


def forest_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attend; the interface is that of transformers' attention functions.

    query: (1, H, S, D). key, value: (1, Hkv, C, D), or the latents that stand for them.
    attention_mask: (1, 1, S, C) bool. Returns (1, S, H, D).
    """
    if attention_mask is None:
        raise ExportError(f"{type(module).__name__} attends without a mask; it cannot be exported")
    refuse_unknown(module, others)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    latents = latents_of(module)
    if latents is not None:
        query = latents.query(query)
    if softcap is None and s_aux is None:
        attended = attention_node(query, key, value, attention_mask, scale)
    else:
        attended = capped_attention(query, key, value, attention_mask, scale, softcap, s_aux)
    if latents is not None:
        attended = latents.attended(attended)
    return attended.transpose(1, 2).contiguous(), None


def refuse_unknown(module: nn.Module, arguments: dict[str, object]) -> None:
    """Raise ExportError for an argument that may change attention, at least in longer prompts."""
    for name, value in arguments.items():
        if value is None or name in _WITHOUT_EFFECT:
            continue
        if not isinstance(value, Tensor) and value == _NEUTRAL.get(name, _NEVER):
            continue
        shown = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ExportError(
            f"{type(module).__name__} gives attention the argument {name} ({shown}), which the "
            "forest graph has no form for; choose another checkpoint"
        )


def attention_node(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    lengths: Tensor | None = None,
) -> Tensor:
    """Return (B, H, S, D) by one Attention node; ``lengths``: (B,) int64, valid rows of keys."""
    inputs = [query, key, value, mask, None, None, lengths]
    while inputs[-1] is None:
        inputs.pop()
    attended: Tensor = torch.onnx.ops.symbolic(
        "Attention",
        inputs,
        {"is_causal": 0, "scale": scale},
        dtype=query.dtype,
        shape=(*query.shape[:-1], value.shape[-1]),
        version=OPSET,
    )
    return attended


def capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return (1, H, S, D) with scores capped at ``softcap * tanh(scores / softcap)``.

    ``sinks``, (H,), are the scores of one more row for each head, which has no value. Heads that
    share a key head are rows of one product: (1, Hkv, G*S, D) x (1, Hkv, D, C).
    """
    _, num_heads, num_nodes, head_dim = query.shape
    num_key_heads = key.shape[1]
    rows = num_heads // num_key_heads * num_nodes
    grouped = query.reshape(1, num_key_heads, rows, head_dim)
    scores = torch.matmul(grouped * scale, key.transpose(2, 3))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = torch.where(mask, scores.reshape(1, num_heads, num_nodes, -1), HIDDEN)
    scores = scores.reshape(1, num_key_heads, rows, -1)
    if sinks is not None:
        sink = sinks.to(scores.dtype).reshape(1, num_heads, 1, 1)
        # Repeated for each node by broadcasting: engines for GPUs cannot compute a shape to expand
        # to.
        sink = torch.where(mask[..., :1], sink, sink)
        scores = torch.cat([scores, sink.reshape(1, num_key_heads, rows, 1)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    attended = torch.matmul(weights, value)
    return attended.reshape(1, num_heads, num_nodes, head_dim)


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask that a model adds to its scores: 0 where ``mask`` is true."""
    return torch.where(mask, torch.zeros((), dtype=dtype), torch.full((), HIDDEN, dtype=dtype))


class ReplaceTorchFunctions(TorchFunctionMode):
    """Context in which functions of torch that a graph cannot express are replaced."""

    def __init__(self, more: Mapping[Callable[..., Any], Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self._replacements: dict[Callable[..., Any], Callable[..., Any]] = {
            F.scaled_dot_product_attention: _attended,
            Tensor.unsqueeze: _unsqueezed,
            **(more or {}),
        }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self._replacements.get(func, func)(*args, **(kwargs or {}))


def refuse_own_mask(**_: object) -> Tensor:
    """Raise ExportError in place of transformers' mask builder: the forest mask is complete."""
    raise ExportError("the model builds a mask of its own, which the forest mask cannot replace")


def _unsqueezed(value: Tensor, dim: int) -> Tensor:
    """Insert an axis. Complex numbers are handled as pairs, which the exporter supports."""
    if not value.is_complex():
        return value.unsqueeze(dim)
    pairs = torch.view_as_real(value)
    return torch.view_as_complex(pairs.unsqueeze(dim if dim >= 0 else dim - 1))


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend by one node; arguments as of torch's function (``enable_gqa`` is implied)."""
    if attn_mask is None or attn_mask.dtype != torch.bool or is_causal or dropout_p:
        raise ExportError(
            "scaled_dot_product_attention is called with another mask than the forest's; "
            "the family is not known"
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return attention_node(query, key, value, attn_mask, scale)


def dense_experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return the weighted sum of the chosen experts, (S, H); transformers' experts interface.

    With 3 experts, top_k_index [[2, 0]] and top_k_weights [[.7, .3]] give routing [[.3, 0, .7]].

    module: transformers' experts: gate_up_proj (E, 2I, H) or up_proj (E, I, H), and down_proj (E,
    H, I). If ``is_transposed``, the last two axes of each are swapped. top_k_index: (S, K) int64.
    top_k_weights: (S, K).
    """
    if module.has_post_expert_norm or module._is_expert_parallel:
        raise ExportError(f"{type(module).__name__} treats its experts in an unknown way")
    inner = _product(module, "gate_up_proj" if module.has_gate else "up_proj", hidden_states[None])
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outputs = _product(module, "down_proj", inner)  # (E, S, H)
    expert_ids = torch.arange(outputs.shape[0])
    is_chosen = top_k_index[..., None] == expert_ids  # (S, K, E)
    routing = torch.where(is_chosen, top_k_weights[..., None], 0.0).sum(1)  # (S, E)
    return (outputs * routing.to(outputs.dtype).t()[..., None]).sum(0)


def _product(module: Any, name: str, rows: Tensor) -> Tensor:
    """Return the products of rows (1 or E, S, in) with each expert's weights, (E, S, out)."""
    weight = getattr(module, name)
    product = torch.matmul(rows, weight if module.is_transposed else weight.transpose(1, 2))
    return product + getattr(module, f"{name}_bias")[:, None] if module.has_bias else product


def fix_sparsity(model: nn.Module) -> None:
    """Make the cutoff of Gemma 3n's sparse activations a constant, in place."""
    for module in model.modules():
        mlp: Any = module
        if getattr(mlp, "activation_sparsity", 0.0) > 0 and hasattr(mlp, "_gaussian_topk"):
            mlp._gaussian_topk = partial(_cut, NormalDist().inv_cdf(mlp.activation_sparsity))


def _cut(deviations: float, inputs: Tensor) -> Tensor:
    """Return how far each input exceeds its row's mean plus ``deviations``, at least 0."""
    mean = inputs.mean(dim=-1, keepdim=True)
    # ``std`` is not used: its graph computes shapes, which engines for GPUs refuse.
    deviation = (inputs - mean).square().mean(dim=-1, keepdim=True).sqrt()
    return F.relu(inputs - (mean + deviation * deviations))


def choose_rope(model: nn.Module, context_length: int) -> None:
    """Fix the frequencies of "longrope" to those for sequences of ``context_length``, in place."""
    for module in model.modules():
        rotary: Any = module
        kind = getattr(rotary, "rope_type", None)
        kinds = kind if isinstance(kind, dict) else {None: kind}
        for layer_type in (layer_type for layer_type, each in kinds.items() if each == "longrope"):
            prefix = "" if layer_type is None else f"{layer_type}_"
            parameters = rotary.config.rope_parameters
            parameters = parameters if layer_type is None else parameters[layer_type]
            limit = parameters["original_max_position_embeddings"]
            if context_length <= limit:
                continue
            frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](
                rotary.config, torch.device("cpu"), seq_len=limit + 1, layer_type=layer_type
            )
            for name in ("inv_freq", "original_inv_freq"):
                getattr(rotary, f"{prefix}{name}").data = frequencies.clone()


def fix_rope(model: nn.Module) -> None:
    """Change ``model`` in place so that it only uses the rotary frequencies of short sequences."""
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
            if original is not None:  # an earlier sequence may have been longer than the limit
                getattr(rotary, f"{prefix}inv_freq").data = original.data.clone()
