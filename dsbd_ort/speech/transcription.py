"""Base of transcriptions: yields the requests for one audio, which the caller decodes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from dsbd_ort.decoding import DecodeResult
from dsbd_ort.decoding.stats import summed_stats
from dsbd_ort.speech.speech_request import SpeechRequest
from dsbd_ort.speech.transcript import Alternative, Segment, Skipped, Transcript
from dsbd_ort.speech.window_texts import Requests, SpeechPipeline, WindowText, WindowTexts
from dsbd_ort.speech.words import Align

T = TypeVar("T")
OnSegment = Callable[[Segment], None]
Steps = Generator[Requests, list[DecodeResult], Transcript]
"""A generator that yields requests, receives their results, and returns the transcript."""


class Transcription:
    """Transcription of one audio: collects the results of its windows; base of kinds of models."""

    def __init__(
        self,
        pipeline: SpeechPipeline,
        request: SpeechRequest,
        duration: float,
        options: Mapping[str, Any],
    ) -> None:
        """Take the request.

        duration: seconds of the audio.
        options: options of every engine request; those of ``request`` have precedence.
        """
        self._pipeline = pipeline
        self._request = request
        self._duration = duration
        self._language = request.language
        self._language_probability: float | None = None
        self._segments: list[Segment] = []
        self._alternatives: list[Alternative] = []
        self._skipped: list[Skipped] = []
        self._texts = WindowTexts(pipeline, request, options)

    def steps(self, on_segment: OnSegment | None, align: Align) -> Steps:
        """Decode one window after another; call ``on_segment`` with each finished segment."""
        raise NotImplementedError

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._pipeline.tokenizer.decode(token_ids)

    def _alternative(self, answer: WindowText, seek: int) -> Alternative:
        return Alternative(
            seek=seek,
            text=self._text(answer.token_ids),
            token_ids=answer.token_ids,
            temperature=answer.temperature,
            avg_logprob=answer.avg_logprob,
            compression_ratio=answer.compression_ratio,
        )

    def _transcript(self, text: str) -> Transcript:
        return Transcript(
            text=text.strip(),
            language=self._language,
            language_probability=self._language_probability,
            task=self._request.task,
            duration=self._duration,
            segments=tuple(self._segments),
            stats=summed_stats(self._texts.stats),
            alternatives=tuple(self._alternatives),
            skipped=tuple(self._skipped),
        )


def answered(
    steps: Generator[Requests, list[DecodeResult], T],
    decoded: Callable[[Requests], list[DecodeResult]],
) -> T:
    """Return the result of a generator of requests; ``decoded`` runs the requests."""
    with contextlib.closing(steps):  # releases the source, also if ``decoded`` fails
        try:
            requests = next(steps)
            while True:
                requests = steps.send(decoded(requests))
        except StopIteration as end:
            result: T = end.value
            return result
