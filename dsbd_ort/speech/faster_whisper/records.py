"""Records of faster-whisper: words, segments, facts about a transcription, and its options."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsbd_ort.audio.voice_activity import VadOptions
from dsbd_ort.decoding.option_values import shown
from dsbd_runtime.errors import InputError


class _Record:
    def _asdict(self) -> dict[str, Any]:  # early versions of faster-whisper had named tuples
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]


@dataclass
class Word(_Record):
    """A word; times in seconds."""

    start: float
    end: float
    word: str
    probability: float


@dataclass
class TranscribedSegment(_Record):
    """A segment, exported as ``Segment``; times in seconds, ``seek`` in frames."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: list[Word] | None
    temperature: float | None


@dataclass
class TranscriptionOptions:
    """Options by faster-whisper's names, with the defaults of its ``WhisperModel.transcribe``.

    Values other than the default raise InputError for ``patience``,
    ``hallucination_silence_threshold``, ``prepend_punctuations`` and ``append_punctuations``.
    """

    beam_size: int = 5
    best_of: int = 5
    patience: float = 1
    length_penalty: float = 1
    repetition_penalty: float = 1
    no_repeat_ngram_size: int = 0
    log_prob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    compression_ratio_threshold: float | None = 2.4
    condition_on_previous_text: bool = True
    prompt_reset_on_temperature: float = 0.5
    temperatures: Sequence[float] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    initial_prompt: str | Iterable[int] | None = None
    prefix: str | None = None
    suppress_blank: bool = True
    suppress_tokens: Sequence[int] | None = (-1,)
    without_timestamps: bool = False
    max_initial_timestamp: float = 1.0
    word_timestamps: bool = False
    prepend_punctuations: str = "\"'“¿([{-"
    append_punctuations: str = "\"'.。,\uff0c!\uff01?\uff1f:\uff1a”)]}、"
    multilingual: bool = False
    max_new_tokens: int | None = None
    clip_timestamps: str | Sequence[Any] | None = "0"
    hallucination_silence_threshold: float | None = None
    hotwords: str | None = None

    def __post_init__(self) -> None:
        for name, reason in _FIXED.items():
            default, value = getattr(TranscriptionOptions, name), getattr(self, name)
            if value != default:
                raise InputError(
                    f"{name} is {shown(value)}; expected {default!r}, because {reason}"
                )


_FIXED: Mapping[str, str] = {
    "patience": "a search ends once it has as many texts as beams",
    "hallucination_silence_threshold": "silence is left out by vad_filter alone",
    "prepend_punctuations": "words are grouped by these marks",
    "append_punctuations": "words are grouped by these marks",
}


@dataclass
class TranscriptionInfo:
    """Language, seconds of the audio, seconds of its parts with speech, and the options."""

    language: str
    language_probability: float
    duration: float
    duration_after_vad: float
    all_language_probs: list[tuple[str, float]] | None
    transcription_options: TranscriptionOptions
    vad_options: VadOptions | None
