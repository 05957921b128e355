"""faster-whisper's WhisperModel and BatchedInferencePipeline, over a bundle."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.audio.audio_files import SAMPLING_RATE, Samples, read_audio
from dsbd_ort.audio.voice_activity import Part, VadOptions, silero, speech_parts
from dsbd_ort.decoding.option_values import did_you_mean, shown
from dsbd_ort.speech.faster_whisper.records import (
    TranscribedSegment,
    TranscriptionInfo,
    TranscriptionOptions,
    Word,
)
from dsbd_ort.speech.faster_whisper.windows import Language, OpenedPipeline, RankedTranscription
from dsbd_ort.speech.languages import ENGLISH, code_of
from dsbd_ort.speech.speech_request import WORD_TIMES, SpeechRequest, read_temperatures
from dsbd_ort.speech.spoken_parts import SpeechTimes
from dsbd_ort.speech.transcript import TASKS, Segment
from dsbd_ort.speech.whisper.segmentation import without_second_end
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.source.speech_entry import SpeechEntry

Audio = str | os.PathLike[str] | BinaryIO | NDArray[np.floating]
VadParameters = Mapping[str, Any] | VadOptions | None
Found = tuple[Iterator[TranscribedSegment], TranscriptionInfo]

_OF_DOWNLOADS = {"download_root", "local_files_only", "revision", "use_auth_token"}
_ANY_TYPE = ("default", "auto")
_PAUSE_MS = 160  # a pause that ends a part of a batch
_OPTIONS = {field.name for field in fields(TranscriptionOptions)} - {"temperatures"}
_THRESHOLDS = ("compression_ratio_threshold", "log_prob_threshold", "no_speech_threshold")
_DEFAULT_TOKENS = -1  # in ``suppress_tokens``: the model's suppressed tokens


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
    """A bundle of a Whisper model. Threads may share it; only one window is decoded at a time."""

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
        """Open the bundle in a folder. ``device``: a provider; "auto" is "cpu".

        num_workers and the options of downloads are ignored: nothing is downloaded.
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
        self.pipeline = OpenedPipeline.from_bundle(
            model_size_or_path, provider=provider, num_threads=cpu_threads or None
        )
        encoder = self.pipeline.prompts.encoder
        if encoder is None or encoder.speech is None:
            raise InputError(f"{self.pipeline.bundle.path} is not a bundle of a Whisper model")
        self.encoder, self.speech = encoder, encoder.speech

    @property
    def model(self) -> WhisperModel:
        """The object with ``is_multilingual``, as in faster-whisper."""
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
        """Return the segments, which are decoded as they are read, and facts about the audio.

        options: ``temperature`` (one, or several to try in turn) and other fields of
            ``TranscriptionOptions``. log_progress is ignored.
        """
        asked = _asked(options, self.speech)
        uses_vad = vad_filter and asked.clip_timestamps == "0"
        heard = _heard(_samples(audio), vad_parameters, uses_vad=uses_vad)
        several = language_detection_segments, language_detection_threshold
        return self.found(heard, asked, task, language, several)

    def detect_language(
        self,
        audio: NDArray[np.floating] | None = None,
        features: NDArray[np.floating] | None = None,
        vad_filter: bool = False,
        vad_parameters: VadParameters = None,
        language_detection_segments: int = 1,
        language_detection_threshold: float = 0.5,
    ) -> Language:
        """Return the language of samples, its probability, and those of all languages."""
        if audio is None or features is not None:
            raise InputError("features are not supported; give audio, the samples")
        heard = _heard(_samples(audio), vad_parameters, uses_vad=vad_filter)
        several = language_detection_segments, language_detection_threshold
        return self._language(heard, TranscriptionOptions(), None, several)

    def found(
        self,
        heard: Heard,
        asked: TranscriptionOptions,
        task: str,
        language: str | None,
        several: tuple[int, float],
        batch_size: int = 1,
    ) -> Found:
        """See ``transcribe``; ``several``: windows and threshold of the language detection."""
        spoken = self._language(heard, asked, language, several)
        request = self._request(asked, task, spoken[0])
        segments = self._segments(heard, request, asked, batch_size)
        numbered = (replace(each, id=number) for number, each in enumerate(segments, 1))
        return numbered, TranscriptionInfo(
            language=spoken[0],
            language_probability=spoken[1],
            duration=len(heard.samples) / SAMPLING_RATE,
            duration_after_vad=len(heard.speech) / SAMPLING_RATE,
            all_language_probs=spoken[2],
            transcription_options=asked,
            vad_options=heard.vad,
        )

    def _segments(
        self, heard: Heard, request: SpeechRequest, asked: TranscriptionOptions, batch_size: int
    ) -> Iterator[TranscribedSegment]:
        is_one_window = heard.chunks is not None
        chunks = heard.chunks or [(0, len(heard.speech))]
        for batch in (chunks[at : at + batch_size] for at in range(0, len(chunks), batch_size)):
            parts = [heard.speech[begin:end] for begin, end in batch]
            transcriptions = [
                self._transcription(part, request, asked, is_one_window) for part in parts
            ]
            for by_part in self.pipeline.rounds(transcriptions):
                for (begin, _), segments in zip(batch, by_part, strict=True):
                    for segment in segments:
                        their = _their(segment, self.speech, begin / SAMPLING_RATE)
                        yield heard.times.segment(their)

    def _language(
        self,
        heard: Heard,
        asked: TranscriptionOptions,
        language: str | None,
        several: tuple[int, float],
    ) -> Language:
        if not self.is_multilingual:
            return ENGLISH, 1.0, None
        if language is not None:
            return code_of(language, self.speech), 1.0, None
        request = self._request(asked, TASKS[0], None)
        transcription = self._transcription(heard.speech, request, asked, heard.chunks is not None)
        return self.pipeline.result(transcription.detection(*several))

    def _transcription(self, *options: Any) -> RankedTranscription:
        return RankedTranscription(self.pipeline, self.encoder, *options)

    def _request(
        self, asked: TranscriptionOptions, task: str, language: str | None
    ) -> SpeechRequest:
        options: dict[str, Any] = {
            "language": language,
            "task": task,
            "num_beams": asked.beam_size,
            "num_return_sequences": asked.beam_size if 0.0 in asked.temperatures else 1,
            "best_of": asked.best_of,
            "temperature": asked.temperatures,
            "length_penalty": asked.length_penalty,
            "repetition_penalty": asked.repetition_penalty,
            "no_repeat_ngram_size": asked.no_repeat_ngram_size,
            "compression_ratio_threshold": asked.compression_ratio_threshold,
            "logprob_threshold": asked.log_prob_threshold,
            "no_speech_threshold": asked.no_speech_threshold,
            "condition_on_previous_text": asked.condition_on_previous_text,
            "return_timestamps": WORD_TIMES if asked.word_timestamps else False,
        }
        if asked.beam_size > 1:
            options["early_stopping"] = True
        if asked.max_new_tokens:
            options["max_new_tokens"] = asked.max_new_tokens
        if not asked.suppress_blank:
            options["begin_suppress_tokens"] = []
        if (given := set(asked.suppress_tokens or ())) != {_DEFAULT_TOKENS}:
            least = 0 if _DEFAULT_TOKENS in given else self.encoder.start_token_id
            of_model = {token for token in self.speech.suppress_tokens if given and token >= least}
            options["suppress_tokens"] = sorted((given | of_model) - {_DEFAULT_TOKENS})
        tokens = self.pipeline.tokenizer, self.encoder.vocab_size
        length = self.pipeline.bundle.context_length
        return SpeechRequest.read(options, self.speech, *tokens, length)


