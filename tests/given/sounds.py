"""Features of sounds, and prompts of a tiny Qwen3-ASR with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_ort import Pipeline
from dsbd_ort.decoding import DecodingRequest
from dsbd_ort.requests.prompts import RequestInputs
from dsbd_runtime.parts.given.given_prompt import GivenPrompt
from scripts.qwen3_asr_checkpoint import NUM_MELS, PLACEHOLDER
from tests.given.checks import ENDS

Features = NDArray[np.float32]
SYSTEM = [5, 17, 201, 33, 8, 90]
FRAMES = (37, 100, 150, 237, 237, 400, 50, None)  # one request of text alone


def noise(num_frames: int, seed: int = 0, num_mels: int = NUM_MELS) -> Features:
    return np.random.default_rng(seed).normal(size=(num_mels, num_frames)).astype(np.float32)


def prompt_of(num_sounds: int, seed: int = 0) -> list[int]:
    """Return a system turn, sounds, and four more tokens after each."""
    later = np.random.default_rng(seed).integers(2, 280, (num_sounds, 4)).tolist()
    return [*SYSTEM, *(token for four in later for token in (PLACEHOLDER, *four))]


def inputs_of(pipe: Pipeline, prompt: list[int], sounds: Sequence[Features]) -> RequestInputs:
    """Return the inputs of a prompt with one placeholder for each sound.

    With a placeholder 9 and a sound of 3 rows the tokens [1, 9, 2] become [1, 9, 9, 9, 2].
    """
    given = pipe.bundle.manifest.target.given
    assert given is not None
    if not sounds:
        return RequestInputs(prompt)
    media = [given.medium.pieces(each) for each in sounds]
    sizes = iter([sum(piece.num_rows for piece in pieces) for pieces in media])
    repeated = [[t] * (next(sizes) if t == PLACEHOLDER else 1) for t in prompt]
    token_ids = [token for tokens in repeated for token in tokens]
    pieces = [piece for pieces in media for piece in pieces]
    return RequestInputs(token_ids, GivenPrompt.at_placeholders(token_ids, PLACEHOLDER, pieces))


def request_of(pipe: Pipeline, inputs: RequestInputs, **options: Any) -> DecodingRequest:
    known = {"max_new_tokens": 14, "eos_token_id": ENDS, "seed": 1, **options}
    return pipe.request_of(inputs, known)


def requests_of(pipe: Pipeline, options: dict[str, Any]) -> list[DecodingRequest]:
    """Return eight requests, with a sound each or none."""
    requests = []
    for seed, number in enumerate(FRAMES):
        sounds = [] if number is None else [noise(number, seed)]
        inputs = inputs_of(pipe, prompt_of(len(sounds), seed), sounds)
        requests.append(request_of(pipe, inputs, **{**options, "seed": seed}))
    return requests
