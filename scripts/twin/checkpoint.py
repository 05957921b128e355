"""Writing a twin's checkpoint shard by shard, so that memory holds one shard at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from dsbd_export.quiet import quiet_libraries
from twin.weights import TwinWeights

INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 10**9


def write_twin(
    source: Path,
    config: LlamaConfig,
    output: Path,
    seed: int,
    report: Callable[[str], None],
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write the twin of the checkpoint ``source`` to ``output``; return its parameters."""
    output.mkdir(parents=True)
    with quiet_libraries():
        trained = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    weights = TwinWeights(trained.state_dict(), LlamaConfig.from_pretrained(source), config, seed)
    with torch.device("meta"):
        shapes = LlamaForCausalLM(config).state_dict()
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=shard_bytes)
    for number, (file, names) in enumerate(split.filename_to_tensors.items(), start=1):
        report(f"writing {file} ({number} of {len(split.filename_to_tensors)})")
        tensors = {name: weights.tensor(name, shapes[name].shape) for name in names}
        save_file(tensors, output / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (output / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    config.save_pretrained(output)
    copy_other_files(source, output)
    return sum(tensor.numel() for tensor in shapes.values())


def copy_draft(source: Path, output: Path, context: int | None) -> None:
    """Copy the draft; ``context`` replaces the number of positions it names, if given."""
    shutil.copytree(source, output)
    if context is not None:
        file = output / "config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**config, "max_position_embeddings": context}, indent=2) + "\n")


def copy_other_files(source: Path, output: Path) -> None:
    """Copy the tokenizer and whatever else lies beside config and weights."""
    for file in source.iterdir():
        is_weight = ".safetensors" in file.name
        if file.is_file() and not is_weight and file.name != "config.json":
            shutil.copy(file, output / file.name)
