"""Sounds of a tiny Qwen3-ASR, prompts with them, and transformers' results of the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen3ASRForConditionalGeneration

from dsbd_ort import Pipeline
from dsbd_ort.decoding import DecodingRequest
from dsbd_ort.requests.prompts import RequestInputs
from dsbd_runtime.parts.given.given_prompt import GivenPiece, GivenPrompt
from scripts.qwen3_asr_checkpoint import NUM_MELS, PLACEHOLDER
from scripts.shared_captures import SharedCaptures
from tests.exports import export_quietly
from tests.given.forests import Searched, searched

Features = NDArray[np.float32]
CHUNK = 100
LENGTHS = (1, 37, 100, 150, 237, 400, 613, 999)  # frames: parts of chunks, of windows, several
ENDS = (42, 77, 120)
SYSTEM = [5, 17, 201, 33, 8, 90]


def noise(num_frames: int, seed: int = 0, num_mels: int = NUM_MELS) -> Features:
    return np.random.default_rng(seed).normal(size=(num_mels, num_frames)).astype(np.float32)


def prompt_of(num_sounds: int, seed: int = 0) -> list[int]:
    """Return a system turn, sounds, and four more tokens after each."""
    later = np.random.default_rng(seed).integers(2, 280, (num_sounds, 4)).tolist()
    return [*SYSTEM, *(token for four in later for token in (PLACEHOLDER, *four))]


@dataclass
class Reference:
    """The checkpoint in transformers."""

    model: Any

    @classmethod
    def of(cls, folder: Path) -> Reference:
        return cls(Qwen3ASRForConditionalGeneration.from_pretrained(folder, dtype=torch.float32))

    @torch.no_grad()
    def rows(self, features: Features) -> NDArray[np.float32]:
        """Return the encoder's rows of a sound."""
        found = self.model.get_audio_features(**read(features), return_dict=True)
        return np.asarray(found.pooler_output.numpy())

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int], sounds: Sequence[Features]) -> NDArray[np.float32]:
        """Return the logits of every token of a path, of expanded tokens."""
        more = read(*sounds) if sounds else {}
        return np.asarray(self.model(input_ids=torch.tensor([token_ids]), **more).logits[0].numpy())

    def searched(
        self, inputs: RequestInputs, sounds: Sequence[Features], beams: int, length: int
    ) -> Searched:
        ids = torch.tensor([inputs.prompt_ids])
        more = read(*sounds) if sounds else {}
        return searched(self.model, {"input_ids": ids, **more}, beams, length, ENDS)


def read(*sounds: Features) -> dict[str, torch.Tensor]:
    """Return what transformers' forward reads of sounds: padded alike, with a mask."""
    longest = max(sound.shape[1] for sound in sounds)
    width = -(-longest // CHUNK) * CHUNK
    padded = [np.pad(sound, ((0, 0), (0, width - sound.shape[1]))) for sound in sounds]
    mask = [np.arange(width) < sound.shape[1] for sound in sounds]
    return {
        "input_features": torch.from_numpy(np.stack(padded)),
        "input_features_mask": torch.from_numpy(np.stack(mask).astype(np.int64)),
    }


def inputs_of(pipe: Pipeline, prompt: list[int], sounds: Sequence[Features]) -> RequestInputs:
    """Return the inputs of a prompt with one placeholder for each sound."""
    given = pipe.bundle.manifest.target.given
    assert given is not None
    return expanded(prompt, PLACEHOLDER, [given.medium.pieces(each) for each in sounds])


def expanded(
    prompt: Sequence[int], placeholder: int, media: Sequence[Sequence[GivenPiece]]
) -> RequestInputs:
    """Return the inputs of a prompt with one placeholder for each medium, of so many pieces.

    With a placeholder 9 and a medium of 3 rows the tokens [1, 9, 2] become [1, 9, 9, 9, 2].
    """
    if not media:
        return RequestInputs(list(prompt))
    sizes = iter([sum(piece.num_rows for piece in pieces) for pieces in media])
    repeated = [[t] * (next(sizes) if t == placeholder else 1) for t in prompt]
    token_ids = [token for tokens in repeated for token in tokens]
    pieces = [piece for pieces in media for piece in pieces]
    return RequestInputs(token_ids, GivenPrompt.at_placeholders(token_ids, placeholder, pieces))


def request_of(pipe: Pipeline, inputs: RequestInputs, **options: Any) -> DecodingRequest:
    known = {"max_new_tokens": 14, "eos_token_id": ENDS, "seed": 1, **options}
    return pipe.request_of(inputs, known)


def export_pair(captures: SharedCaptures, folder: Path) -> Path:
    """Fill a folder with a target shaped as the 1.7B, a draft as the 0.6B, and their bundle."""
    from scripts.qwen3_asr_checkpoint import write_qwen3_asr

    # 1.7B: heads as wide together as the rows. 0.6B: twice as wide, and a narrower encoder.
    target = write_qwen3_asr(folder / "target", hidden_size=64)
    draft = write_qwen3_asr(
        folder / "draft", hidden_size=32, num_hidden_layers=1, audio={"encoder_layers": 1}
    )
    export_quietly(captures, folder / "bundle", target, draft)
    return folder
