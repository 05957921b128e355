"""Options of a distillation; shape and first weights of a draft."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dsbd_distill.config import DistillConfig
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
from dsbd_export.errors import ExportError
from scripts.family_checkpoints import write_family_checkpoint
from tests.distill.conftest import CONTEXT, opened

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


def loaded(folder):
    return (checkpoint := opened(folder)), load_model(checkpoint)


def test_a_new_draft_has_the_targets_tokens_and_context(target):
    checkpoint, model = loaded(target)
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


def test_kept_layers():
    numbers = ((6, 1), (6, 2), (6, 3), (32, 4), (3, 2))
    kept = [kept_layers(num_layers, num_kept) for num_layers, num_kept in numbers]
    assert kept == [[5], [0, 5], [0, 2, 5], [0, 10, 20, 31], [0, 2]]


FAMILIES = ["llama", "qwen2", "gpt2", "opt", "gpt_neox", "gemma2", "granite", "smollm3", "gptj"]


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_a_target(tmp_path, family):
    """Of two layers the last: its logits are those of the target without its first layer."""
    checkpoint, model = loaded(write_family_checkpoint(family, tmp_path / family))
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


def test_layers_that_make_no_draft_are_refused(target, tmp_path):
    for num_kept in (2, 7):
        words = f"target_layers={num_kept} makes no draft: .* has 2 layers"
        with pytest.raises(ExportError, match=words):
            check_shape(None, num_kept, opened(target))
    folder = write_family_checkpoint("qwen2_5_vl", tmp_path / "target")
    checkpoint = opened(folder)
    with pytest.raises(ExportError, match=r"target_layers=1 .*qwen2_5_vl.* parts for image; give"):
        check_shape(None, 1, checkpoint)


PARAMS = [("30M", 30_000_000), ("1.5m", 1_500_000), ("2B", 2 * 10**9), ("4000", 4000), ("8k", 8000)]


def config_of(**options: Any) -> DistillConfig:
    return DistillConfig(**{"target": "t", "data": ("d",), "output": Path("o"), **options})


def test_numbers_of_parameters():
    for text, number in PARAMS:
        assert config_of(params=text).num_params == number


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"params": "30 million"}, "params='30 million' is not a number of parameters"),
    ({"params": "0"}, "params='0' is not a number"),
    ({"params": "99999999B"}, "is not a number"),
    ({"params": "1M", "target_layers": 2}, "both choose the draft's shape"),
    ({"layers_of": "sibling"}, "layers_of='sibling' has no meaning without target_layers"),
    ({"minutes": 0.0}, "minutes=0.0 is out of range"),
    ({"minutes": float("nan")}, "minutes=nan is out of range"),
    ({"steps": 0}, "steps=0 is out of range"),
    ({"seed": -1}, "seed=-1 is out of range"),
    ({"target_layers": 0}, "target_layers=0 is out of range"),
    ({"data": ()}, "data is missing"),
    ({"draft_vocab": 8}, "draft_vocab=8 is out of range; use 32 or more"),
    ({"coverage": 1}, "coverage=1 is out of range; use the number of beams, 2 to 16"),
    ({"coverage": 17}, "coverage=17 is out of range"),
    ({"kind": "medusa"}, "kind='medusa' is not known; use one of model, feature"),
    ({"kind": "feature", "target_layers": 1}, "target_layers=1 has no meaning for"),
]


@pytest.mark.parametrize(("options", "words"), WRONG)
def test_options_that_are_refused(options, words):
    with pytest.raises(ExportError, match=re.escape(words)):
        config_of(**options)
