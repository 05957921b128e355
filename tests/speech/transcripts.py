"""Transcripts that no model made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsbd_ort.speech.transcript import Segment, Transcript
from tests.benchmark.fakes import stats

SEGMENTS = [  # start, end, text
    (0.0, 2.5, " And so, my fellow Americans,"),
    (2.5, 7.04, " ask not\n\nwhat <your> country --> can & do"),
    (7.04, 8.0, "  "),
    (3599.9996, 3723.0451, " for you."),
]


def segment(id: int, start: float, end: float, text: str, **changes: Any) -> Segment:
    values: dict[str, Any] = {
        "seek": 0,
        "token_ids": (50_364, 400 + id, 50_365),
        "temperature": 0.0,
        "avg_logprob": -0.25,
        "compression_ratio": 1.5,
        "no_speech_prob": 0.01,
    }
    return Segment(id=id, start=start, end=end, text=text, **{**values, **changes})


def transcript(
    segments: Sequence[tuple[float, float, str]] = SEGMENTS, **changes: Any
) -> Transcript:
    made = tuple(segment(index, *each) for index, each in enumerate(segments))
    values: dict[str, Any] = {
        "text": "".join(each.text for each in made),
        "language": "en",
        "language_probability": 0.75,
        "task": "transcribe",
        "duration": 11.00006,
        "segments": made,
        "stats": stats(),
    }
    return Transcript(**{**values, **changes})
