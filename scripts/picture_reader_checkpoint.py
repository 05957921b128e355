"""Tiny random encoder-decoders that read pictures, with the files of TrOCR, manga-ocr and Donut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import (
    BertConfig,
    DeiTConfig,
    DonutSwinConfig,
    MBartConfig,
    PreTrainedConfig,
    TrOCRConfig,
    VisionEncoderDecoderConfig,
    ViTConfig,
)

from scripts.family_checkpoints import VOCAB_SIZE, write_checkpoint

CONTEXT = 96
BEGIN, END, PADDING = 2, 1, 0
_TOKENS: dict[str, Any] = {"pad_token_id": PADDING, "eos_token_id": END, "bos_token_id": BEGIN}
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
_DECODER: dict[str, Any] = {
    **_TOKENS,
    "vocab_size": VOCAB_SIZE,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": CONTEXT,
    "is_decoder": True,
    "add_cross_attention": True,
    "scale_embedding": True,
    "tie_word_embeddings": False,
}
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_CHARACTERS = [*_SPECIAL, *map(chr, range(0x3041, 0x3041 + 80)), *map(chr, range(0x4E00, 0x4F00))]
_CHARACTERS = _CHARACTERS[:VOCAB_SIZE]
_PROCESSOR: dict[str, Any] = {
    "do_resize": True,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
}


def _trocr(encoder: PreTrainedConfig, *, is_learned: bool) -> VisionEncoderDecoderConfig:
    decoder = TrOCRConfig(
        **_DECODER,
        cross_attention_hidden_size=encoder.hidden_size,
        use_learned_position_embeddings=is_learned,
        layernorm_embedding=is_learned,
    )
    return VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)


def _manga() -> VisionEncoderDecoderConfig:
    sizes = {**_SIZES, "num_attention_heads": 4, "max_position_embeddings": CONTEXT}
    decoder = BertConfig(
        **{**_TOKENS, **sizes, "vocab_size": VOCAB_SIZE}, is_decoder=True, add_cross_attention=True
    )
    return VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(**_SIZES), decoder)


def _donut() -> VisionEncoderDecoderConfig:
    encoder = DonutSwinConfig(
        image_size=[64, 48], patch_size=4, embed_dim=12, depths=[1, 1], num_heads=[2, 2],
        window_size=4,
    )  # fmt: skip
    decoder = MBartConfig(**_DECODER, is_encoder_decoder=False, add_final_layer_norm=True)
    return VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)


KINDS: dict[str, Callable[[], VisionEncoderDecoderConfig]] = {
    "trocr": lambda: _trocr(ViTConfig(**_SIZES), is_learned=True),
    "trocr-sinusoids": lambda: _trocr(DeiTConfig(**_SIZES), is_learned=False),
    "manga-ocr": _manga,
    "donut": _donut,
}


def write_picture_reader(
    folder: Path, kind: str = "trocr", num_layers: int = 2, **changes: Any
) -> Path:
    """Write a checkpoint of one of ``KINDS``; return its folder.

    num_layers: number of the decoder's layers.
    changes: changes of generation_config.json.
    """
    config = KINDS[kind]()
    config.decoder.num_hidden_layers = num_layers
    config.decoder_start_token_id, config.pad_token_id = BEGIN, PADDING
    write_checkpoint(folder, config, 0.2)
    sides = dict(zip(("height", "width"), _sides(config.encoder.image_size), strict=True))
    processor = {**_PROCESSOR, "image_processor_type": "ViTImageProcessor", "size": sides}
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|begin|>",
    }
    generation = {**_TOKENS, "decoder_start_token_id": BEGIN, "max_length": 24}
    if kind == "donut":
        page = {"do_thumbnail": True, "do_pad": True, "do_align_long_axis": False}
        processor |= {"image_processor_type": "DonutImageProcessor", **page}
    if kind == "manga-ocr":
        generation["eos_token_id"] = _CHARACTERS.index("[SEP]")
        tokenizer = {
            "tokenizer_class": "BertJapaneseTokenizer",
            "subword_tokenizer_type": "character",
            "word_tokenizer_type": "mecab",
        }
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.txt").write_text("\n".join(_CHARACTERS) + "\n", encoding="utf-8")
    contents = {
        "tokenizer_config.json": tokenizer,
        "generation_config.json": {**generation, **changes},
        "preprocessor_config.json": processor,
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def _sides(size: int | list[int]) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return height, width
