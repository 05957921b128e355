"""faster-whisper's WhisperModel and BatchedInferencePipeline, over a bundle."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.option_values import did_you_mean, shown
from dsbd_ort.speech import transcript
from dsbd_ort.speech.audio import SAMPLING_RATE, Samples, read_audio
from dsbd_ort.speech.faster_whisper.records import (
    TranscribedSegment,
    TranscriptionInfo,
    TranscriptionOptions,
    Word,
)
from dsbd_ort.speech.faster_whisper.windows import OpenedPipeline, RankedTranscription
from dsbd_ort.speech.languages import ENGLISH, code_of
from dsbd_ort.speech.segmentation import without_second_end
from dsbd_ort.speech.speech_request import read_temperatures
from dsbd_ort.speech.spoken_parts import SpeechTimes
from dsbd_ort.speech.transcript import TASKS
from dsbd_ort.speech.voice_activity import Part, VadOptions, silero, speech_parts
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.speech_entry import SpeechEntry

Audio = str | os.PathLike[str] | BinaryIO | NDArray[np.floating]
VadParameters = Mapping[str, Any] | VadOptions | None
Found = tuple[Iterable[TranscribedSegment], TranscriptionInfo]
Detected = tuple[str, float, list[tuple[str, float]] | None]

_OF_DOWNLOADS = {"download_root", "local_files_only", "revision", "use_auth_token"}
_ANY_TYPE = ("default", "auto")
_PAUSE_MS = 160  # that ends a part of a batch
_OPTIONS = {field.name for field in fields(TranscriptionOptions)} - {"temperatures"}


def decode_audio(
    input_file: str | os.PathLike[str] | BinaryIO,
    sampling_rate: int = SAMPLING_RATE,
    split_stereo: bool = False,
) -> Samples:
    """Return the samples of an audio file, mixed to one channel, (n,) float32."""
    if split_stereo:
        raise InputError("split_stereo is True; expected False, because channels are mixed to one")
    return read_audio(input_file, sampling_rate)


class WhisperModel:
    """A bundle of a Whisper model. Threads may share it; their windows wait for each other."""

    def __init__(
        self,
        model_size_or_path: str | os.PathLike[str],
        device: str = "auto",
        device_index: int = 0,
        compute_type: str = "default",
        cpu_threads: int = 0,
        num_workers: int = 1,
        **others: Any,
    ) -> None:
        """Open the bundle in a folder; ``device``: "auto" is "cpu", others are providers.

        num_workers is ignored, and which model is downloaded to where: none is.
        """
        if not os.path.isdir(model_size_or_path):
            raise InputError(
                f"{os.fspath(model_size_or_path)} is not a folder; expected a bundle, which "
                "dsbd-export makes of a Whisper checkpoint (docs/speech.md)"
            )
        if compute_type not in _ANY_TYPE:
            raise InputError(
                f"compute_type is {shown(compute_type)}; expected one of {', '.join(_ANY_TYPE)}: "
                "a bundle has the precision that it was exported with (--quantize)"
            )
        if unknown := sorted(others.keys() - _OF_DOWNLOADS):
            raise InputError(f"{unknown[0]} is given, which is not supported; leave it out")
        provider = "cpu" if device == "auto" else device
        if device_index:
            provider = f"{provider}:{device_index}"
        opened = OpenedPipeline.from_bundle(
            model_size_or_path, provider=provider, num_threads=cpu_threads or None
        )
        self.pipeline = cast("OpenedPipeline", opened)
        encoder = self.pipeline.prompts.encoder
        if encoder is None or encoder.speech is None:
            raise InputError(f"{self.pipeline.bundle.path} is not a bundle of a Whisper model")
        self.encoder, self.speech = encoder, encoder.speech

    @property
    def model(self) -> WhisperModel:
        """The object that has ``is_multilingual``."""
        return self

    @property
    def is_multilingual(self) -> bool:
        return self.speech.languages is not None

    @property
    def supported_languages(self) -> list[str]:
        return list(self.speech.languages or (ENGLISH,))

    def close(self) -> None:
        """Release the engines."""
        self.pipeline.close()

    def transcribe(
        self,
        audio: Audio,
        language: str | None = None,
        task: str = "transcribe",
        log_progress: bool = False,
        vad_filter: bool = False,
        vad_parameters: VadParameters = None,
        language_detection_threshold: float = 0.5,
        language_detection_segments: int = 1,
        **options: Any,
    ) -> Found:
        """Return the segments, decoded as they are read, and what is known of the audio.

        options: ``temperature``, one or several to try in turn, and other fields of
            ``TranscriptionOptions``. log_progress is ignored.
        """
        asked, samples = _asked(options, self.speech), _samples(audio)
        uses_vad = vad_filter and asked.clip_timestamps == "0"
        parts, vad = _spoken(samples, vad_parameters, uses_vad=uses_vad)
        spoken = SpeechTimes(parts)
        heard = spoken.speech(samples)
        several = language_detection_segments, language_detection_threshold
        detected = self.detected(heard, asked, language, *several)
        transcription = self.transcription(heard, asked, task, detected[0])
        found = (segment for (new,) in self.pipeline.rounds([transcription]) for segment in new)
        segments = (
            spoken.segment(_their(segment, number, self.speech))
            for number, segment in enumerate(found, 1)
        )
        return segments, _info(detected, asked, samples, heard, vad)

    def detect_language(
        self,
        audio: NDArray[np.floating] | None = None,
        features: NDArray[np.floating] | None = None,
        vad_filter: bool = False,
        vad_parameters: VadParameters = None,
        language_detection_segments: int = 1,
        language_detection_threshold: float = 0.5,
    ) -> Detected:
        """Return the language of samples, its probability, and the probabilities of all."""
        if audio is None or features is not None:
            raise InputError("features are not supported; give audio, the samples")
        samples = _samples(audio)
        spoken = SpeechTimes(_spoken(samples, vad_parameters, uses_vad=vad_filter)[0])
        several = language_detection_segments, language_detection_threshold
        return self.detected(spoken.speech(samples), TranscriptionOptions(), None, *several)

    def transcription(
        self, samples: Samples, *options: Any, is_one_window: bool = False
    ) -> RankedTranscription:
        """Return a transcription, not yet decoded; its audio may be empty."""
        heard = samples if len(samples) else np.zeros(1, np.float32)
        return RankedTranscription(
            self.pipeline, self.encoder, heard, *options, is_one_window=is_one_window
        )

    def detected(
        self, samples: Samples, asked: TranscriptionOptions, language: str | None, *several: Any
    ) -> Detected:
        """Return the given language, or see ``RankedTranscription.detection``."""
        if not self.is_multilingual:
            return ENGLISH, 1.0, None
        if language is not None:
            return code_of(language, self.speech), 1.0, None
        transcription = self.transcription(samples, asked, TASKS[0], None)
        found: Detected = self.pipeline.result(transcription.detection(*several))
        return found


class BatchedInferencePipeline:
    """Transcribes the parts of an audio with speech together, each of a window at most."""

    def __init__(self, model: WhisperModel) -> None:
        self.model = model

    def transcribe(
        self,
        audio: Audio,
        language: str | None = None,
        task: str = "transcribe",
        log_progress: bool = False,
        vad_filter: bool = True,
        vad_parameters: VadParameters = None,
        language_detection_threshold: float = 0.5,
        language_detection_segments: int = 1,
        batch_size: int = 8,
        **options: Any,
    ) -> Found:
        """See ``WhisperModel.transcribe``; only the first temperature is used, without thresholds.

        ``clip_timestamps``: clips, each with the seconds of its "start" and "end".
        """
        model, samples = self.model, _samples(audio)
        speech, clips = model.speech, options.pop("clip_timestamps", None)
        asked = _asked({"without_timestamps": True, **options}, speech)
        most, vad = speech.chunk_seconds * SAMPLING_RATE, None
        if clips:
            times = [(clip["start"], clip["end"]) for clip in clips]
            parts = [(int(a * SAMPLING_RATE), int(b * SAMPLING_RATE)) for a, b in times]
        elif vad_filter or len(samples) < most:
            longest = speech.chunk_seconds
            parts, vad = _spoken(samples, vad_parameters, longest, uses_vad=vad_filter)
        else:
            raise InputError(
                f"the audio has {len(samples) / SAMPLING_RATE:.0f} s; expected less than "
                f"{speech.chunk_seconds}, or vad_filter=True, or clip_timestamps"
            )
        spoken = SpeechTimes(parts)
        heard = spoken.speech(samples)
        several = language_detection_segments, language_detection_threshold
        detected = model.detected(heard, asked, language, *several)
        alone: dict[str, Any] = {
            "temperatures": asked.temperatures[:1],
            **dict.fromkeys(_THRESHOLDS),
        }
        asked = replace(asked, condition_on_previous_text=False, **alone)
        chunks, given = _joined(parts, 0 if clips else most), (asked, task, detected[0])

        def segments() -> Iterator[TranscribedSegment]:
            number = 0
            for first in range(0, len(chunks), batch_size):
                batch = chunks[first : first + batch_size]
                sounds = [heard[begin:end] for begin, end in batch]
                rounds = model.pipeline.rounds(
                    [model.transcription(each, *given, is_one_window=True) for each in sounds]
                )
                by_chunk = zip(*rounds, strict=True)
                for (begin, _), found in zip(batch, by_chunk, strict=False):  # all may be empty
                    for segment in chain.from_iterable(found):
                        number += 1
                        offset = begin / SAMPLING_RATE
                        yield spoken.segment(_their(segment, number, speech, offset))

        info_options = replace(asked, clip_timestamps=clips)
        return segments(), _info(detected, info_options, samples, heard, vad)


_THRESHOLDS = ("compression_ratio_threshold", "log_prob_threshold", "no_speech_threshold")


def _asked(options: dict[str, Any], speech: SpeechEntry) -> TranscriptionOptions:
    several = read_temperatures(options.pop("temperature", TranscriptionOptions.temperatures))
    if (length := options.pop("chunk_length", None)) not in (None, speech.chunk_seconds):
        raise InputError(
            f"chunk_length is {shown(length)}; expected {speech.chunk_seconds}, the seconds that "
            "the encoder of this bundle reads at a time"
        )
    if unknown := sorted(options.keys() - _OPTIONS):
        raise InputError(f"unknown option {unknown[0]!r}{did_you_mean(unknown[0], _OPTIONS)}")
    asked = TranscriptionOptions(temperatures=several, **options)
    return replace(asked, multilingual=asked.multilingual and speech.languages is not None)


def _samples(audio: Audio) -> Samples:
    if not isinstance(audio, np.ndarray):
        return decode_audio(audio)
    if audio.ndim != 1:
        raise InputError(f"audio has the shape {audio.shape}; expected samples of one channel")
    return audio.astype(np.float32)


def _spoken(
    samples: Samples, given: VadParameters, longest_s: float | None = None, *, uses_vad: bool
) -> tuple[list[Part], VadOptions | None]:
    """Return the parts to be heard, and the options that found them; ``longest_s``: of a batch."""
    if not uses_vad:
        return [(0, len(samples))], None
    options = given if isinstance(given, VadOptions) else VadOptions(**given or {})
    if longest_s is not None and not isinstance(given, VadOptions):
        options.max_speech_duration_s = longest_s
        if given is None:
            options.min_silence_duration_ms = _PAUSE_MS
    return speech_parts(samples, options, silero()), options


def _joined(parts: Sequence[Part], most: int) -> list[Part]:
    """Return parts, which follow each other, joined to at most ``most`` samples, as they follow."""
    joined: list[Part] = []
    end = 0
    for begin, stop in parts:
        length = stop - begin
        if joined and end + length - joined[-1][0] <= most:
            joined[-1] = joined[-1][0], end + length
        else:
            joined.append((end, end + length))
        end += length
    return joined


def _info(
    detected: Detected,
    asked: TranscriptionOptions,
    samples: Samples,
    heard: Samples,
    vad: VadOptions | None,
) -> TranscriptionInfo:
    return TranscriptionInfo(
        language=detected[0],
        language_probability=detected[1],
        duration=len(samples) / SAMPLING_RATE,
        duration_after_vad=len(heard) / SAMPLING_RATE,
        all_language_probs=detected[2],
        transcription_options=asked,
        vad_options=vad,
    )


def _their(
    segment: transcript.Segment, number: int, speech: SpeechEntry, offset: float = 0.0
) -> TranscribedSegment:
    """Return a segment as faster-whisper's; ``offset``: seconds before its audio."""
    words = segment.words and [
        Word(
            round(each.start + offset, 2), round(each.end + offset, 2), each.word, each.probability
        )
        for each in segment.words
    ]
    return TranscribedSegment(
        id=number,
        seek=segment.seek + int(offset / speech.seconds_per_frame),
        start=round(segment.start + offset, 3),
        end=round(segment.end + offset, 3),
        text=segment.text,
        tokens=list(without_second_end(segment.token_ids, speech)),
        avg_logprob=segment.avg_logprob,
        compression_ratio=segment.compression_ratio,
        no_speech_prob=segment.no_speech_prob,
        words=None if segment.words is None else list(words or ()),
        temperature=segment.temperature,
    )
