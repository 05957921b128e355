"""Checkpoints that cannot come out right are refused with the reason."""

from __future__ import annotations

import pytest
import transformers
from transformers import PreTrainedConfig

from dsbd_export.checkpoints.families import FAMILIES
from dsbd_export.checkpoints.model_config import refusal_of

REFUSED = [  # (config class, its arguments, words of the reason)
    ("Speech2TextConfig", {}, "reads neither text nor"),
    ("LEDConfig", {}, "within windows"),
    ("LongT5Config", {}, "within windows"),
    ("BigBirdPegasusConfig", {}, "within windows"),
    ("NllbMoeConfig", {}, "route by rules of their own"),
    ("SwitchTransformersConfig", {}, "route by rules of their own"),
    ("PaliGemmaConfig", {}, "builds a mask of its own"),
    ("MambaConfig", {}, "recurrent state"),
    ("RwkvConfig", {}, "recurrent state"),
    ("RecurrentGemmaConfig", {}, "recurrent state"),
    ("JambaConfig", {}, "recurrent state"),
    (
        "DeepseekV4Config",
        {},
        "is not known; conv, full_attention, hybrid, linear_attention, mlp, moe",
    ),
    ("Llama4TextConfig", {}, "scaled by the length of a cache"),
    ("Llama4Config", {}, "scaled by the length of a cache"),
    ("BloomConfig", {}, "ALiBi"),
    ("MptConfig", {}, "ALiBi"),
    ("FalconConfig", {"alibi": True}, "ALiBi"),
    ("GPTNeoConfig", {}, "counts cache rows"),
    ("DogeConfig", {}, "rows of largest weight"),
    ("LongcatFlashConfig", {}, "return a row unchanged"),
    ("ModernBertConfig", {}, "no model class that continues text for ModernBertConfig"),
    (
        "LlamaConfig",
        {"quantization_config": {"quant_method": "hqq"}},
        "quantized (hqq, which is not read)",
    ),
    (
        "LlamaConfig",
        {"quantization_config": {"quant_method": "new"}},
        "quantized (new, which is not read)",
    ),
]


@pytest.mark.parametrize(("name", "arguments", "words"), REFUSED)
def test_refused_configs(name, arguments, words):
    assert words in str(refusal_of(getattr(transformers, name)(**arguments)))


def test_every_refusal_of_the_table_is_tried():
    tried = {getattr(transformers, name)().model_type for name, arguments, _ in REFUSED}
    assert {name for name, family in FAMILIES.items() if family.refusal is not None} <= tried


def test_a_config_without_the_sizes_of_a_decoder():
    config = PreTrainedConfig(vocab_size=8, hidden_size=8)
    assert refusal_of(config) == "its config has no num_layers under any known name"
