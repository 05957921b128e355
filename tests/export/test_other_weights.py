"""Adapters and quantized weights are named as what they are, not left out or called incomplete."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_pair


@pytest.fixture
def folder(small_llama_folder, tmp_path):
    return Path(shutil.copytree(small_llama_folder, tmp_path / "checkpoint"))


def opened(target: Path, draft: Path | None = None) -> None:
    open_pair(ExportConfig(target=str(target), draft=draft and str(draft), output=Path("out")))


def add_adapter(folder: Path) -> None:
    content = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": "someone/base"}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    save_file({"a.lora_A.weight": torch.ones(1)}, folder / "adapter_model.safetensors")


def add_bare_adapter(folder: Path) -> None:
    save_file({"a.lora_A.weight": torch.ones(1)}, folder / "adapter_model.safetensors")


def add_adapter_alone(folder: Path) -> None:
    add_adapter(folder)
    (folder / "config.json").unlink()
    (folder / "model.safetensors").unlink()


def quantized(folder: Path, ending: str) -> None:
    """Give one weight the name that quantized ones have."""
    weights = load_file(folder / "model.safetensors")
    weights[f"model.layers.0.mlp.up_proj{ending}"] = weights.pop(
        "model.layers.0.mlp.up_proj.weight"
    )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def gptq(folder: Path) -> None:
    quantized(folder, ".qweight")
    (folder / "quantize_config.json").write_text('{"bits": 4, "group_size": 128}')


def gptq_under_its_own_name(folder: Path) -> None:
    gptq(folder)
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-128g.safetensors")


def gptq_without_config(folder: Path) -> None:
    gptq_under_its_own_name(folder)
    (folder / "quantize_config.json").unlink()


def awq(folder: Path) -> None:
    quantized(folder, ".qweight")
    (folder / "quant_config.json").write_text('{"w_bit": 4, "q_group_size": 128}')


def bare_awq(folder: Path) -> None:
    quantized(folder, ".qweight")


def bitsandbytes(folder: Path) -> None:
    quantized(folder, ".weight.absmax")


def fp8(folder: Path) -> None:
    quantized(folder, ".weight_scale")


REFUSED = [
    (add_adapter, r"next to its own weights \(adapter_config\.json, LORA\); .* folder and give .*"),
    (add_bare_adapter, r"next to its own weights \(adapter_model\.safetensors\); .*"),
    (gptq, r"already quantized \(GPTQ, 4 bits: quantize_config\.json\)"),
    (gptq_under_its_own_name, r"already quantized \(GPTQ, 4 bits: quantize_config\.json\)"),
    (gptq_without_config, r"already quantized \(GPTQ: gptq_model-4bit-128g\.safetensors\)"),
    (awq, r"already quantized \(AWQ, 4 bits: quant_config\.json\)"),
    (bare_awq, r"already quantized \(GPTQ or AWQ: model.layers.0.mlp.up_proj.qweight\)"),
    (bitsandbytes, r"already quantized \(bitsandbytes: .*absmax\)"),
    (fp8, r"already quantized \(FP8 or 8 bits: .*weight_scale\)"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_what_the_weights_are_is_said(folder, small_llama_folder, change, words):
    change(folder)
    with pytest.raises(ExportError, match=f"the target at .*{words}"):
        opened(folder)
    with pytest.raises(ExportError, match=f"the draft at .*{words}"):
        opened(small_llama_folder, folder)


def test_an_adapter_alone_says_the_command_that_merges_it(folder, small_llama_folder):
    add_adapter_alone(folder)
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
