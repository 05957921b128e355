"""Sounds made by numpy, which stand in for speech, and files of them."""

import numpy as np
from numpy.typing import NDArray

RATE = 16_000
Samples = NDArray[np.float32]


def tone(seconds: float, hertz: float = 763.9, rate: int = RATE) -> Samples:
    return np.float32(0.5) * np.sin(2 * np.pi * hertz * _times(seconds, rate)).astype(np.float32)


def chirp(seconds: float, rate: int = RATE) -> Samples:
    return np.float32(0.9) * np.sin(2 * np.pi * 150 * _times(seconds, rate) ** 2).astype(np.float32)


def noise(seconds: float, seed: int = 0, rate: int = RATE) -> Samples:
    drawn = np.random.default_rng(seed).normal(scale=0.1, size=round(seconds * rate))
    return drawn.astype(np.float32)


def speech_like(seconds: float, seed: int = 0, rate: int = RATE) -> Samples:
    """Harmonics of a wandering pitch in syllables, with breath."""
    times = _times(seconds, rate)
    rng = np.random.default_rng(seed)
    pitch = 120 + 30 * np.sin(2 * np.pi * 0.7 * times + rng.uniform(0, 6))
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    voice = sum(np.sin(k * phase) / k for k in range(1, 20))
    syllables = np.clip(np.sin(2 * np.pi * 3.1 * times), 0, None)
    breath = rng.normal(scale=0.01, size=len(times))
    return (0.2 * voice * syllables + breath).astype(np.float32)


def _times(seconds: float, rate: int) -> NDArray[np.float64]:
    return np.arange(round(seconds * rate)) / rate
