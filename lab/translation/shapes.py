"""Shapes of published translators, which the twins have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import M2M100Config, MarianConfig, PreTrainedConfig
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

NUM_POSITIONS = 512


def _marian_positions(width: int) -> Tensor:
    table: Tensor = MarianSinusoidalPositionalEmbedding(NUM_POSITIONS, width).create_weight()
    return table


def _m2m_100_positions(width: int) -> Tensor:
    first = 2  # behind the id of the padding
    table: Tensor = M2M100SinusoidalPositionalEmbedding.get_embedding(NUM_POSITIONS + first, width)
    return table[first:]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a published translator, and how its family computes.

    Attributes:
        like: the model, for the page.
        width: of the residual stream; ``middle`` of its MLPs.
        num_layers: of the encoder, and of the decoder.
        starts_from_zero: whether targets begin behind an embedding of zeros.
    """

    name: str
    like: str
    width: int
    num_layers: int
    middle: int
    num_heads: int
    vocab_size: int
    activation: str
    pre_norm: bool
    starts_from_zero: bool
    end_token: int
    unknown_token: int
    padding_token: int
    start_token: int
    begin_token: int | None  # that of texts, which no request has here
    position_table: Callable[[int], Tensor]
    new_config: Callable[..., PreTrainedConfig]

    def positions(self) -> Tensor:
        """Return what is added at every position, (positions, width) float32."""
        with torch.no_grad():
            return self.position_table(self.width).float()

    def config(self, num_layers: int, num_decoder_layers: int) -> PreTrainedConfig:
        """Return the config of a checkpoint of this shape with so many layers."""
        values: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "d_model": self.width,
            "encoder_layers": num_layers,
            "decoder_layers": num_decoder_layers,
            "encoder_attention_heads": self.num_heads,
            "decoder_attention_heads": self.num_heads,
            "encoder_ffn_dim": self.middle,
            "decoder_ffn_dim": self.middle,
            "activation_function": self.activation,
            "max_position_embeddings": NUM_POSITIONS,
            "scale_embedding": True,
            "tie_word_embeddings": True,
            "pad_token_id": self.padding_token,
            "eos_token_id": self.end_token,
            "decoder_start_token_id": self.start_token,
            "forced_eos_token_id": None,
        }
        return self.new_config(**values)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            name="opus-mt",
            like="Marian's opus-mt",
            width=512,
            num_layers=6,
            middle=2048,
            num_heads=8,
            vocab_size=58_101,
            activation="swish",
            pre_norm=False,
            starts_from_zero=True,
            end_token=0,
            unknown_token=1,
            padding_token=58_100,
            start_token=58_100,
            begin_token=None,
            position_table=_marian_positions,
            new_config=MarianConfig,
        ),
        Shape(
            name="nllb-600m",
            like="NLLB-200-distilled-600M",
            width=1024,
            num_layers=12,
            middle=4096,
            num_heads=16,
            vocab_size=256_206,
            activation="relu",
            pre_norm=True,
            starts_from_zero=False,
            end_token=2,
            unknown_token=3,
            padding_token=1,
            start_token=2,
            begin_token=0,
            position_table=_m2m_100_positions,
            new_config=M2M100Config,
        ),
    )
}
