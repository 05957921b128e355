"""A speech model that says what it hears by its loudness, and what was asked of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_errors import DsbdError
from dsbd_ort.speech.transcript import Segment, Transcript
from tests.speech.sounds import RATE
from tests.speech.transcripts import transcript


def heard(samples: NDArray[np.float32], **changes: Any) -> Transcript:
    """One segment of ten seconds each, of the mean loudness in it."""
    parts = [samples[first : first + 10 * RATE] for first in range(0, len(samples), 10 * RATE)]
    segments = [
        (10.0 * i, 10.0 * i + len(part) / RATE, f" loud {np.abs(part).mean():.3f}")
        for i, part in enumerate(parts)
    ]
    return transcript(segments, duration=len(samples) / RATE, **changes)


class FakeSpeechPipeline:
    """``transcribe`` of a Pipeline.

    Attributes:
        calls: the options of every call.
        before_segment: called before each segment.
    """

    def __init__(self, before_segment: Callable[[Segment], None] = lambda segment: None) -> None:
        self.calls: list[dict[str, Any]] = []
        self.before_segment = before_segment
        self.bundle = SimpleNamespace(path=Path("speech"))
        self.prompts = SimpleNamespace(encoder=SimpleNamespace(speech=SimpleNamespace()))
        self._lock = threading.Lock()

    def transcribe(
        self,
        audio: NDArray[np.float32],
        *,
        on_segment: Callable[[Segment], None] | None = None,
        **options: Any,
    ) -> Transcript:
        with self._lock:
            self.calls.append(options)
            if options.get("language") == "xx":
                raise DsbdError("language is 'xx'; expected one of en, de")
            done = heard(audio, task=options.get("task", "transcribe"))
            for segment in done.segments:
                self.before_segment(segment)
                if on_segment is not None:
                    on_segment(segment)
        return done

    def close(self) -> None:
        pass

    def __enter__(self) -> FakeSpeechPipeline:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            self.close()