class BatchedInferencePipeline:
    """Transcribes the parts of an audio with speech together; a part is at most one window."""

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

        clip_timestamps: clips; each has "start" and "end" in seconds.
        """
        speech, clips = self.model.speech, options.pop("clip_timestamps", None)
        asked = _asked({"without_timestamps": True, **options}, speech)
        samples, max_samples = _samples(audio), speech.chunk_seconds * SAMPLING_RATE
        if clips:
            times = [(each["start"] * SAMPLING_RATE, each["end"] * SAMPLING_RATE) for each in clips]
            heard = Heard(samples, [(int(begin), int(end)) for begin, end in times])
        elif vad_filter or len(samples) < max_samples:
            heard = _heard(samples, vad_parameters, speech.chunk_seconds, uses_vad=vad_filter)
        else:
            raise InputError(
                f"the audio has {len(samples) / SAMPLING_RATE:.0f} s; expected less than "
                f"{speech.chunk_seconds}, or vad_filter=True, or clip_timestamps"
            )
        heard.chunks = _joined(heard.parts, 0 if clips else max_samples)
        alone: dict[str, Any] = {
            "temperatures": asked.temperatures[:1],
            "condition_on_previous_text": False,
            "clip_timestamps": clips,
            **dict.fromkeys(_THRESHOLDS),
        }
        several = language_detection_segments, language_detection_threshold
        return self.model.found(heard, replace(asked, **alone), task, language, several, batch_size)


@dataclass
class Heard:
    """An audio and the parts of it that are transcribed.

    vad: the options with which the parts were detected.
    chunks: parts of the joined speech, each decoded as one window; None: decode windows in turn.
    """

    samples: Samples
    parts: Sequence[Part]
    vad: VadOptions | None = None
    chunks: Sequence[Part] | None = None

    def __post_init__(self) -> None:
        self.times = SpeechTimes(self.parts)
        self.speech = self.times.speech(self.samples)


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


def _heard(
    samples: Samples, given: VadParameters, longest_s: float | None = None, *, uses_vad: bool
) -> Heard:
    """Return the parts to transcribe; ``longest_s``: longest part in a batch, in seconds."""
    if not uses_vad:
        return Heard(samples, [(0, len(samples))])
    options = given if isinstance(given, VadOptions) else VadOptions(**given or {})
    if longest_s is not None and not isinstance(given, VadOptions):
        options.max_speech_duration_s = longest_s
        if given is None:
            options.min_silence_duration_ms = _PAUSE_MS
    return Heard(samples, speech_parts(samples, options, silero()), options)


def _joined(parts: Sequence[Part], max_samples: int) -> list[Part]:
    """Return consecutive parts joined in order, up to ``max_samples``, in joined coordinates."""
    joined: list[Part] = []
    end = 0
    for begin, stop in parts:
        length = stop - begin
        if joined and end + length - joined[-1][0] <= max_samples:
            joined[-1] = joined[-1][0], end + length
        else:
            joined.append((end, end + length))
        end += length
    return joined


def _their(segment: Segment, speech: SpeechEntry, offset: float) -> TranscribedSegment:
    """Return a segment in faster-whisper's form; ``offset``: seconds before its part."""
    words = [
        Word(
            round(each.start + offset, 2), round(each.end + offset, 2), each.word, each.probability
        )
        for each in segment.words or ()
    ]
    return TranscribedSegment(
        id=segment.id,
        seek=segment.seek + int(offset / speech.seconds_per_frame),
        start=round(segment.start + offset, 3),
        end=round(segment.end + offset, 3),
        text=segment.text,
        tokens=list(without_second_end(segment.token_ids, speech)),
        avg_logprob=segment.avg_logprob,
        compression_ratio=segment.compression_ratio,
        no_speech_prob=segment.no_speech_prob,
        words=None if segment.words is None else words,
        temperature=segment.temperature,
    )
