"""Pictures, and transformers' results of tiny encoder-decoders that read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import (
    DonutImageProcessorPil,
    VisionEncoderDecoderModel,
    ViTImageProcessorPil,
)

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from scripts.picture_reader_checkpoint import BEGIN, write_picture_reader
from scripts.shared_captures import SharedCaptures
from tests.exports import export_quietly

ENDS = (42, 77, 120)


def page(seed: int = 0, size: tuple[int, int] = (90, 40)) -> Image.Image:
    """Return a picture of so many columns and rows: lines of ink on paper that is not white."""
    width, height = size
    rng = np.random.default_rng(seed)
    pixels = rng.integers(180, 256, (height, width, 3), dtype=np.uint8)
    is_ink = (np.arange(height)[:, None] % 8 < 3) & (rng.random((height, width)) < 0.5)
    pixels[is_ink] //= 4
    return Image.fromarray(pixels)


def message(picture: Any, text: str | None = None) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image", "image": picture}]
    if text is not None:
        parts.append({"type": "text", "text": text})
    return [{"role": "user", "content": parts}]


def export_reader(kind: str, captures: SharedCaptures, folder: Path, **changes: Any) -> Path:
    """Fill a folder with "target" and "bundle"; a TrOCR also has a "draft" with its encoder."""
    draft = None
    target = write_picture_reader(folder / "target", kind, **changes)
    if kind == "trocr":
        draft = write_picture_reader(folder / "draft", kind, num_layers=1, **changes)
        with quiet_libraries():
            models = [VisionEncoderDecoderModel.from_pretrained(each) for each in (target, draft)]
            models[1].encoder.load_state_dict(models[0].encoder.state_dict())
            models[1].save_pretrained(draft)
    export_quietly(captures, folder / "bundle", target, draft)
    return folder


@dataclass
class Reference:
    """The checkpoint in transformers."""

    model: Any
    processor: Any

    @classmethod
    def of(cls, folder: Path) -> Reference:
        with quiet_libraries():
            model = VisionEncoderDecoderModel.from_pretrained(folder, dtype=torch.float32).eval()
            is_page = "donut" in model.config.encoder.model_type
            processor = DonutImageProcessorPil if is_page else ViTImageProcessorPil
            made = processor.from_pretrained(folder)
        table = getattr(getattr(model.decoder, "model", None), "decoder", None)
        table = getattr(table, "embed_positions", None)
        if getattr(getattr(table, "weights", None), "is_meta", False):  # transformers leaves it so
            table.weights = table.get_embedding(*table.weights.shape, table.padding_idx)
        return cls(model, made)

    def pixels(self, picture: Image.Image) -> torch.Tensor:
        found = self.processor(picture, return_tensors="np")["pixel_values"]
        return torch.from_numpy(np.asarray(found, np.float32))

    @torch.no_grad()
    def hidden(self, picture: Image.Image) -> NDArray[np.float32]:
        found = self.model.encoder(self.pixels(picture)).last_hidden_state
        return np.asarray(found.numpy())

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int], picture: Image.Image) -> NDArray[np.float32]:
        """Return the logits of every token of a path."""
        ids = torch.tensor([list(token_ids)])
        found = self.model(pixel_values=self.pixels(picture), decoder_input_ids=ids)
        return np.asarray(found.logits[0].numpy())

    @torch.no_grad()
    def searched(
        self, picture: Image.Image, begin: Sequence[int] = (BEGIN,), **options: Any
    ) -> tuple[list[list[int]], list[float]]:
        """Return the new tokens of every sequence up to its end, and their scores."""
        with quiet_libraries():
            found = self.model.generate(
                pixel_values=self.pixels(picture),
                decoder_input_ids=torch.tensor([list(begin)]),
                return_dict_in_generate=True,
                output_scores=True,
                **options,
            )
        rows = found.sequences[:, len(begin) :].tolist()
        ends = options.get("eos_token_id", [1])
        cuts = [next((n + 1 for n, t in enumerate(row) if t in ends), len(row)) for row in rows]
        scores = getattr(found, "sequences_scores", None)
        of_rows = [] if scores is None else scores.tolist()
        return [row[:cut] for row, cut in zip(rows, cuts, strict=True)], of_rows
