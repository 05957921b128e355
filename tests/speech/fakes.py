"""Transcripts that no model made, and a speech model that transcribes the loudness of sounds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_errors import DsbdError
from dsbd_ort.engine import Cancelled, ServiceClosedError, ServiceLimits, ServiceStats
from dsbd_ort.speech.transcript import Segment, SpokenWord, Transcript
from dsbd_runtime.errors import InputError
from tests.benchmark.fakes import stats
from tests.speech.sounds import RATE

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


def heard(samples: NDArray[np.float32], **changes: Any) -> Transcript:
    """One segment of ten seconds each, of the mean loudness in it."""
    parts = [samples[first : first + 10 * RATE] for first in range(0, len(samples), 10 * RATE)]
    segments = [
        (10.0 * i, 10.0 * i + len(part) / RATE, f" loud {np.abs(part).mean():.3f}")
        for i, part in enumerate(parts)
    ]
    return transcript(segments, duration=len(samples) / RATE, **changes)


def with_words(segment: Segment) -> Segment:
    """A segment whose words take as long each."""
    texts = [f" {text}" for text in segment.text.split()]
    times = np.linspace(segment.start, segment.end, len(texts) + 1).tolist()
    words = (
        SpokenWord(word=text, start=start, end=end, probability=0.5)
        for text, start, end in zip(texts, times, times[1:], strict=False)
    )
    return replace(segment, words=tuple(words))


class FakeSpeechService:
    """The part of a Service that a server of audio uses, over a fake pipeline.

    Attributes:
        live: the transcriptions so far.
    """

    def __init__(
        self, pipeline: FakeSpeechPipeline | None = None, limits: ServiceLimits | None = None
    ) -> None:
        self.pipeline = pipeline or FakeSpeechPipeline()
        self.limits = limits or ServiceLimits()
        self.live: list[FakeTranscription] = []
        self.is_open = True

    def submit_audio(
        self,
        samples: NDArray[np.float32],
        options: Mapping[str, Any],
        on_event: Callable[[Segment | Transcript | DsbdError | Cancelled], None],
    ) -> FakeTranscription:
        if not self.is_open:
            raise ServiceClosedError("the service is closed")
        live = FakeTranscription()
        self.live.append(live)

        def work() -> None:
            def on_segment(segment: Segment) -> None:
                if live.is_cancelled.is_set():
                    raise ServiceClosedError("cancelled")
                on_event(segment)

            try:
                on_event(self.pipeline.transcribe(samples, on_segment=on_segment, **options))
            except ServiceClosedError:
                on_event(Cancelled())
            except DsbdError as error:
                on_event(error)

        threading.Thread(target=work, daemon=True).start()
        return live

    def stats(self) -> ServiceStats:
        return ServiceStats(
            num_running=0,
            num_waiting=0,
            rows_in_use=0,
            rows_reserved=0,
            max_rows=1,
            kv_bytes=0,
            num_preemptions=0,
        )

    def close(self, *, drain: bool = True) -> None:
        self.is_open = False
        for live in self.live:
            live.cancel()


class FakeTranscription:
    def __init__(self) -> None:
        self.is_cancelled = threading.Event()

    def cancel(self) -> None:
        self.is_cancelled.set()


class FakeSpeechPipeline:
    """``transcribe`` of a Pipeline.

    Attributes:
        calls: the options of every call.
        before_segment: called before each segment.
    """

    def __init__(self, before_segment: Callable[[Segment], None] = lambda segment: None) -> None:
        self.calls: list[dict[str, Any]] = []
        self.before_segment = before_segment
        self.bundle = SimpleNamespace(path=Path("speech"), context_length=448)
        speech = SimpleNamespace(alignment="any", alignment_heads=[[0, 0]])
        self.prompts = SimpleNamespace(encoder=SimpleNamespace(speech=speech))
        self.requests = SimpleNamespace(media=None, pictures=None)
        self.transcribes = True
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
                raise InputError("language is 'xx'; expected one of en, de")
            done = heard(audio, task=options.get("task", "transcribe"))
            if options.get("return_timestamps") == "word":
                done = replace(done, segments=tuple(map(with_words, done.segments)))
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
