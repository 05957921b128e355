"""Shape and first weights of a draft."""

from __future__ import annotations

import pytest
import torch

from dsbd_distill.draft_model import (
    DraftShape,
    check_shape,
    head_dim_of,
    kept_layers,
    new_draft,
    projected,
    shape_for,
    truncated_target,
)
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import ModelOptions
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_target
from scripts.family_checkpoints import write_family_checkpoint
from tests.distill.conftest import CONTEXT

SHAPES = [  # (parameters, of the target, vocabulary, hidden size, layers)
    (1_500_000, 5_475_584, 4096, 160, 3),
    (30_000_000, 10**9, 32_000, 480, 5),
    (30_000_000, 10**9, 151_936, 160, 3),
    (None, 150_000_000, 4096, 480, 5),
    (None, 5_475_584, 4096, 64, 2),
    (None, 5_475_584, 151_936, 32, 2),
]


@pytest.mark.parametrize(("wanted", "of_target", "vocab_size", "hidden_size", "layers"), SHAPES)
def test_shapes(wanted, of_target, vocab_size, hidden_size, layers):
    shape = shape_for(wanted, of_target, vocab_size)
    assert (shape.hidden_size, shape.num_layers) == (hidden_size, layers)
    assert hidden_size % head_dim_of(hidden_size) == 0
    if wanted is not None:
        assert 0.8 * wanted < shape.num_parameters(vocab_size) <= wanted


def test_a_vocabulary_that_leaves_no_room_is_refused():
    least = DraftShape(hidden_size=32, num_layers=2).num_parameters(32_000)
    with pytest.raises(ExportError, match=f"vocabulary of 32000 tokens, .* has {least}; give"):
        shape_for(1_000_000, 10**9, 32_000)


def opened(folder):
    checkpoint = open_target(str(folder), ModelOptions())
    return checkpoint, load_model(checkpoint)


def test_a_new_draft_has_the_targets_tokens_and_context(target):
    checkpoint, model = opened(target)
    shape = DraftShape(hidden_size=64, num_layers=2)
    draft = new_draft(model, checkpoint, shape, seed=3)
    config = draft.config
    assert draft.num_parameters() == shape.num_parameters(checkpoint.vocab_size)
    assert (config.vocab_size, config.max_position_embeddings) == (300, CONTEXT)
    assert (config.bos_token_id, config.eos_token_id) == (0, [1])
    again = new_draft(model, checkpoint, shape, seed=3).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in draft.state_dict().items())
    other = new_draft(model, checkpoint, shape, seed=4).state_dict()
    assert not torch.equal(other["model.norm.weight"], again["lm_head.weight"])
    assert not torch.equal(other["lm_head.weight"], again["lm_head.weight"])


def gram(rows):
    centered = rows - rows.mean(0)
    inner = centered @ centered.T
    return inner / inner.diagonal().sum()


@pytest.mark.parametrize("size", [8, 12])
def test_a_projection_that_loses_nothing_keeps_how_rows_differ(size):
    torch.manual_seed(0)
    table = torch.randn(50, 8) + 5.0
    found = projected(table, 8, deviation=0.02)
    assert found.shape == (50, 8)
    assert found.square().mean().sqrt().item() == pytest.approx(0.02, rel=1e-4)
    torch.testing.assert_close(gram(found), gram(table), atol=1e-6, rtol=1e-3)
    assert projected(table, size, deviation=0.02).shape == (50, size)


def test_a_projection_keeps_the_directions_in_which_rows_differ_most():
    torch.manual_seed(0)
    strong, weak = torch.randn(200, 3), 0.05 * torch.randn(200, 10)
    turned, _ = torch.linalg.qr(torch.randn(13, 13))
    found = projected(torch.cat([strong, weak], dim=1) @ turned, 3, deviation=1.0)
    torch.testing.assert_close(gram(found), gram(strong), atol=5e-4, rtol=0.0)


@pytest.mark.parametrize(
    ("num_layers", "num_kept", "layers"),
    [(6, 1, [5]), (6, 2, [0, 5]), (6, 3, [0, 2, 5]), (32, 4, [0, 10, 20, 31]), (3, 2, [0, 2])],
)
def test_kept_layers(num_layers, num_kept, layers):
    assert kept_layers(num_layers, num_kept) == layers


FAMILIES = ["llama", "qwen2", "gpt2", "opt", "gpt_neox", "gemma2", "granite", "smollm3", "gptj"]


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_a_target(tmp_path, family):
    """Of two layers the last: its logits are those of the target without its first layer."""
    checkpoint, model = opened(write_family_checkpoint(family, tmp_path / family))
    draft = truncated_target(model, checkpoint, 1).eval()
    own, of_target = draft.state_dict(), model.state_dict()
    assert draft.config.model_type == model.config.model_type
    assert len(own) < len(of_target)
    for name, value in own.items():
        assert torch.equal(value, of_target[name.replace(".0.", ".1.")]), name
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    skipped = layers[0]
    skipped.forward = lambda hidden, *_, **__: hidden if returns_tensor(draft) else (hidden,)
    tokens = torch.arange(2, 12)[None]
    with torch.inference_mode():
        expected = model(input_ids=tokens, use_cache=False).logits
        found = draft(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def returns_tensor(model):
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    results = []
    layers[0].register_forward_hook(lambda _, __, result: results.append(result))
    with torch.inference_mode():
        model(input_ids=torch.tensor([[2]]), use_cache=False)
    return isinstance(results[0], torch.Tensor)


@pytest.mark.parametrize("num_kept", [2, 7])
def test_as_many_layers_as_the_target_has_are_refused(target, num_kept):
    checkpoint = open_target(str(target), ModelOptions())
    with pytest.raises(
        ExportError, match=f"target_layers={num_kept} makes no draft: .* has 2 layers"
    ):
        check_shape(None, num_kept, checkpoint)


def test_layers_of_a_target_that_reads_pictures_are_refused(tmp_path):
    folder = write_family_checkpoint("qwen3_vl", tmp_path / "target")
    checkpoint = open_target(str(folder), ModelOptions())
    with pytest.raises(ExportError, match=r"target_layers=1 .*qwen3_vl.* parts for image; give"):
        check_shape(None, 1, checkpoint)
