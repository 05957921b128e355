"""Pictures of tiny models, prompts with them, and transformers' results of the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from dsbd_ort import Pipeline
from dsbd_ort.decoding import DecodingRequest
from dsbd_ort.media.pictures import resized
from dsbd_ort.requests.prompts import RequestInputs
from dsbd_runtime.media.given_grid import mrope_positions
from dsbd_runtime.media.given_picture import GivenPicture
from dsbd_runtime.parts.given.given_prompt import GivenPiece, GivenPrompt
from scripts.picture_checkpoints import PICTURE_MODELS, token_ids_of, write_picture_model
from scripts.shared_captures import SharedCaptures
from tests.exports import export_quietly
from tests.given.forests import Searched, searched
from tests.given.sounds import ENDS
from tests.made_once import made_once

Pixels = NDArray[np.uint8]
IN_CI = ("granite_docling", "paddleocr_vl")
"""Kinds of which CI exports a model: tiles with levels, a grid with axes of positions."""

QUESTIONS = ("User: what does ", " show?", " or this one?", " Assistant:")


def picture(height: int, width: int, seed: int = 0) -> Pixels:
    """Return noise with a dark line of text at every fourth of its height."""
    pixels = np.random.default_rng(seed).integers(100, 256, (height, width, 3), dtype=np.uint8)
    pixels[:: max(height // 4, 1)] //= 4
    return pixels


def picture_bundle(captures: SharedCaptures, factory: pytest.TempPathFactory, name: str) -> Path:
    """Return the folder of a kind, with "target" and "bundle", made once for a run."""
    return made_once(factory, f"pictures-{name}", partial(export_kind, captures, name))


def export_kind(
    captures: SharedCaptures, name: str, folder: Path, *, has_draft: bool = False
) -> Path:
    """Fill a folder with "target", a "draft" of one layer that reads the same, and "bundle"."""
    target, draft = write_picture_model(name, folder / "target"), None
    if has_draft:
        draft = write_picture_model(name, folder / "draft", num_hidden_layers=1)
    export_quietly(captures, folder / "bundle", target, draft)
    return folder


@dataclass
class Shown:
    """A prompt with pictures, and what transformers' forward reads of it."""

    inputs: RequestInputs
    arguments: dict[str, torch.Tensor]  # without those of tokens

    @property
    def token_ids(self) -> list[int]:
        return list(self.inputs.prompt_ids)


class PictureModel:
    """A checkpoint in transformers, and its pictures by transformers' own processor."""

    def __init__(self, name: str, folder: Path) -> None:
        loaded = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self.model: Any = loaded.eval()
        self.placeholder = token_ids_of(name)[PICTURE_MODELS[name].placeholder]
        self._processor = AutoImageProcessor.from_pretrained(folder)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._spelled = PICTURE_MODELS[name].placeholder

    def arguments(self, pictures: Sequence[Pixels]) -> dict[str, torch.Tensor]:
        """Return what transformers' processor makes of the pictures of one prompt."""
        images = [Image.fromarray(each) for each in pictures]
        names = self._processor.model_input_names
        nested = images if "image_grid_thw" in names else [images]
        found = self._processor(nested, return_tensors="pt")
        return {name: found[name] for name in names}

    def shown(self, entry: GivenPicture, pictures: Sequence[Pixels], seed: int = 0) -> Shown:
        """Return a prompt with these pictures, by the bundle's front end."""
        sizes = [each.shape[:2] for each in pictures]
        texts = [entry.expansion(size, self._spelled) for size in sizes]
        spoken = QUESTIONS[1:] if texts else QUESTIONS[-1:]
        text = f"{QUESTIONS[0]}{seed}" + "".join(
            f"{shown}{question}" for shown, question in zip([*texts, ""], spoken, strict=False)
        )
        ids = self._tokenizer.encode(text).ids
        if not pictures:
            return Shown(RequestInputs(ids), {})
        grids = [entry.grid(size) for size in sizes]
        places = (np.array(ids) == self.placeholder).nonzero()[0]
        positions = None
        if grids[0] is not None:
            positions = mrope_positions(ids[: places[-1] + 1], self.placeholder, grids)
        pieces = [piece for each in pictures for piece in pieces_of(entry, each)]
        source = GivenPrompt(places, pieces, positions)
        return Shown(RequestInputs(ids, source), self.arguments(pictures))

    @torch.no_grad()
    def rows(self, pictures: Sequence[Pixels]) -> NDArray[np.float32]:
        """Return the given rows, levels after embeddings."""
        found = self.model.get_image_features(**self.arguments(pictures), return_dict=True)
        parts = found.pooler_output, *(getattr(found, "deepstack_features", None) or [])
        return np.asarray(torch.cat([torch.cat(list(each)) for each in parts], dim=1).numpy())

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int], shown: Shown) -> NDArray[np.float32]:
        """Return the logits of every token of a path that begins with a prompt."""
        ids = torch.tensor([token_ids])
        found = self.model(input_ids=ids, **self._of_tokens(ids, shown), **shown.arguments)
        return np.asarray(found.logits[0].numpy())

    def searched(self, shown: Shown, beams: int, length: int) -> Searched:
        ids = torch.tensor([shown.token_ids])
        given = {"input_ids": ids, **self._of_tokens(ids, shown), **shown.arguments}
        return searched(self.model, given, beams, length, ENDS)

    def _of_tokens(self, ids: torch.Tensor, shown: Shown) -> dict[str, torch.Tensor]:
        """Return which tokens of a prompt are pictures', for kinds with several axes."""
        if not hasattr(self.model.model, "rope_deltas"):
            return {}
        self.model.model.rope_deltas = None  # of the call before
        is_picture = (ids == self.placeholder).int()
        is_picture[:, len(shown.token_ids) :] = 0
        return {"mm_token_type_ids": is_picture} if shown.arguments else {}


def pieces_of(entry: GivenPicture, pixels: Pixels) -> list[GivenPiece]:
    found: list[GivenPiece] = entry.pieces(entry.resized(pixels, resized))  # type: ignore[attr-defined]
    return found


def entry_of(pipe: Pipeline) -> GivenPicture:
    given = pipe.bundle.manifest.target.given
    assert given is not None and isinstance(given.medium, GivenPicture)
    return given.medium


def request_of(pipe: Pipeline, shown: Shown, **options: Any) -> DecodingRequest:
    known = {"max_new_tokens": 14, "eos_token_id": ENDS, "seed": 1, **options}
    return pipe.request_of(shown.inputs, known)
