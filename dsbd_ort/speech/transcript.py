"""Transcripts: the text of an audio, its segments with their times, and statistics."""

from dataclasses import dataclass
from typing import Literal

from dsbd_ort.decoding import DecodingStats

Task = Literal["transcribe", "translate"]
TASKS: tuple[Task, ...] = ("transcribe", "translate")
"""Tasks of a speech model: text in the spoken language, or in English."""


@dataclass(frozen=True, kw_only=True)
class SpokenWord:
    """A word and its times, in seconds from the start of the audio.

    Attributes:
        word: as in the text, usually with a space in front, and with its punctuation.
        probability: mean probability of its tokens, normalized over text tokens and the end token.
    """

    word: str
    start: float
    end: float
    probability: float


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of the text and its times, in seconds from the start of the audio.

    Attributes:
        seek: the first feature frame of the window that it was decoded in.
        start, end: its times; if the text has no times, the times of its window.
        text: as decoded, usually with a space in front.
        token_ids: its tokens, including timestamps.
        temperature: temperature of its window; above 0 after a fallback.
        avg_logprob: mean log-probability of the tokens of its window.
        compression_ratio: size of the window's text over its compressed size; repetitions raise it.
        words: words of the text, in order; None unless their times were requested.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    token_ids: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: tuple[SpokenWord, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """One of several requested texts of a window; its fields are those of a segment."""

    seek: int
    text: str
    token_ids: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A window skipped as silence: its no-speech probability is high and its text improbable."""

    seek: int
    start: float
    end: float
    temperature: float
    avg_logprob: float
    no_speech_prob: float


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """Text of an audio, with segments and statistics.

    Attributes:
        language: code of the spoken language, such as "en"; None if the model has one language and
            does not name it.
        language_probability: probability of a detected language; None if the request named it.
        task: "transcribe", or "translate" into English.
        duration: seconds of the audio.
        stats: summed statistics of all windows, see ``summed_stats``.
        alternatives: the texts of every window, the best first; the best became its segments.
            Empty unless several texts were requested.
    """

    text: str
    language: str | None
    language_probability: float | None
    task: str
    duration: float
    segments: tuple[Segment, ...]
    stats: DecodingStats
    alternatives: tuple[Alternative, ...] = ()
    skipped: tuple[Skipped, ...] = ()
