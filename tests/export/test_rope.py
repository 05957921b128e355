"""Rotary frequencies that change with the length are fixed below it, or the context is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, Phi3Config

from dsbd_export.capture.replacements import fix_rope
from dsbd_export.checkpoints.model_config import constant_rope_length
from dsbd_export.config import ExportConfig
from dsbd_export.opening import open_checkpoint
from dsbd_export.pair import context_warning
from scripts.family_checkpoints import write_family_checkpoint

SCALED = {"rope_theta": 1e4, "factor": 2.0}
LONGROPE = {
    **SCALED,
    "rope_type": "longrope",
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
}
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL = {**SIZES, "intermediate_size": 16, "vocab_size": 50, "max_position_embeddings": 64}


def llama(rope_type, **more):
    return LlamaConfig(**SMALL, rope_parameters={**SCALED, "rope_type": rope_type, **more})


LIMITS = [
    (llama("linear"), None),
    (llama("yarn"), None),
    (llama("dynamic"), 64),
    (llama("dynamic", original_max_position_embeddings=32), 64),  # transformers does not read it
    (
        Phi3Config(pad_token_id=0, original_max_position_embeddings=64, rope_parameters=LONGROPE),
        64,
    ),
    (Gemma3TextConfig(), None),  # parameters by layer type
]


@pytest.mark.parametrize(("config", "limit"), LIMITS)
def test_the_length_up_to_which_frequencies_are_constant(config, limit):
    assert constant_rope_length(config) == limit


def options(max_context):
    return ExportConfig(target="", draft="", output=Path("out"), max_context=max_context)


def test_longrope_has_the_frequencies_of_the_exported_context(tmp_path):
    folder = write_family_checkpoint("phi3-longrope", tmp_path)
    lengths = [
        open_checkpoint("target", folder, options(n)).context_length for n in (None, 200, 192)
    ]
    assert lengths == [192, 200, 192]


def test_by_default_the_context_is_that_of_short_texts_and_a_line_says_so(tmp_path):
    folder = write_family_checkpoint("phi3-longrope", tmp_path)
    warnings = [
        context_warning(open_checkpoint("target", folder, options(n)), None, n) or ""
        for n in (None, 192, 256)
    ]
    assert "can use 192 tokens" in warnings[0] and "max_context=256" in warnings[0]
    assert warnings[1:] == ["", ""]


def test_frequencies_are_those_of_short_sequences_after_a_long_one():
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama("dynamic", factor=8.0)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    short, long = torch.arange(20)[None] % 50, torch.arange(90)[None] % 50
    with torch.no_grad():
        wanted, stretched = model(short).logits, model(long).logits[:, :20]
        assert (wanted - stretched).abs().max() > 1e-4  # the test would see stretched frequencies
        fix_rope(model)
        torch.testing.assert_close(model(long).logits[:, :20], wanted)
