"""A checkpoint of any size with seeded random weights, written shard by shard."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The sizes of a Llama; few wide layers reach gigabytes without many nodes in the graph."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    context_length: int = 2048

    def config(self, dtype: torch.dtype) -> LlamaConfig:
        """Return the config of transformers, without tied embeddings."""
        return LlamaConfig(
            num_hidden_layers=self.num_layers,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.context_length,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=1,
            dtype=dtype,
        )


def write_random_checkpoint(
    folder: Path, architecture: Architecture, *, dtype: torch.dtype, shard_bytes: int, seed: int
) -> int:
    """Write config, sharded safetensors and a byte tokenizer; return the number of parameters."""
    folder.mkdir(parents=True)
    config = architecture.config(dtype)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    _byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}  # Llama's own class is no byte level
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config).state_dict()
    shapes = {name: weight.shape for name, weight in weights.items()}
    torch.manual_seed(seed)
    shard_of: dict[str, str] = {}
    for index, names in enumerate(_shards(shapes, dtype.itemsize, shard_bytes)):
        file = f"model-{index:05d}.safetensors"
        shard = {name: _random_weight(shapes[name], dtype) for name in names}
        save_file(shard, folder / file, metadata={"format": "pt"})
        shard_of |= dict.fromkeys(names, file)
    num_parameters: int = sum(shape.numel() for shape in shapes.values())
    index_of_shards = {
        "metadata": {"total_size": num_parameters * dtype.itemsize},
        "weight_map": shard_of,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_of_shards))
    return num_parameters


def _shards(shapes: dict[str, torch.Size], itemsize: int, shard_bytes: int) -> Iterator[list[str]]:
    """Yield names whose weights fill one shard; a weight larger than a shard has one of its own."""
    names: list[str] = []
    num_bytes = 0
    for name, shape in shapes.items():
        size = shape.numel() * itemsize
        if names and num_bytes + size > shard_bytes:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += size
    yield names


def _random_weight(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype)  # the scale of a norm
    return torch.randn(shape).mul_(_STD).to(dtype)


def _byte_tokenizer() -> Tokenizer:
    """Return a tokenizer without merges: a token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|begin|>", "<|end|>", *alphabet]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
