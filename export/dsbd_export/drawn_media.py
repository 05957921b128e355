"""Sounds and pictures for the parity gate: random and artificial features and pixels."""

from __future__ import annotations

from typing import Any

import numpy as np

from dsbd_runtime.parts.source.pixel_values import NUM_CHANNELS, Pixels
from dsbd_runtime.parts.source.speech_entry import Features


def drawn_features(num_mels: int, *lengths: int) -> dict[str, Features]:
    """Return features (num_mels, length) float32 by name: noise, tones, silence, long noise.

    lengths: number of frames of each, in this order; fewer lengths return fewer features.
    """
    rng, mels = np.random.default_rng(5), np.arange(num_mels)[:, None]

    def noise(length: int) -> Any:
        return rng.normal(size=(num_mels, length))

    def tones(length: int) -> Any:
        rising = np.arange(length) % 100 * num_mels / 100
        return np.where(np.abs(mels - rising) < 2, 1.0, -0.6)

    def silence(length: int) -> Any:
        return np.full((num_mels, length), -1.5)

    made = {"short noise": noise, "tones": tones, "silence": silence, "long noise": noise}
    return {
        name: make(length).astype(np.float32)
        for (name, make), length in zip(made.items(), lengths, strict=False)
    }


def drawn_pictures(*shapes: tuple[int, ...]) -> dict[str, Pixels]:
    """Return pixels (*shape, 3) uint8 by name: a page of lines, white, noise, long noise.

    shapes: shape of each, in this order; fewer shapes return fewer pictures.
    """
    rng, names = np.random.default_rng(5), ("page of lines", "white", "noise", "long noise")
    pictures = {
        name: rng.integers(0, 256, (*shape, NUM_CHANNELS), dtype=np.uint8)
        for name, shape in zip(names, shapes, strict=False)
    }
    page = pictures["page of lines"]
    is_ink = (page > 127) & (np.arange(page.shape[-3])[:, None, None] % 8 < 3)
    return {**pictures, "page of lines": np.where(is_ink, 0, 255), "white": pictures["white"] | 255}
