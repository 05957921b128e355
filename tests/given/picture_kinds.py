"""Kinds of models that read pictures: language models, and encoder-decoders of one picture."""

from __future__ import annotations

from collections.abc import Sequence
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
    DonutImageProcessorPil,
    ProcessorMixin,
    VisionEncoderDecoderModel,
    ViTImageProcessorPil,
)
from transformers.models.auto.video_processing_auto import AutoVideoProcessor
from transformers.models.smolvlm import processing_smolvlm

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from dsbd_ort.requests.prompts import MediaPrompt, RequestInputs
from dsbd_runtime.parts.source.sources import Sources
from scripts.picture_checkpoints import write_picture_model
from scripts.picture_reader_checkpoint import BEGIN, write_picture_reader
from scripts.shared_captures import SharedCaptures
from tests.exports import export_quietly
from tests.given.checks import Example, Kind, Rows
from tests.given.pictures import asked, picture
from tests.picture_readers.pages import message, page


def conversations() -> list[list[dict[str, Any]]]:
    """Return conversations with two pictures each."""
    one, two = picture(90, 60), picture(40, 130, 1)
    first, again = asked(one, text="What does it say?"), asked(two)
    system = {"role": "system", "content": [{"type": "text", "text": "The quick fox"}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "the other page"}]}
    text = {"type": "text", "text": "The page shows"}
    between = [{"type": "image", "image": one}, text, {"type": "image", "image": two}, text]
    return [
        [system, *asked(one, two)],
        [*first, answer, *again],
        [{"role": "user", "content": between}],
    ]


