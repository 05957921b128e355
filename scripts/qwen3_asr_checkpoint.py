"""A tiny random Qwen3-ASR, with the tokens and settings of a real one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import Qwen3ASRConfig

from scripts.family_checkpoints import tiny_tokenizer, write_checkpoint

NUM_MELS = 16
WINDOW_FRAMES = 200
CONTEXT = 512
TEXTS = (
    "The quick brown fox says that he heard the other one.",
    "Das Haus ist klein, und alt. language English system user assistant",
)
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
    "<asr_text>",
)
FIRST_SPECIAL = 300
VOCAB_SIZE = FIRST_SPECIAL + len(SPECIAL_TOKENS)
TOKENS = {name: FIRST_SPECIAL + place for place, name in enumerate(SPECIAL_TOKENS)}
PLACEHOLDER = TOKENS["<|audio_pad|>"]

CHAT_TEMPLATE = """\
{%- set context = namespace(text='') -%}
{%- set sounds = namespace(number=0) -%}
{%- for message in messages -%}
  {%- if message.role == 'system' and message.content is string -%}
    {%- set context.text = context.text + message.content -%}
  {%- elif message.content is not string -%}
    {%- for part in message.content -%}
      {%- if part.type == 'audio' -%}
        {%- set sounds.number = sounds.number + 1 -%}
      {%- elif message.role == 'system' -%}
        {%- set context.text = context.text + part.text -%}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endfor -%}
{{- '<|im_start|>system\\n' + context.text + '<|im_end|>\\n<|im_start|>user\\n' -}}
{{- '<|audio_start|><|audio_pad|><|audio_end|>' * sounds.number + '<|im_end|>\\n' -}}
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if message.content is string -%}
      {{- message.content -}}
    {%- else -%}
      {%- for part in message.content -%}{{- part.text -}}{%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""Like Qwen3-ASR's template it shows the system's text, one place for each sound, and answers."""


def qwen3_asr_config(audio: dict[str, Any] | None = None, **text: Any) -> Qwen3ASRConfig:
    """Return the config of the tiny model, with changes of its two parts."""
    width = text.get("hidden_size", 32)
    audio_sizes = {
        "model_type": "qwen3_asr_encoder",
        "num_mel_bins": NUM_MELS,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "d_model": 32,
        "n_window": 50,
        "n_window_infer": WINDOW_FRAMES,
        "output_dim": width,
        "downsample_hidden_size": 12,
    }
    text_sizes = {
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": width,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
    }
    return Qwen3ASRConfig(
        audio_config={**audio_sizes, **(audio or {})},
        text_config={**text_sizes, **text},
        audio_token_id=PLACEHOLDER,
        pad_token_id=TOKENS["<|endoftext|>"],
        eos_token_id=[TOKENS["<|endoftext|>"], TOKENS["<|im_end|>"]],
    )


def write_qwen3_asr(
    folder: Path, *, deviation: float = 0.2, audio: dict[str, Any] | None = None, **text: Any
) -> Path:
    """Write the checkpoint; return its folder.

    Args:
        folder: folder to create.
        deviation: standard deviation of its matrices.
        audio: changes of the encoder's config.
        text: changes of the decoder's config.
    """
    config = qwen3_asr_config(audio, **text)
    write_checkpoint(folder, config, deviation)
    features = {
        "feature_extractor_type": "Qwen3ASRFeatureExtractor",
        "feature_size": config.audio_config.num_mel_bins,
        "sampling_rate": 16_000,
        "hop_length": 160,
        "n_fft": 400,
        "n_window": 50,
        "min_length": 8_000,
    }
    write_speech_files(
        folder,
        SPECIAL_TOKENS,
        end="<|im_end|>",
        end_ids=[TOKENS["<|endoftext|>"], TOKENS["<|im_end|>"]],
        features=features,
        template=CHAT_TEMPLATE,
    )
    return folder


def write_speech_files(
    folder: Path,
    special_tokens: Sequence[str],
    *,
    end: str,
    end_ids: Sequence[int],
    features: Mapping[str, Any],
    template: str,
) -> None:
    """Write a tokenizer, settings and a chat template next to the weights of a tiny model."""
    tokenizer = tiny_tokenizer(TEXTS)
    spare = FIRST_SPECIAL - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<|spare_{number}|>" for number in range(spare)])
    tokenizer.add_special_tokens(list(special_tokens))
    tokenizer.save(str(folder / "tokenizer.json"))
    pad = "<|endoftext|>" if "<|endoftext|>" in special_tokens else end
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": pad,
        "additional_special_tokens": list(special_tokens),
    }
    generation = {
        "eos_token_id": list(end_ids),
        "pad_token_id": FIRST_SPECIAL + list(special_tokens).index(pad),
    }
    contents = {
        "tokenizer_config.json": settings,
        "preprocessor_config.json": features,
        "generation_config.json": generation,
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
