"""The files of a checkpoint: which count, in which precision they are, and converting in place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.checkpoints.checkpoint_files import (
    convert_weights,
    open_weights,
    safetensors_files,
    stored_dtype,
)
from dsbd_export.checkpoints.model_loading import load_model, reference_dtype
from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_pair
from tests.export.conftest import SIZES

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
REFERENCE = [  # (stored, exported, loaded)
    ("fp16", "fp32", "fp32"),
    ("fp16", "fp16", "fp16"),
    ("bf16", "fp16", "bf16"),
    ("fp32", "fp16", "fp32"),
    ("fp32", "bf16", "fp32"),
]


def checkpoint_of(folder: Path) -> Checkpoint:
    return open_pair(ExportConfig(target=str(folder), draft=str(folder), output=folder))[0]


def stored_as(source: Path, folder: Path, dtype: torch.dtype) -> Path:
    """A copy of a checkpoint in two shards of another precision; one small weight in fp32."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    converted = {name: weight.to(dtype) for name, weight in weights.items()}
    converted["model.norm.weight"] = weights["model.norm.weight"].float()
    names = sorted(converted)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in shards.items():
        save_file({name: converted[name] for name in own}, folder / file, metadata={"format": "pt"})
    file_by_weight = {name: file for file, own in shards.items() for name in own}
    index = {"metadata": {}, "weight_map": file_by_weight}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(("stored", "exported", "loaded"), REFERENCE)
def test_references_come_from_the_stored_values(llama_folder, tmp_path, stored, exported, loaded):
    folder = stored_as(llama_folder, tmp_path / "checkpoint", TORCH_DTYPES[stored])
    assert stored_dtype(folder) == stored
    assert reference_dtype(checkpoint_of(folder), exported) == loaded


def test_shards_load_as_one_file_does(llama_folder, tmp_path):
    folder = stored_as(llama_folder, tmp_path / "checkpoint", torch.float16)
    (folder / "consolidated.safetensors").write_bytes(b"the same weights in another layout")
    assert [file.name for file in safetensors_files(folder)] == ["a.safetensors", "b.safetensors"]
    single = load_model(checkpoint_of(llama_folder)).state_dict()
    sharded = load_model(checkpoint_of(folder)).state_dict()
    assert set(single) == set(sharded)
    assert all(torch.equal(single[name], sharded[name]) for name in single)


def test_weights_are_read_not_mapped(llama_folder):
    with open_weights(llama_folder) as readers:
        weight = readers["model.norm.weight"][:]
        assert "model.safetensors" not in Path("/proc/self/maps").read_text()
    assert torch.equal(weight, load_file(llama_folder / "model.safetensors")["model.norm.weight"])


def test_old_weights_load_too(llama_folder, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(llama_folder, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert stored_dtype(folder) is None
    assert reference_dtype(checkpoint_of(folder), "fp16") == "fp32"
    loaded = load_model(checkpoint_of(folder)).state_dict()
    assert torch.equal(loaded["model.norm.weight"], weights["model.norm.weight"].float())


def test_a_shard_that_is_missing(llama_folder, tmp_path):
    folder = stored_as(llama_folder, tmp_path / "checkpoint", torch.float16)
    (folder / "b.safetensors").unlink()
    checkpoint = checkpoint_of(folder)
    for dtype in ("fp16", "fp32"):
        with pytest.raises(ExportError, match=r"cannot be loaded: .*b\.safetensors"):
            load_model(checkpoint, reference_dtype(checkpoint, dtype))


def tiny_model(tied: bool):
    return AutoModelForCausalLM.from_config(
        LlamaConfig(**SIZES, num_hidden_layers=1, tie_word_embeddings=tied), dtype=torch.float32
    )


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_converted_in_place(tied):
    model = tiny_model(tied)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    convert_weights(model, "fp16")
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name].half())
    is_tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert is_tied == tied


def test_a_weight_beyond_the_range_is_named():
    model = tiny_model(tied=False)
    model.model.norm.weight.data[3] = -1e6
    with pytest.raises(ExportError, match=r"model\.norm\.weight holds 1e\+06.*fp16 \(up to 6"):
        convert_weights(model, "fp16")
    convert_weights(model, "bf16")
