"""Rotary frequencies that change with the length are fixed below it, or the context is refused."""

import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from dsbd_export.capture.replacements import fix_rope
from dsbd_export.checkpoints.model_config import constant_rope_length
from dsbd_export.opening import source_of
from dsbd_export.pair import context_warning
from dsbd_export.progress import silent
from scripts.family_checkpoints import FAMILY_CHECKPOINTS, write_checkpoint, write_family_checkpoint
from tests.export.conftest import opened

SCALED = {"rope_theta": 1e4, "factor": 2.0}
FACTORS = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
LONGROPE = {**SCALED, "rope_type": "longrope", **FACTORS}
PHI_3 = {"pad_token_id": 0, "original_max_position_embeddings": 64}
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL = {**SIZES, "intermediate_size": 16, "vocab_size": 50, "max_position_embeddings": 64}


def llama(rope_type, **more):
    return LlamaConfig(**SMALL, rope_parameters={**SCALED, "rope_type": rope_type, **more})


LIMITS = [
    (llama("linear"), None),
    (llama("yarn"), None),
    (llama("dynamic"), 64),
    (llama("dynamic", original_max_position_embeddings=32), 64),  # transformers does not read it
    (Phi3Config(**PHI_3, rope_parameters=LONGROPE), 64),
    (Gemma3TextConfig(), None),  # parameters by layer type
]


@pytest.mark.parametrize(("config", "limit"), LIMITS)
def test_the_length_up_to_which_frequencies_are_constant(config, limit):
    assert constant_rope_length(config) == limit


def test_by_default_the_context_is_that_of_short_texts_and_a_line_says_so(tmp_path):
    folder = write_family_checkpoint("phi3-longrope", tmp_path)
    asked = (None, 192, 256, 200)
    checkpoints = [opened(folder, max_context=length) for length in asked]
    assert [each.context_length for each in checkpoints] == [192, 192, 256, 200]
    warnings = [context_warning(c, None, n) or "" for c, n in zip(checkpoints, asked, strict=True)]
    assert "can use 192 tokens" in warnings[0] and "max_context=256" in warnings[0]
    assert warnings[1:] == ["", "", ""]


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


LONG, SHORT = 200, 64  # contexts beyond and up to the original one


@pytest.mark.parametrize("context", [LONG, SHORT])
def test_longrope_gives_the_logits_of_the_exported_context(context, tmp_path):
    arguments = FAMILY_CHECKPOINTS["phi3-longrope-long"].arguments
    folder = write_checkpoint(tmp_path / "checkpoint", Phi3Config(**arguments))
    checkpoint = opened(folder, max_context=context)
    found = source_of(checkpoint).load("fp32", silent)
    theirs = Phi3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, 256, (1, context), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():  # their frequencies follow from the length of the sequence
        assert (found(ids).logits - theirs(ids).logits).abs().max() < 1e-5
        frequencies = found.model.rotary_emb.inv_freq.clone()
        found(ids[:, :1])
        assert torch.equal(found.model.rotary_emb.inv_freq, frequencies)
