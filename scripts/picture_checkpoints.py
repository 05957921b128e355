"""Tiny random models that read pictures, with the tokens and processor files of real ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers

from scripts.family_checkpoints import tiny_tokenizer, write_checkpoint

CONTEXT = 1024
FIRST_SPECIAL = 300
_TEXTS = (
    "The quick brown fox says that it sees the other one on this page.",
    "What does the picture show? User: Assistant: system user assistant OCR:",
)
_ENDS = ("<|endoftext|>", "<|end_of_text|>")
_MOST_SIDE = 6  # maximum tiles of a side for which there are tokens
_TILE_TOKENS = (
    *("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{r}_col_{c}>" for r in range(1, _MOST_SIDE + 1) for c in range(1, _MOST_SIDE + 1)),
)
_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
_TILES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
_NORMAL: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 1 / 255,
}
_SPLIT = {
    **_NORMAL,
    "do_image_splitting": True,
    "do_pad": True,
    "max_image_size": {"longest_edge": 32},
    "resample": 1,
    "size": {"longest_edge": 128},
}


def _rope(*section: int, **more: Any) -> dict[str, Any]:
    """Return rotary positions on three axes: frequencies for time, height and width."""
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section)}
    return {"head_dim": 16, "rope_parameters": {**parameters, **more}}


@dataclass(frozen=True, kw_only=True)
class PictureModel:
    """One row: a kind of model, its config, and its processor files.

    Attributes:
        config: name of the config class in transformers.
        vision, text, whole: arguments of the configs of its two parts, and of the whole.
        tokens: special tokens.
        placeholder: token in place of a given row.
        shown: text that a chat template writes for a picture.
        pictures: content of preprocessor_config.json.
        processor: content of processor_config.json.
        names: special tokens by the names by which a processor requests them.
    """

    config: str
    vision: dict[str, Any]
    text: dict[str, Any]
    tokens: tuple[str, ...]
    placeholder: str
    shown: str
    pictures: dict[str, Any]
    processor: dict[str, Any]
    whole: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


def _split_model(name: str, processor: str) -> PictureModel:
    return PictureModel(
        config=f"{name}Config",
        vision=_TILES,
        text={**_TEXT, "model_type": "llama"},
        whole={"scale_factor": 2},
        tokens=_TILE_TOKENS,
        placeholder="<image>",
        shown="<image>",
        pictures={**_SPLIT, "image_processor_type": f"{name}ImageProcessor"},
        processor={"image_seq_len": 4, "processor_class": processor},
    )


PICTURE_MODELS: dict[str, PictureModel] = {
    "idefics3": _split_model("Idefics3", "Idefics3Processor"),
    "smolvlm": _split_model("SmolVLM", "SmolVLMProcessor"),
    "granite_docling": PictureModel(
        config="GraniteDoclingConfig",
        vision={
            **_TILES,
            "num_hidden_layers": 3,
            "out_hidden_size": 32,
            "scale_factor": 2,
            "deepstack_visual_indexes": [0, 1],
            "use_fine_route": True,
        },
        text={
            **_TEXT,
            "model_type": "granite_docling_text",
            "num_hidden_layers": 3,
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 0.5,
        },
        whole={"density_router_hidden_size": 8},
        tokens=_TILE_TOKENS,
        placeholder="<image>",
        shown="<image>",
        pictures={
            **_NORMAL,
            "crop_to_patches": True,
            "image_processor_type": "GraniteDoclingImageProcessor",
            "max_patches": 6,
            "min_patches": 1,
            "resample": 3,
            "size": {"height": 32, "width": 32},
        },
        processor={"image_seq_len": 4, "processor_class": "GraniteDoclingProcessor"},
    ),
    "paddleocr_vl": PictureModel(
        config="PaddleOCRVLConfig",
        vision={
            **_TILES,
            "image_size": 56,
            "patch_size": 14,
            "spatial_merge_size": 2,
        },
        text={**_TEXT, "model_type": "paddleocr_vl_text", **_rope(2, 3, 3)},
        tokens=("<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>", "<|video_pad|>"),
        placeholder="<|IMAGE_PLACEHOLDER|>",
        shown="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        pictures={
            **_NORMAL,
            "image_processor_type": "PaddleOCRVLImageProcessor",
            "max_pixels": 28 * 28 * 24,
            "merge_size": 2,
            "min_pixels": 28 * 28 * 4,
            "patch_size": 14,
            "resample": 3,
            "temporal_patch_size": 1,
        },
        processor={"processor_class": "PaddleOCRVLProcessor"},
        names={"image_token": "<|IMAGE_PLACEHOLDER|>"},
    ),
    "qwen3_vl": PictureModel(
        config="Qwen3VLConfig",
        vision={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 1],
        },
        text={
            **_TEXT,
            "model_type": "qwen3_vl_text",
            "num_hidden_layers": 3,
            **_rope(4, 2, 2, mrope_interleaved=True),
        },
        tokens=("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"),
        placeholder="<|image_pad|>",
        shown="<|vision_start|><|image_pad|><|vision_end|>",
        pictures={
            **_NORMAL,
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "merge_size": 2,
            "patch_size": 8,
            "resample": 3,
            "size": {"longest_edge": 16 * 16 * 24, "shortest_edge": 16 * 16 * 4},
            "temporal_patch_size": 2,
        },
        processor={"processor_class": "Qwen3VLProcessor"},
    ),
}

CHAT_TEMPLATE = """\
{%%- for message in messages -%%}
  {{- message.role + ': ' -}}
  {%%- if message.content is string -%%}
    {{- message.content -}}
  {%%- else -%%}
    {%%- for part in message.content -%%}
      {{- %s if part.type == 'image' else part.text -}}
    {%%- endfor -%%}
  {%%- endif -%%}
  {{- '<|end_of_text|>\\n' -}}
{%%- endfor -%%}
{%%- if add_generation_prompt -%%}{{- 'Assistant: ' -}}{%%- endif -%%}
"""


def token_ids_of(name: str) -> dict[str, int]:
    """Return the special tokens of a kind by their spelling."""
    tokens = (*_ENDS, *PICTURE_MODELS[name].tokens)
    return {token: FIRST_SPECIAL + place for place, token in enumerate(tokens)}


def write_picture_model(
    name: str,
    folder: Path,
    *,
    vision: dict[str, Any] | None = None,
    pictures: dict[str, Any] | None = None,
    deviation: float = 0.2,
    **text: Any,
) -> Path:
    """Write the checkpoint of a kind; return its folder.

    Args:
        name: a key of PICTURE_MODELS.
        folder: folder to create.
        vision: changes of the encoder's config.
        pictures: changes of preprocessor_config.json.
        deviation: standard deviation of its matrices.
        text: changes of the decoder's config.
    """
    kind, ids = PICTURE_MODELS[name], token_ids_of(name)
    ends = {"bos_token_id": None, "eos_token_id": ids[_ENDS[0]], "pad_token_id": ids[_ENDS[0]]}
    make_config: Callable[..., Any] = getattr(transformers, kind.config)
    config = make_config(
        vision_config={**kind.vision, **(vision or {})},
        text_config={"vocab_size": max(ids.values()) + 1, **ends, **kind.text, **text},
        image_token_id=ids[kind.placeholder],
        **kind.whole,
        tie_word_embeddings=False,
        **({"video_token_id": ids["<|video_pad|>"]} if "<|video_pad|>" in ids else {}),
    )
    write_checkpoint(folder, config, deviation)
    tokenizer = tiny_tokenizer(_TEXTS)
    spare = FIRST_SPECIAL - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<|spare_{number}|>" for number in range(spare)])
    tokenizer.add_special_tokens(list(ids))
    tokenizer.save(str(folder / "tokenizer.json"))
    contents = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": _ENDS[0],
            "pad_token": _ENDS[0],
            "extra_special_tokens": kind.names,
            **kind.names,
        },
        "preprocessor_config.json": {**kind.pictures, **(pictures or {})},
        "processor_config.json": kind.processor,
        "generation_config.json": {
            "eos_token_id": [ids[end] for end in _ENDS],
            "pad_token_id": ids[_ENDS[0]],
        },
    }
    for file, content in contents.items():
        (folder / file).write_text(json.dumps(content), encoding="utf-8")
    template = CHAT_TEMPLATE % repr(kind.shown)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
