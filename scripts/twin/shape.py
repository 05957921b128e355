"""Which shape a twin of a wanted number of parameters has."""

from __future__ import annotations

import math
from dataclasses import dataclass

import click
import torch
from transformers import LlamaConfig, LlamaForCausalLM

MLP_MULTIPLE = 32  # of the intermediate size: the block of 4-bit weights
MAX_HEAD_DIM = 128
MAX_EXCESS = 0.1  # parameters beyond what was asked for, where the target leaves no choice
HEAD_WIDENING = 4  # its square root is exact, so widened queries stay exact in half precision


@dataclass(frozen=True)
class Step:
    """From ``num_params`` on, twins have this hidden size (or a few heads more) and depth."""

    num_params: int
    hidden_size: int
    num_layers: int


# Shapes of models that people run: Qwen3-0.6B has 1024, Llama-3.2 2048 x 16 and 3072 x 28,
# Llama-3.1-8B 4096 x 32. The intermediate size makes up the rest of the parameters.
LADDER = (
    Step(0, 320, 7),
    Step(30_000_000, 512, 8),
    Step(75_000_000, 1024, 12),
    Step(300_000_000, 1280, 24),
    Step(750_000_000, 2048, 16),
    Step(2_000_000_000, 3072, 28),
    Step(5_000_000_000, 4096, 32),
)


def params_from_text(text: str) -> int:
    """Return the number that ``text`` means: 150M, 1.5B or plain digits."""
    unit = {"M": 10**6, "B": 10**9}.get(text[-1:].upper())
    try:
        number = float(text[:-1]) * unit if unit else int(text)
    except (ValueError, OverflowError):
        number = 0
    if not 0 < number < 10**12:
        raise click.BadParameter(f"{text!r} is no number of parameters; give one such as 150M")
    return round(number)


def twin_config(source: LlamaConfig, num_params: int, context: int | None = None) -> LlamaConfig:
    """Return the config of a twin of ``source`` with about ``num_params`` parameters.

    Raises:
        click.UsageError: the source is too large for that, or no plain Llama.
    """
    _check_source(source)
    step = [step for step in LADDER if step.num_params <= num_params][-1]
    head_dim = _head_dim(source, step.hidden_size)
    group = source.num_attention_heads // source.num_key_value_heads  # heads per key and value
    num_kv_heads = max(source.num_key_value_heads, math.ceil(step.hidden_size / (group * head_dim)))
    hidden_size = group * num_kv_heads * head_dim
    attention = 2 * (group + 1) * num_kv_heads * head_dim  # weights per hidden dimension
    num_embeddings = source.vocab_size * (1 if source.tie_word_embeddings else 2)
    rest = num_params / hidden_size - num_embeddings - step.num_layers * attention
    num_blocks = round(rest / (3 * step.num_layers * MLP_MULTIPLE))
    config = LlamaConfig(
        **{
            **source.to_dict(),
            "hidden_size": hidden_size,
            "num_hidden_layers": step.num_layers,
            "intermediate_size": max(num_blocks * MLP_MULTIPLE, source.intermediate_size),
            "num_attention_heads": num_kv_heads * group,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "rms_norm_eps": source.rms_norm_eps * source.hidden_size / hidden_size,
            "max_position_embeddings": context or source.max_position_embeddings,
            "dtype": "float32",  # the norms' type: loading in half precision would round them
        }
    )
    _check_room(source, config, num_params)
    return config


def _head_dim(source: LlamaConfig, hidden_size: int) -> int:
    wide = source.head_dim * HEAD_WIDENING
    fits = wide <= MAX_HEAD_DIM and source.num_attention_heads * wide <= hidden_size
    return int(wide if fits else source.head_dim)


def _check_source(source: LlamaConfig) -> None:
    rope_type = source.rope_parameters["rope_type"]
    wanted = {
        "model_type": (source.model_type, "llama"),
        "rope_type": (rope_type, "default"),
        "attention_bias": (source.attention_bias, False),
        "mlp_bias": (source.mlp_bias, False),
    }
    for name, (value, expected) in wanted.items():
        if value != expected:
            raise click.UsageError(
                f"the target's {name} is {value!r}, a twin needs {expected!r}; give another pair"
            )


def _check_room(source: LlamaConfig, config: LlamaConfig, num_params: int) -> None:
    for name in ("hidden_size", "num_hidden_layers"):
        least, found = getattr(source, name), getattr(config, name)
        if found < least:
            raise click.UsageError(
                f"a twin of {num_params:,} parameters would have {name} {found}, the target has "
                f"{least}; ask for more parameters"
            )
    smallest = num_params_of(config)
    if smallest > num_params * (1 + MAX_EXCESS):
        raise click.UsageError(
            f"a twin of {num_params:,} parameters has no room for the target's MLPs; ask for "
            f"{smallest:,} or more"
        )


def num_params_of(config: LlamaConfig) -> int:
    """Return the number of parameters; tied ones count once."""
    with torch.device("meta"):
        return int(LlamaForCausalLM(config).num_parameters())
