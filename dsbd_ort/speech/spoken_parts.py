"""The parts of an audio with speech, transcribed as if they followed one another.

Times are mapped back to the whole audio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np

from dsbd_ort.audio.audio_files import SAMPLING_RATE
from dsbd_ort.audio.log_mel import Samples
from dsbd_ort.audio.voice_activity import Network, Part, VadOptions, silero, speech_parts
from dsbd_ort.decoding.stats import summed_stats
from dsbd_ort.speech.transcript import TASKS, Segment, Transcript
from dsbd_ort.speech.transcription import Steps, Transcription
from dsbd_ort.speech.words import Align

T = TypeVar("T")


class SpeechTimes:
    """Maps times in the concatenated parts with speech to times in the whole audio."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        lengths = [end - start for start, end in parts]
        self._ends = np.cumsum(lengths)  # in the parts
        # samples left out before each part
        self._left_out = [start for start, _ in parts] - (self._ends - lengths)

    @property
    def has_parts(self) -> bool:
        return len(self._parts) > 0

    def speech(self, samples: Samples) -> Samples:
        """Return the samples of the parts."""
        parts = [samples[start:end] for start, end in self._parts]
        return np.concatenate([samples[:0], *parts])

    def original(self, time: float, *, within: float | None = None, is_end: bool = False) -> float:
        """Return the time in the whole audio, shifted like the part that contains ``within``.

        within: a time in the parts; None: ``time``.
        is_end: whether a time between two parts belongs to the first part, as its end.
        """
        at = int((time if within is None else within) * SAMPLING_RATE)
        part = int(np.searchsorted(self._ends, at, side="left" if is_end else "right"))
        part = min(part, len(self._parts) - 1)
        return round(time + float(self._left_out[part]) / SAMPLING_RATE, 2)

    def segment(self, segment: T) -> T:
        """Return a segment or a skipped window with times of the audio; words stay in one part."""
        timed: Any = segment
        if not getattr(timed, "words", None):
            end = self.original(timed.end, is_end=True)
            return cast("T", replace(timed, start=self.original(timed.start), end=end))
        words = [self._word(word) for word in timed.words]
        start, end = words[0].start, words[-1].end
        return cast("T", replace(timed, start=start, end=end, words=type(timed.words)(words)))

    def _word(self, word: Any) -> Any:
        middle = (word.start + word.end) / 2
        start, end = (self.original(time, within=middle) for time in (word.start, word.end))
        return replace(word, start=start, end=end)


@dataclass
class SpeechTranscription(Transcription):
    """The transcription of the parts of an audio with speech; times are those of the audio.

    of_parts: the transcription of the parts. If nobody speaks, that of all samples, unused.
    duration: seconds of the audio.
    """

    of_parts: Transcription
    times: SpeechTimes
    duration: float

    def steps(self, on_segment: Callable[[Segment], None] | None, align: Align) -> Steps:
        """See the base."""
        if not self.times.has_parts:
            return _silence(self.duration)

        def on_part(segment: Segment) -> None:
            if on_segment is not None:
                on_segment(self.times.segment(segment))

        transcript = yield from self.of_parts.steps(on_part, align)
        segments = tuple(map(self.times.segment, transcript.segments))
        skipped = tuple(map(self.times.segment, transcript.skipped))
        return replace(transcript, duration=self.duration, segments=segments, skipped=skipped)


def speech_transcription(
    samples: Samples,
    options: VadOptions,
    transcribed: Callable[[Samples], Transcription],
    network: Network | None = None,
) -> Transcription:
    """Return the transcription of the parts with speech.

    transcribed: returns the transcription of samples.
    network: detects speech; None: Silero's network.
    """
    times = SpeechTimes(speech_parts(samples, options, network or silero()))
    inner = transcribed(times.speech(samples) if times.has_parts else samples)
    return SpeechTranscription(inner, times, len(samples) / SAMPLING_RATE)


def _silence(duration: float) -> Transcript:
    return Transcript(
        text="",
        language=None,
        language_probability=None,
        task=TASKS[0],
        duration=duration,
        segments=(),
        stats=summed_stats(()),
    )
