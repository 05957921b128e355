"""Conversations with pictures, and transformers' prompts and results by its own processors."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    ProcessorMixin,
)
from transformers.models.auto.video_processing_auto import AutoVideoProcessor
from transformers.models.smolvlm import processing_smolvlm

from scripts.picture_checkpoints import token_ids_of
from tests.given.forests import Searched, searched

QUESTION = "What does the picture show?"


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an image whose values differ everywhere."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def asked(*pictures: object, text: str = QUESTION) -> list[dict[str, Any]]:
    """Return a conversation: a user's pictures, and a question."""
    parts: list[dict[str, Any]] = [{"type": "image", "image": each} for each in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def asked_by_url(url: str) -> list[dict[str, Any]]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [part, {"type": "text", "text": QUESTION}]}]


@dataclass
class PictureReference:
    """A checkpoint in transformers, with its own processor."""

    model: Any
    processor: Any
    ends: list[int]

    @classmethod
    def of(cls, name: str, folder: Path) -> PictureReference:
        """Open a checkpoint; readers of videos need torchvision and are left out."""
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        ids = token_ids_of(name)
        ends = [ids["<|endoftext|>"], ids["<|end_of_text|>"]]
        with (
            mock.patch.object(AutoVideoProcessor, "from_pretrained", return_value=None),
            mock.patch.object(ProcessorMixin, "check_argument_for_proper_class"),
            mock.patch.object(processing_smolvlm, "num2words", str),
        ):
            processor = AutoProcessor.from_pretrained(folder)
        processor.video_processor = SimpleNamespace(num_frames=1, fps=1)  # SmolVLM asks for them
        return cls(model, processor, ends)

    def inputs(self, messages: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        found = self.processor.apply_chat_template(
            messages,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        return dict(found)

    def searched(self, inputs: dict[str, torch.Tensor], beams: int, length: int) -> Searched:
        return searched(self.model, inputs, beams, length, self.ends)
