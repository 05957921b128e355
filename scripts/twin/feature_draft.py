"""Feature draft of a trained target, converted into a feature draft of its twin.

A hidden state of the twin is the trained one followed by zeros (``weights``). So the projection
gets columns of zeros for the added dimensions, and the weight of a hidden state's norm is scaled,
because its mean is over more dimensions. Two differences are not compensated: the norm's eps, which
the config has only once for all norms, and the constant for added tokens, whose square is at most
half the eps of the target's norms. Added tokens are embedded as zeros and never proposed.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import click
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

_LAYER_CONFIG = "transformer_layer_config"
_NEEDED = ("embed_tokens.weight", "fc.weight", "lm_head.weight")


def widen_feature_draft(source: Path, target: LlamaConfig, output: Path) -> None:
    """Convert the draft at ``source`` for a twin of its target; write it to ``output``.

    target: config of the twin.

    Raises:
        click.UsageError: the draft does not have the form that dsbd-distill writes.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    weights = load_file(source / "model.safetensors")
    if _LAYER_CONFIG not in config or not {*_NEEDED} <= {*weights}:
        raise click.UsageError(
            f"the feature draft at {source} is not one of dsbd-distill's, with embedding and head "
            "of its own; give one of those"
        )
    old, new = config["target_hidden_size"], target.hidden_size
    layer = config[_LAYER_CONFIG]
    layer["vocab_size"] = target.vocab_size
    layer["max_position_embeddings"] = target.max_position_embeddings
    config["target_hidden_size"] = new
    for name, value in weights.items():
        match name.split(".")[0]:
            case "embed_tokens":
                weights[name] = _filled(value, (target.vocab_size, value.shape[1]))
            case "fc":
                parts = value.split(old, dim=1)
                weights[name] = torch.cat([_filled(part, (len(part), new)) for part in parts], 1)
            case "fc_norm":
                weights[name] = _filled(value, (new,)) * math.sqrt(old / new)
    if "d2t" not in weights and target.vocab_size > config["draft_vocab_size"]:
        weights["d2t"] = torch.zeros(config["draft_vocab_size"], dtype=torch.int64)
    shutil.copytree(source, output)
    text = json.dumps(config, indent=2) + "\n"
    (output / "config.json").write_text(text, encoding="utf-8")
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})


def _filled(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return ``tensor`` padded with zeros to ``shape``."""
    result = tensor.new_zeros(shape)
    result[tuple(slice(size) for size in tensor.shape)] = tensor
    return result
