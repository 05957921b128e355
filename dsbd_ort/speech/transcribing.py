"""The wing that transcribes, for ``Pipeline.transcribe`` and ``Service.submit_audio``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from dsbd_forward.forward import Source
from dsbd_ort.audio.audio_files import SAMPLING_RATE, Audio, read_samples
from dsbd_ort.audio.voice_activity import VAD, read_vad
from dsbd_ort.engine.async_stream import result_or_raise
from dsbd_ort.engine.service import Service
from dsbd_ort.pipeline import Pipeline
from dsbd_ort.speech.live_transcription import LiveTranscription, SpeechEvent
from dsbd_ort.speech.prompted.prompted_transcription import PromptedTranscription
from dsbd_ort.speech.speech_request import SpeechRequest
from dsbd_ort.speech.spoken_parts import speech_transcription
from dsbd_ort.speech.transcript import Segment, Transcript
from dsbd_ort.speech.transcription import Transcription, answered
from dsbd_ort.speech.whisper.whisper_transcription import WhisperTranscription
from dsbd_ort.speech.words import Align
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.source.alignment import AlignedTokens, Alignment


def transcription(pipeline: Pipeline, audio: Audio, options: Mapping[str, Any]) -> Transcription:
    """Return the transcription of an audio; its requests are not decoded yet."""
    if (vad := read_vad(options.get(VAD))) is not None:
        samples, given = read_samples(audio, SAMPLING_RATE), {**options, VAD: False}
        return speech_transcription(samples, vad, lambda part: transcription(pipeline, part, given))
    media, target = pipeline.media, pipeline.bundle.manifest.target
    if media is not None and media.sound is not None:
        samples = read_samples(audio, media.sound.entry.sampling_rate)
        return PromptedTranscription(
            pipeline, media, media.sound, samples, options, target.vocab_size
        )
    encoder = pipeline.prompts.encoder
    if encoder is None or encoder.speech is None:
        raise InputError(
            f"the model of {pipeline.bundle.path} reads text, not sound, which transcribe needs; "
            "use a bundle of a speech model such as Whisper or Qwen3-ASR"
        )
    speech, vocab_size = encoder.speech, encoder.vocab_size
    samples = read_samples(audio, speech.sampling_rate)
    request = SpeechRequest.read(
        options, speech, pipeline.tokenizer, vocab_size, pipeline.bundle.context_length
    )
    return WhisperTranscription(pipeline, speech, encoder.start_token_id, samples, request)


def transcribe(
    pipeline: Pipeline,
    audio: Audio,
    on_segment: Callable[[Segment], None] | None,
    options: Mapping[str, Any],
) -> Transcript:
    """See Pipeline.transcribe."""
    steps = transcription(pipeline, audio, options).steps(on_segment, align_of(pipeline))
    return answered(steps, pipeline.models.decoded)


def align_of(pipeline: Pipeline) -> Align:
    """Return a function that aligns with the target; it waits until no request runs."""

    def align(source: Source, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> AlignedTokens:
        with pipeline.models.used():
            return _aligned(pipeline.models.target, source, prompt_ids, token_ids)

    return align


def submit_audio(
    service: Service,
    audio: Audio,
    options: Mapping[str, Any],
    on_event: Callable[[SpeechEvent], None],
) -> LiveTranscription:
    """See Service.submit_audio."""
    return LiveTranscription(
        transcription(service.pipeline, audio, options),
        service.submit_request,
        lambda *window: service.call(lambda target: _aligned(target, *window)),
        on_event,
    )


def transcribe_on(
    service: Service,
    audio: Audio,
    on_segment: Callable[[Segment], None] | None,
    options: Mapping[str, Any],
) -> Transcript:
    """See Service.transcribe."""
    events: SimpleQueue[SpeechEvent] = SimpleQueue()
    live = service.submit_audio(audio, options, events.put)
    try:
        while isinstance(event := events.get(), Segment):
            if on_segment is not None:
                on_segment(event)
        return result_or_raise(event)
    finally:
        live.cancel()


def _aligned(
    target: CausalLM, source: Source, prompt_ids: Sequence[int], token_ids: Sequence[int]
) -> AlignedTokens:
    return target.part(Alignment).align(source, prompt_ids, token_ids)
