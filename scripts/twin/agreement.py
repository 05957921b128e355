"""How far the logits of two checkpoints are apart, with one layer of each in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from twin.checkpoint import INDEX_FILE

NUM_SEQUENCES, LENGTH = 4, 64


def largest_difference(source: Path, twin: Path, seed: int) -> float:
    """Return the largest absolute logit difference, fp32, on seeded random tokens."""
    vocab_size = LlamaConfig.from_pretrained(source).vocab_size
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(vocab_size, (NUM_SEQUENCES, LENGTH), generator=generator)
    expected, found = (streamed_logits(folder, token_ids) for folder in (source, twin))
    return float((found - expected).abs().max())


@torch.no_grad()
def streamed_logits(folder: Path, token_ids: Tensor) -> Tensor:
    """Return the logits of a Llama checkpoint, (num_sequences, length, vocab) float32."""
    config = LlamaConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # its buffer is in no file
    model.model.embed_tokens.load_state_dict(_tensors(folder, "model.embed_tokens."), assign=True)
    model.model.norm.load_state_dict(_tensors(folder, "model.norm."), assign=True)
    head = "model.embed_tokens." if config.tie_word_embeddings else "lm_head."
    model.lm_head.load_state_dict(_tensors(folder, head), assign=True)
    for index, layer in enumerate(model.model.layers):
        _stream(layer, folder, f"model.layers.{index}.")
    return model(input_ids=token_ids, use_cache=False).logits  # type: ignore[no-any-return]


def _stream(layer: nn.Module, folder: Path, prefix: str) -> None:
    """Give a layer its weights when it is called and take them away afterwards."""

    def load(module: nn.Module, *_: Any) -> None:
        module.load_state_dict(_tensors(folder, prefix), assign=True)

    def drop(module: nn.Module, *_: Any) -> None:
        module.to("meta")

    layer.register_forward_pre_hook(load)
    layer.register_forward_hook(drop)


def _tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with ``prefix``, without it, in fp32."""
    index = folder / INDEX_FILE
    files = {"model.safetensors"}
    if index.exists():
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {file for name, file in places.items() if name.startswith(prefix)}
    found = {}
    for file in sorted(files):
        with safe_open(folder / file, "pt") as tensors:
            for name in tensors.keys():
                if name.startswith(prefix):
                    found[name.removeprefix(prefix)] = tensors.get_tensor(name).float()
    return found