class PictureKind(Kind):
    """A language model that reads pictures; a case has widths and heights, or a conversation."""

    shown = ((90, 40),), ((60, 150),), ((64, 64), (120, 33))
    encoded = ((8, 8),), *shown[:2], ((64, 200),), ((250, 33),), ((31, 31),)
    paths = shown
    read = *shown, (), 1  # the second conversation
    more = *encoded, *shown, 0, 2
    eight = *shown, ((8, 8),), shown[0], ((250, 33),), 0, ()

    def load(self, folder: Path) -> Any:
        """Open the checkpoint; readers of videos need torchvision and are left out."""
        with (
            mock.patch.object(AutoVideoProcessor, "from_pretrained", return_value=None),
            mock.patch.object(ProcessorMixin, "check_argument_for_proper_class"),
            mock.patch.object(processing_smolvlm, "num2words", str),
        ):
            self.processor = AutoProcessor.from_pretrained(folder)
        # SmolVLM asks for them
        self.processor.video_processor = SimpleNamespace(num_frames=1, fps=1)
        return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    def example(self, case: Any, seed: int = 0) -> Example:
        if isinstance(case, int):
            return self.of_messages(conversations()[case])
        pictures = [picture(*size, seed + number) for number, size in enumerate(case)]
        return self.of_messages(asked(*pictures))

    def asked(self, text: str) -> list[dict[str, Any]]:
        return asked(picture(90, 60), text=text)

    def of_messages(self, messages: Sequence[dict[str, Any]]) -> Example:
        media = self.pipe.media
        assert media is not None
        theirs = self.processor.apply_chat_template(
            messages,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        return Example(media.read(messages).inputs, dict(theirs))

    def prompts(self) -> list[Example]:
        sizes = [((90, 60),), ((33, 150),), ((8, 8),), 0, 1, 2]
        return [self.example(case, seed) for seed, case in enumerate(sizes)]

    @torch.no_grad()
    def rows(self, example: Example) -> Rows:
        """Return the given rows, levels after embeddings."""
        of_tokens = ("input_ids", "attention_mask", "mm_token_type_ids")
        pixels = {name: each for name, each in example.theirs.items() if name not in of_tokens}
        found = self.model.get_image_features(**pixels, return_dict=True)
        parts = found.pooler_output, *(getattr(found, "deepstack_features", None) or [])
        return np.asarray(torch.cat([torch.cat(list(each)) for each in parts], dim=1).numpy())

    def logits(self, token_ids: Sequence[int], example: Example) -> Rows:
        theirs = dict(example.theirs)
        if hasattr(self.model.model, "rope_deltas"):
            self.model.model.rope_deltas = None  # of the call before
        if (kinds := theirs.get("mm_token_type_ids")) is not None:  # of which tokens are pictures'
            kinds = kinds[:, : len(token_ids)]
            num_more = len(token_ids) - kinds.shape[1]
            theirs["mm_token_type_ids"] = torch.nn.functional.pad(kinds, (0, num_more))
        return super().logits(token_ids, Example(example.inputs, theirs))

    @staticmethod
    def export(
        captures: SharedCaptures, name: str, folder: Path, *, has_draft: bool = False
    ) -> Path:
        """Write the checkpoint; a draft of one layer reads the same."""
        target, draft = write_picture_model(name, folder / "target"), None
        if has_draft:
            draft = write_picture_model(name, folder / "draft", num_hidden_layers=1)
        return export_quietly(captures, folder / "bundle", target, draft)


PLAIN: dict[str, Any] = {"early_stopping": False, "length_penalty": 1.0, "no_repeat_ngram_size": 0}
PLAIN |= {"forced_eos_token_id": None}


class PictureReader(Kind):
    """An encoder-decoder that reads one picture; a case has its size, and a number to draw it by.

    The text of every prompt has begun.
    """

    encoded = paths = more = ((90, 40),), ((40, 90),), ((8, 8),), ((700, 500),)
    read = encoded[:2]
    eight = tuple(((90, 40), number) for number in (0, 1, 2, 3, 3, 4, 5, 6))
    options = their_options = PLAIN
    token_name = "decoder_input_ids"

    def load(self, folder: Path) -> Any:
        with quiet_libraries():
            model = VisionEncoderDecoderModel.from_pretrained(folder, dtype=torch.float32).eval()
            is_page = "donut" in model.config.encoder.model_type
            processor = DonutImageProcessorPil if is_page else ViTImageProcessorPil
            self.processor = processor.from_pretrained(folder)
        table = getattr(getattr(model.decoder, "model", None), "decoder", None)
        table = getattr(table, "embed_positions", None)
        if getattr(getattr(table, "weights", None), "is_meta", False):  # transformers leaves it so
            table.weights = table.get_embedding(*table.weights.shape, table.padding_idx)
        return model

    def pixels(self, image: Image.Image) -> torch.Tensor:
        found = self.processor(image, return_tensors="np")["pixel_values"]
        return torch.from_numpy(np.asarray(found, np.float32))

    def example(self, case: Any, seed: int = 0) -> Example:
        size, *number = case
        image = page(*(number or [seed]), size)
        return self.of_page(image, np.random.default_rng(3).integers(3, 280, 16))

    def of_page(self, image: Image.Image, begun: Sequence[int] | np.ndarray = ()) -> Example:
        """Return a page, and a text that has begun with tokens."""
        prompt = self.pipe.chat_prompt(message(image))
        assert isinstance(prompt, MediaPrompt) and list(prompt) == [BEGIN]
        ids = [BEGIN, *map(int, begun)]
        theirs = {"decoder_input_ids": torch.tensor([ids]), "pixel_values": self.pixels(image)}
        return Example(RequestInputs(ids, prompt.inputs.source), theirs)

    @torch.no_grad()
    def rows(self, example: Example) -> Rows:
        found = self.model.encoder(example.theirs["pixel_values"]).last_hidden_state
        return np.asarray(found.numpy())

    def own_rows(self, example: Example) -> Rows:
        with self.pipe.models.engines() as (engine, _):
            encoder = engine.part(Sources).encoder
            encoder.keep_hidden()
            return np.asarray(encoder.hidden_states(example.inputs.source).numpy())

    @staticmethod
    def export(captures: SharedCaptures, name: str, folder: Path) -> Path:
        """Write the checkpoint; a TrOCR also has a draft with its encoder."""
        changes: dict[str, Any] = {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0}
        changes |= {"forced_eos_token_id": 1} if name == "donut" else {"no_repeat_ngram_size": 3}
        target, draft = write_picture_reader(folder / "target", name, **changes), None
        if name == "trocr":
            draft = write_picture_reader(folder / "draft", name, num_layers=1, **changes)
            with quiet_libraries():
                models = [VisionEncoderDecoderModel.from_pretrained(f) for f in (target, draft)]
                models[1].encoder.load_state_dict(models[0].encoder.state_dict())
                models[1].save_pretrained(draft)
        return export_quietly(captures, folder / "bundle", target, draft)
