"""A transcription on a service: its windows become engine requests, one after another."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from dsbd_errors import DsbdError
from dsbd_ort.decoding import DecodeResult, DecodingRequest
from dsbd_ort.engine.errors import InternalError
from dsbd_ort.engine.scheduler import Cancelled, ServiceEvent, Submission
from dsbd_ort.requests.results import GenerationResult, StreamPiece
from dsbd_ort.speech.transcript import Segment, Transcript
from dsbd_ort.speech.transcription import Transcription, answered
from dsbd_ort.speech.words import Align
from dsbd_runtime.parts.source.alignment import AlignedTokens
from dsbd_runtime.parts.source.speech_entry import SoundFeatures

_log = logging.getLogger(__name__)

SpeechEnding = Transcript | DsbdError | Cancelled
"""The last event of a transcription."""

SpeechEvent = Segment | SpeechEnding


Submit = Callable[[DecodingRequest, Callable[[ServiceEvent], None], bool], Submission]
"""Submits an engine request: arguments are the request, a function that gets its events, and
``is_further`` (see ``Service.submit_request``)."""


class _Cancellation(Exception):
    """The transcription must end without a transcript."""


class LiveTranscription:
    """The transcription of one audio, in its own thread, which waits for the engines.

    The service has only the engine requests of one window at a time, one request for each sample.
    """

    def __init__(
        self,
        transcription: Transcription,
        submit: Submit,
        align: Align,
        on_event: Callable[[SpeechEvent], None],
    ) -> None:
        """``on_event`` is called in the thread."""
        self._transcription = transcription
        self._submit = submit
        self._align = align
        self._on_event = on_event
        self._is_cancelled = False
        self._submissions: list[Submission] = []
        self._thread = threading.Thread(target=self._run, name="dsbd-transcription", daemon=True)

    def start(self, on_end: Callable[[LiveTranscription], None]) -> None:
        """Start the thread; ``on_end`` is called in it after the last event."""
        self._on_end = on_end
        self._thread.start()

    def cancel(self) -> None:
        """End it without a transcript; may be called again, and after its end."""
        self._is_cancelled = True  # first: ``_decoded`` reads it after it has added a request
        for submission in list(self._submissions):
            submission.cancel()

    def join(self) -> None:
        """Wait for its end; in its own thread return at once."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            ending = self._ending()
            try:
                self._on_event(ending)
            except BaseException:  # raised by the caller's code
                _log.exception("on_event of a transcription raised at its end")
        finally:
            self._on_end(self)

    def _ending(self) -> SpeechEnding:
        try:
            steps = self._transcription.steps(self._on_event, self._aligned)
            return answered(steps, self._decoded)
        except _Cancellation:
            return Cancelled()
        except DsbdError as error:
            return error
        except BaseException as error:
            _log.exception("internal error in a transcription")
            return InternalError(
                f"internal error, {type(error).__name__}: {error}; see the service's log"
            )

    def _aligned(
        self, source: SoundFeatures, prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> AlignedTokens:
        if self._is_cancelled:
            raise _Cancellation
        return self._align(source, prompt_ids, token_ids)

    def _decoded(self, requests: Sequence[DecodingRequest]) -> list[DecodeResult]:
        if self._is_cancelled:
            raise _Cancellation
        self._submissions = []
        queues: list[SimpleQueue[ServiceEvent]] = [SimpleQueue() for _ in requests]
        try:
            for number, (request, events) in enumerate(zip(requests, queues, strict=True)):
                self._submissions.append(self._submit(request, events.put, number > 0))
                if self._is_cancelled:
                    self._submissions[-1].cancel()
            return [_result(events) for events in queues]
        except BaseException:
            for submission in self._submissions:
                submission.cancel()
            raise


def _result(events: SimpleQueue[ServiceEvent]) -> DecodeResult:
    while isinstance(event := events.get(), StreamPiece):
        pass
    if isinstance(event, GenerationResult):
        return DecodeResult(
            list(event.sequences), event.stats, prompt_logprobs=event.prompt_logprobs
        )
    raise _Cancellation if isinstance(event, Cancelled) else event
