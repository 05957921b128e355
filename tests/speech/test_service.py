"""Transcriptions of a Service: those of the pipeline, several at a time, cancelled, at its end."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dsbd_errors import DsbdError
from dsbd_ort import Pipeline
from dsbd_ort.engine import (
    Cancelled,
    Service,
    ServiceClosedError,
    ServiceLimits,
)
from dsbd_ort.speech.live_transcription import SpeechEvent
from dsbd_ort.speech.transcript import Segment, Transcript
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.source.sources import Sources
from tests.speech.audio_files import wav_bytes
from tests.speech.sounds import chirp, noise, speech_like, tone

PLAIN = {"num_beams": 3, "temperature": 0.0, "max_new_tokens": 30}
LONG, SHORT = chirp(2.1), speech_like(0.7)  # several windows, one
REQUESTS: list[tuple[NDArray[np.float32], dict[str, Any]]] = [
    (LONG, PLAIN),
    (SHORT, PLAIN),
    (tone(1.3), {**PLAIN, "num_beams": 1}),
    (noise(1.0), {**PLAIN, "return_timestamps": True}),
    (speech_like(0.9, 1), {**PLAIN, "language": "de", "task": "translate"}),
    (speech_like(0.9, 1), {**PLAIN, "language": "fr", "initial_prompt": "Das Haus"}),
    (tone(0.1, 90.0), {**PLAIN, "condition_on_previous_text": True}),
    (
        speech_like(0.5),
        {**PLAIN, "temperature": (0.0, 0.5), "compression_ratio_threshold": 0.1, "seed": 3},
    ),
]


@pytest.fixture(scope="module")
def alone(speech_pipe: Pipeline) -> list[Transcript]:
    """The pipeline's answer to each request."""
    return [speech_pipe.transcribe(audio, **options) for audio, options in REQUESTS]


@pytest.fixture
def service(speech_pipe: Pipeline, alone: list[Transcript]) -> Iterator[Service]:
    with Service(speech_pipe, ServiceLimits(max_requests=8)) as opened:
        yield opened


def check_equal(found: Transcript, wanted: Transcript) -> None:
    """Texts, tokens and times are equal; numbers as far as sums in other orders let them."""
    assert (found.text, found.language, found.task) == (wanted.text, wanted.language, wanted.task)
    assert len(found.segments) == len(wanted.segments)
    for one, other in zip(found.segments, wanted.segments, strict=True):
        assert one.token_ids == other.token_ids and one.text == other.text
        assert (one.start, one.end, one.seek) == (other.start, other.end, other.seek)
        assert one.temperature == other.temperature
        assert one.avg_logprob == pytest.approx(other.avg_logprob, abs=1e-4)
        assert one.no_speech_prob == pytest.approx(other.no_speech_prob, abs=1e-5)


def transcribed(
    service: Service, asked: list[tuple[NDArray[np.float32], dict[str, Any]]]
) -> list[Transcript]:
    """Transcribe all at a time."""
    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(lambda one: service.transcribe(one[0], **one[1]), asked))


def test_eight_at_a_time_are_those_alone(service: Service, alone: list[Transcript]) -> None:
    for found, wanted in zip(transcribed(service, REQUESTS), alone, strict=True):
        check_equal(found, wanted)
    assert len({each.text for each in alone}) > 4


def test_a_window_is_read_once_whatever_else_runs(
    service: Service, alone: list[Transcript]
) -> None:
    """A window has several requests, for its language and its text, with others between them.

    The requests of all audios may end in one iteration, after which no row depends on a window.
    """
    encoder: Any = service.pipeline.models.target.part(Sources).encoder
    own, sources = encoder._read, list[Any]()

    def counted(source: Any) -> Any:
        sources.append(source)
        return own(source)

    encoder._read = counted
    asked = [(audio, options) for audio, options in REQUESTS if "prompt" not in str(options)]
    try:
        transcribed(service, asked)
    finally:
        del encoder._read
    assert len(sources) == len(set(sources)) >= len(asked) - 1


def test_segments_come_before_the_end(service: Service, alone: list[Transcript]) -> None:
    segments: list[Segment] = []
    found = service.transcribe(LONG, on_segment=segments.append, **PLAIN)
    check_equal(found, alone[0])
    assert tuple(segments) == found.segments and segments
    assert {each.seek for each in segments} != {0}  # of several windows


def test_files_are_read(service: Service, alone: list[Transcript]) -> None:
    data = wav_bytes(SHORT, kind=3, bits=32)
    check_equal(service.transcribe(data, **PLAIN), alone[1])


def test_an_exception_of_on_segment_cancels(service: Service) -> None:
    def leave(segment: Segment) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        service.transcribe(LONG, on_segment=leave, **PLAIN)
    assert service.transcribe(SHORT, **PLAIN).segments


def test_invalid_requests_are_refused_at_once(service: Service) -> None:
    silent = np.zeros(0, np.float32)
    wrong = [(silent, {}), (b"no audio", {}), (SHORT, {"language": "x"}), (SHORT, {"task": "sing"})]
    for audio, options in wrong:
        with pytest.raises(InputError):
            service.submit_audio(audio, options, lambda event: None)


def test_an_option_that_contradicts_is_the_ending(service: Service) -> None:
    with pytest.raises(DsbdError, match="num_beams"):
        service.transcribe(SHORT, num_beams=0)


def test_a_transcription_is_cancelled(service: Service) -> None:
    events: SimpleQueue[SpeechEvent] = SimpleQueue()
    live = service.submit_audio(np.concatenate([LONG] * 20), PLAIN, events.put)
    while isinstance(event := events.get(timeout=60), Segment):
        live.cancel()
    assert isinstance(event, Cancelled)
    live.cancel()
    live.join()


def test_closing_finishes_those_that_there_are(
    speech_pipe: Pipeline, alone: list[Transcript]
) -> None:
    events: SimpleQueue[SpeechEvent] = SimpleQueue()
    with Service(speech_pipe) as service:
        service.submit_audio(LONG, PLAIN, events.put)
    while isinstance(event := events.get(timeout=60), Segment):
        pass
    assert isinstance(event, Transcript)
    check_equal(event, alone[0])
    with pytest.raises(ServiceClosedError, match="closed"):
        service.submit_audio(SHORT, PLAIN, events.put)


def test_closing_without_them_cancels(speech_pipe: Pipeline) -> None:
    events: SimpleQueue[SpeechEvent] = SimpleQueue()
    service = Service(speech_pipe)
    begun = threading.Event()

    def on_event(event: SpeechEvent) -> None:
        begun.set()
        events.put(event)

    service.submit_audio(np.concatenate([LONG] * 20), PLAIN, on_event)
    assert begun.wait(60)
    service.close(drain=False)
    while isinstance(event := events.get(timeout=60), Segment):
        pass
    assert isinstance(event, Cancelled)


def test_a_callback_may_close_the_service(speech_pipe: Pipeline) -> None:
    is_over = threading.Event()
    service = Service(speech_pipe)

    def on_event(event: SpeechEvent) -> None:
        if not isinstance(event, Segment):
            service.close()
            is_over.set()

    service.submit_audio(SHORT, PLAIN, on_event)
    assert is_over.wait(60)
    service.close()
