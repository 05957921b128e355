"""Prompts of a tiny Qwen3-ASR by transformers."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scripts.qwen3_asr_checkpoint import CHAT_TEMPLATE


def processor_of(folder: Path, num_mels: int) -> Any:
    """Return transformers' processor of a tiny checkpoint in a folder."""
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen3ASRFeatureExtractor,
        Qwen3ASRProcessor,
    )

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        pad_token="<|endoftext|>",
        extra_special_tokens={
            "audio_token": "<|audio_pad|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
    )
    extractor = Qwen3ASRFeatureExtractor(feature_size=num_mels)
    return Qwen3ASRProcessor(extractor, tokenizer, chat_template=CHAT_TEMPLATE)


def transformers_inputs(
    processor: Any, samples: NDArray[np.float32], language: str | None, context: str | None
) -> tuple[list[int], NDArray[np.float32]]:
    """Return token ids and valid frames, (num_mels, frames), of a request to transcribe."""
    found = processor.apply_transcription_request(samples, language=language, prompt=context)
    num_frames = int(found["input_features_mask"][0].sum())
    return found["input_ids"][0].tolist(), found["input_features"][0, :, :num_frames].numpy()
