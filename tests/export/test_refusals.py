"""Checkpoints that cannot come out right are refused with the reason."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from dsbd_export.checkpoints.families import FAMILIES
from dsbd_export.checkpoints.model_config import refusal_of
from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_pair

REFUSED = [  # (config class, its arguments, words of the reason)
    ("Speech2TextConfig", {}, "reads neither text nor"),
    ("LEDConfig", {}, "within windows"),
    ("LongT5Config", {}, "within windows"),
    ("BigBirdPegasusConfig", {}, "within windows"),
    ("NllbMoeConfig", {}, "route by rules of their own"),
    ("SwitchTransformersConfig", {}, "route by rules of their own"),
    ("PaliGemmaConfig", {}, "builds a mask of its own"),
    ("Qwen2_5OmniConfig", {}, "writes sound too"),
    ("Qwen3OmniMoeConfig", {}, "writes sound too"),
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
    *(
        (
            "LlamaConfig",
            {"quantization_config": {"quant_method": name}},
            f"quantized ({name}, which is not read)",
        )
        for name in ("hqq", "new")
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


@pytest.fixture
def folder(small_llama_folder, tmp_path):
    return Path(shutil.copytree(small_llama_folder, tmp_path / "checkpoint"))


def opened(target: Path, draft: Path | None = None) -> None:
    open_pair(ExportConfig(target=str(target), draft=draft and str(draft), output=Path("out")))


def add_adapter(folder, config='{"peft_type": "LORA", "base_model_name_or_path": "someone/base"}'):
    if config:
        (folder / "adapter_config.json").write_text(config)
    save_file({"a.lora_A.weight": torch.ones(1)}, folder / "adapter_model.safetensors")


def quantized(ending, file=None, content="", own_name="model.safetensors"):
    """Return a change: one weight gets the name that quantized ones have, a config is added."""

    def change(folder):
        weights = load_file(folder / "model.safetensors")
        name = "model.layers.0.mlp.up_proj"
        weights[f"{name}{ending}"] = weights.pop(f"{name}.weight")
        (folder / "model.safetensors").unlink()
        save_file(weights, folder / own_name, metadata={"format": "pt"})
        if file:
            (folder / file).write_text(content)

    return change


GPTQ = (".qweight", "quantize_config.json", '{"bits": 4, "group_size": 128}')
GPTQ_FILE = "gptq_model-4bit-128g.safetensors"
OTHER_WEIGHTS = [
    (add_adapter, r"next to its own weights \(adapter_config\.json, LORA\); .* folder and give .*"),
    (
        lambda folder: add_adapter(folder, config=None),
        r"next to its own weights \(adapter_model\.safetensors\); .*",
    ),
    (quantized(*GPTQ), r"already quantized \(GPTQ, 4 bits: quantize_config\.json\)"),
    (quantized(*GPTQ, GPTQ_FILE), r"already quantized \(GPTQ, 4 bits: quantize_config\.json\)"),
    (
        quantized(".qweight", own_name=GPTQ_FILE),
        r"already quantized \(GPTQ: gptq_model-4bit-128g\.safetensors\)",
    ),
    (
        quantized(".qweight", "quant_config.json", '{"w_bit": 4, "q_group_size": 128}'),
        r"already quantized \(AWQ, 4 bits: quant_config\.json\)",
    ),
    (
        quantized(".qweight"),
        r"already quantized \(GPTQ or AWQ: model.layers.0.mlp.up_proj.qweight\)",
    ),
    (quantized(".weight.absmax"), r"already quantized \(bitsandbytes: .*absmax\)"),
    (quantized(".weight_scale"), r"already quantized \(FP8 or 8 bits: .*weight_scale\)"),
]


@pytest.mark.parametrize(("change", "words"), OTHER_WEIGHTS)
def test_what_the_weights_are_is_said(folder, small_llama_folder, change, words):
    change(folder)
    with pytest.raises(ExportError, match=f"the target at .*{words}"):
        opened(folder)
    with pytest.raises(ExportError, match=f"the draft at .*{words}"):
        opened(small_llama_folder, folder)


def test_an_adapter_alone_says_the_command_that_merges_it(folder, small_llama_folder):
    add_adapter(folder)
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    words = r"is an adapter alone \(adapter_config\.json, LORA\); .*: dsbd-export"
    command = f"--target someone/base --adapter {folder}"
    with pytest.raises(ExportError, match=f"the target at .* {words} {command}"):
        opened(folder)
    command = f"--draft someone/base --draft-adapter {folder}"
    with pytest.raises(ExportError, match=f"the draft at .* {words} {command}"):
        opened(small_llama_folder, folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(ExportError, match="--target BASE_MODEL --adapter"):
        opened(folder)


def test_a_config_with_restored_weights_is_no_reason(folder):
    (folder / "quantize_config.json").write_text('{"bits": 4, "group_size": 128}')
    opened(folder)
