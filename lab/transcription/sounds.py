"""Sounds that cause fallback: noise, chords, silence between speech, repeated speech."""

from collections.abc import Iterator, Sequence

import numpy as np

from dsbd_ort.audio.audio_files import SAMPLING_RATE, Samples


def sounds(speech: Sequence[Samples]) -> Iterator[tuple[str, Samples, int]]:
    """Yield (name, samples, number of beams) of every sound.

    After a fallback, transformers decodes the next windows with one beam, so sounds of several
    windows use one beam from the start.

    speech: at least three utterances of up to 15 s.
    """
    first, second, third = speech[0], speech[1], speech[2]
    rng = np.random.default_rng(0)
    noise = (0.1 * rng.standard_normal(12 * SAMPLING_RATE)).astype(np.float32)
    of_one_window = {
        "noise": noise,
        "chords": chords(12.0),
        "silence": np.zeros(10 * SAMPLING_RATE, np.float32),
        "speech in noise": first + 2 * noise[: len(first)],
        "the same over again": np.concatenate([second] * 5)[: 29 * SAMPLING_RATE],
    }
    for name, samples in of_one_window.items():
        yield name, samples, 1
        yield name, samples, 5
    gap = np.zeros(25 * SAMPLING_RATE, np.float32)
    yield "silence between speech", np.concatenate([first, gap, second, third]), 1
    yield "noise between speech", np.concatenate([first, noise, noise, second, noise]), 1
    yield "chords between speech", np.concatenate([third, chords(28.0), first]), 1


def chords(seconds: float) -> Samples:
    """Return samples like music, (n,) float32: four chords with a melody, repeated."""
    times = np.arange(round(seconds * SAMPLING_RATE)) / SAMPLING_RATE
    roots = np.array([220.0, 174.6, 261.6, 196.0])[(times // 1.5).astype(int) % 4]
    steps = np.array([4, 7, 12, 7, 9, 7, 4, 2])[(times // 0.375).astype(int) % 8]
    fading = np.exp(-2.0 * (times % 0.375))
    phases = [np.cumsum(roots * 2.0 ** (step / 12)) for step in (0, 4, 7)]
    chord = sum(np.sin(2 * np.pi * phase / SAMPLING_RATE) for phase in phases)
    melody = np.sin(2 * np.pi * np.cumsum(2 * roots * 2.0 ** (steps / 12)) / SAMPLING_RATE)
    return np.asarray(0.08 * chord + 0.15 * fading * melody, np.float32)
