"""Transcripts: the text of an audio, its segments with their times, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsbd_ort.decoding import DecodingStats

Task = Literal["transcribe", "translate"]
TASKS: tuple[Task, ...] = ("transcribe", "translate")
"""What a speech model does: text in the language that is spoken, or in English."""


@dataclass(frozen=True, kw_only=True)
class SpokenWord:
    """A word and when it is said; times are seconds from the start of the audio.

    Attributes:
        word: as it stands in the text, as a rule with a space in front, and with its punctuation.
        probability: of its tokens among those of texts and their end, the mean.
    """

    word: str
    start: float
    end: float
    probability: float


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of the text and when it is said; times are seconds from the start of the audio.

    Attributes:
        id: its place among the segments, from 0.
        seek: the first feature frame of the window that it was decoded in.
        start, end: when it begins and ends; of a text without times those of its window.
        text: as decoded, as a rule with a space in front.
        token_ids: its tokens, timestamps included.
        temperature: that its window was decoded at: above 0 after a fallback.
        avg_logprob: log-probability of a token of its window, the mean.
        compression_ratio: bytes of the window's text over those of it compressed; repetitions
            raise it.
        no_speech_prob: probability that nobody speaks in its window.
        words: of the text, in their order; None unless their times are asked for.
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
    """One of the texts of a window, where several are asked for.

    Attributes:
        seek: the first feature frame of the window, as that of its segments.
        text, token_ids, temperature, avg_logprob, compression_ratio: as those of a segment, of all
            that is said in the window.
    """

    seek: int
    text: str
    token_ids: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A window without segments: nobody seems to speak, and its text is improbable.

    Attributes:
        seek: its first feature frame.
        start, end: seconds from the start of the audio.
        temperature: at which its text was improbable.
        avg_logprob, no_speech_prob: as those of a segment.
    """

    seek: int
    start: float
    end: float
    temperature: float
    avg_logprob: float
    no_speech_prob: float


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """What was said in an audio.

    Attributes:
        text: of all segments.
        language: code of the language that is spoken, such as "en"; None for a model of one
            language that does not name it.
        language_probability: of a language that was detected; None where the request named it.
        task: "transcribe", or "translate": into English.
        duration: seconds of the audio.
        segments: in the order of time.
        stats: of all windows together, see ``summed_stats``.
        alternatives: the texts of every window, the best first, which became its segments; empty
            unless several were asked for.
        skipped: the windows in which nobody seems to speak, in the order of time.
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
