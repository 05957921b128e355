"""Attention, caches and experts of a capture: what they compute, and what they refuse."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import MixtralConfig, PreTrainedConfig
from transformers.integrations.moe import use_experts_implementation
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from dsbd_export.capture.caches import ForestCache
from dsbd_export.capture.latent_attention import absorb_expansions, latents_of
from dsbd_export.capture.replacements import (
    ReplaceTorchFunctions,
    additive_mask,
    capped_attention,
    dense_experts,
    forest_attention,
    refuse_own_mask,
)
from dsbd_export.errors import ExportError
from dsbd_runtime.parts.attention.cache_entries import ATTENTION_ROWS
from scripts.family_checkpoints import write_family_checkpoint
from tests.export.gate import export_alone

QUERY = torch.zeros(1, 4, 3, 8)  # four heads of eight, three rows
KEY = torch.zeros(1, 2, 16, 8)
MASK = torch.ones(1, 1, 3, 16, dtype=torch.bool)


def drawn(scale):
    """Return random queries, keys, values and a mask, in the shapes above."""
    generator = torch.Generator().manual_seed(0)
    shapes = (QUERY.shape, KEY.shape, KEY.shape)
    rows = (scale * torch.randn(shape, generator=generator) for shape in shapes)
    return *rows, torch.rand(MASK.shape, generator=generator) < 0.5


SINKS = torch.tensor([-1.0, 0.0, 1.0, 5.0])  # of each head: a column without a value


@pytest.mark.parametrize(("cap", "sinks"), [(5.0, None), (None, SINKS), (5.0, SINKS)])
def test_capped_attention_is_the_formula(cap, sinks):
    """Written out head by head: softmax(cap * tanh(scale * q k / cap), sink) v."""
    query, key, value, mask = drawn(3)
    mask[..., :1] = torch.tensor([True, False, True])[:, None]  # whatever the first column is
    found = capped_attention(query, key, value, mask, 0.3, cap, sinks)
    for head in range(4):
        scores = 0.3 * query[0, head] @ key[0, head // 2].T
        if cap is not None:
            assert scores.abs().max() > cap  # the cap matters
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~mask[0, 0], -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[head].expand(3, 1)], dim=1)
        wanted = scores.softmax(-1)[:, :16] @ value[0, head // 2]
        torch.testing.assert_close(found[0, head], wanted, atol=1e-5, rtol=0)


def test_a_row_that_sees_nothing_is_no_nan():
    found = capped_attention(QUERY, KEY, KEY + 1, torch.zeros_like(MASK), 1.0, 5.0)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_additive_mask_hides_and_stays_finite(dtype):
    mask = torch.tensor([[[[True, False]]]])
    added = additive_mask(mask, dtype)
    assert added.dtype == dtype and torch.isfinite(added).all()
    assert (added + torch.tensor([1.0, 9.0], dtype=dtype)).softmax(-1).tolist() == [[[[1.0, 0.0]]]]


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "falcon-new"])
def test_no_shape_is_computed_in_a_capped_graph(captures, family, tmp_path):
    """Shape arithmetic runs on the CPU, which an engine on a GPU refuses."""
    folder = write_family_checkpoint(family, tmp_path / "checkpoint")
    *_, model = export_alone(folder, tmp_path, captures)
    assert not {node.op_type for node in model.graph.node} & {"Shape", "Size"}


def test_attention_without_a_mask_or_by_one_of_the_model_itself():
    with pytest.raises(ExportError, match="Identity attends without a mask"):
        forest_attention(nn.Identity(), QUERY, KEY, KEY, None)
    with pytest.raises(ExportError, match="builds a mask of its own"):
        refuse_own_mask(batch_size=1)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"is_causal": True}, {"attn_mask": MASK.float()}, {"attn_mask": MASK, "dropout_p": 0.1}],
)
def test_a_call_of_torch_with_another_mask(arguments):
    with ReplaceTorchFunctions(), pytest.raises(ExportError, match="another mask"):
        F.scaled_dot_product_attention(QUERY, KEY, KEY, **arguments)


NEW = torch.zeros(1, 2, 3, 8)  # two heads of eight, three rows


def new_cache(num_layers=1):
    past = [(torch.zeros(1, 2, 16, 8), torch.zeros(1, 2, 16, 8)) for _ in range(num_layers)]
    by_layer = {(layer, ATTENTION_ROWS): each for layer, each in enumerate(past)}
    return ForestCache(by_layer, {ATTENTION_ROWS: torch.tensor([0])})


def test_the_cache_gives_back_all_rows_and_refuses_graphs_that_would_be_wrong():
    cache = new_cache()
    key, value = cache.update(NEW, NEW, 0)
    assert key.shape == value.shape == (1, 2, 16, 8)
    assert cache.present() == [(key, value)]
    with pytest.raises(ExportError, match="layer 0 writes its cache twice"):
        cache.update(NEW, NEW, 0)
    of_two = new_cache(num_layers=2)
    of_two.update(NEW, NEW, 0)
    with pytest.raises(ExportError, match=r"layers \[1\] write no cache"):
        of_two.present()
    with pytest.raises(ExportError, match="layer 0 caches 2 heads of 4, expected 2 of 8"):
        new_cache().update(NEW, NEW[..., :4], 0)


def attend(**arguments: object):
    return forest_attention(nn.Identity(), QUERY, KEY, KEY, MASK, **arguments)


OTHER_ARGUMENTS = [
    ("indices", torch.zeros(1, 3, 4, dtype=torch.int64), r"indices \(a tensor \[1, 3, 4\]\)"),
    ("position_bias", torch.zeros(1, 4, 3, 16), r"position_bias \(a tensor"),
    ("dropout", 0.1, r"dropout \(0.1\)"),
    ("is_causal", False, r"is_causal \(False\)"),
    ("temperature", 2.0, r"temperature \(2.0\)"),
]


@pytest.mark.parametrize(("name", "value", "said"), OTHER_ARGUMENTS)
def test_an_argument_that_may_change_attention(name, value, said):
    with pytest.raises(ExportError, match=f"Identity gives attention the argument {said}"):
        attend(**{name: value})


def test_arguments_without_effect():
    neutral = {"dropout": 0.0, "position_bias": None, "sliding_window": 4, "use_cache": True}
    attended, _ = attend(position_ids=torch.arange(3)[None], **neutral)
    assert attended.shape == (1, 3, 4, 8)


NUM_EXPERTS, HIDDEN, INNER = 4, 8, 6
ROWS = torch.tensor([[2, 0], [1, 3], [3, 2], [0, 1], [2, 1]])  # (rows, experts of each)


@use_experts_implementation(is_transposed=True, has_bias=True, has_gate=False)
class PlainExperts(nn.Module):
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
