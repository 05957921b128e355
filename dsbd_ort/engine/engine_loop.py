"""Engine loop: the one thread that runs the engines, admits requests and delivers their events."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from dsbd_errors import DsbdError
from dsbd_forward.forward import Source
from dsbd_ort.decoding import IterationOutput
from dsbd_ort.decoding.decoder import Decoder, Outcome, Preempted, Progress
from dsbd_ort.engine.errors import EnginesEndedError, InternalError, ServiceClosedError
from dsbd_ort.engine.scheduler import (
    Cancelled,
    Ending,
    Scheduler,
    ServiceEvent,
    Submission,
)
from dsbd_ort.model_pair import capacity_error
from dsbd_ort.pipeline import Pipeline
from dsbd_ort.requests.results import GenerationResult, StreamPiece
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.parts.source.sources import Sources

_log = logging.getLogger(__name__)
_LONGEST_SLEEP_S = 5.0  # between two checks whether the service was abandoned
_Result = TypeVar("_Result")


class EngineLoop:
    """Runs requests in a thread of its own, from ``start`` to ``close``.

    models: target and draft (None without a draft), after ``start``.
    """

    models: tuple[CausalLM, CausalLM | None]

    def __init__(self, pipeline: Pipeline, scheduler: Scheduler) -> None:
        self._pipeline = pipeline
        self._scheduler = scheduler
        self._changed = threading.Condition()  # guards the scheduler and the next three
        self._calls: list[tuple[Callable[[CausalLM], Any], Future[Any]]] = []
        self._failure: str | None = None
        self._is_closing = False
        self._start_error: BaseException | None = None
        self._has_started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dsbd-engines", daemon=True)

    def start(self) -> None:
        """Start the thread and wait for the engines; raises the errors of ``ModelPair.engines``."""
        self._thread.start()
        self._has_started.wait()
        if self._start_error is not None:
            raise self._start_error

    @property
    def is_open(self) -> bool:
        """Whether requests are accepted: neither closing nor ended by a failure."""
        return not self._is_closing

    @property
    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def enqueue(self, submission: Submission) -> None:
        """Add a request to the queue; raises the errors of ``Scheduler.enqueue`` and ``call``."""
        with self._changed:
            self._check_is_open()
            self._scheduler.enqueue(submission)
            self._changed.notify()

    def call(self, work: Callable[[CausalLM], _Result]) -> _Result:
        """Return the result of ``work(target)``, run in the loop's thread between two iterations.

        Call it from another thread, which waits. If the work fails, the loop goes on.
        ServiceClosedError, EnginesEndedError: the loop has ended or is ending.
        """
        done: Future[_Result] = Future()
        with self._changed:
            self._check_is_open()
            self._calls.append((work, done))
            self._changed.notify()
        return done.result()

    def _check_is_open(self) -> None:
        if self._failure is not None:
            raise EnginesEndedError(self._failure)
        if self._is_closing:
            raise ServiceClosedError("the service is closed or closing; use another one")

    def wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def close(self, *, drain: bool) -> None:
        """Reject new requests, finish or cancel the others, and end the thread.

        Called in a callback, which runs in this thread, it returns before the thread has ended.
        """
        with self._changed:
            self._is_closing = True
            for submission in self._scheduler.unfinished if not drain else ():
                submission.is_cancelled = True
            self._changed.notify()
        if not self.is_own_thread:
            self._thread.join()

    def abandon(self) -> None:
        """Let the thread finish its requests and end, without waiting for it.

        For the finalizer of a service: it may run between any two instructions of any thread, even
        of this one, so it must not wait for a lock.
        """
        self._is_closing = True
        if self._changed.acquire(blocking=False):
            try:
                self._changed.notify()
            finally:
                self._changed.release()

    def _run(self) -> None:
        try:
            with self._pipeline.models.engines() as self.models:
                decoder = self._pipeline.models.new_decoder(self._scheduler.max_rows)
                self._has_started.set()
                while self._schedule(decoder):
                    self._iterate(decoder)
        except BaseException as error:
            self._fail_all(error)
        finally:
            self._has_started.set()

    def _iterate(self, decoder: Decoder) -> None:
        """Run one iteration; return with no references to requests, which refer to a service."""
        submission_by_live = {submission.live: submission for submission in self._scheduler.running}
        for progress in decoder.iterate():
            self._deliver(decoder, submission_by_live[progress.live], progress)

    def _schedule(self, decoder: Decoder) -> bool:
        """Do the calls, end cancelled requests and admit waiting ones, until at least one runs.

        False: the loop is closing and no request is left.
        """
        scheduler = self._scheduler
        while True:
            with self._changed:
                calls, self._calls = self._calls, []
                cancelled = scheduler.cancelled
                admitted = [] if cancelled else self._admit(decoder)
                if not calls and not scheduler.unfinished and self._is_closing:
                    return False
                if not calls and not cancelled and not scheduler.running:
                    self._changed.wait(_LONGEST_SLEEP_S)
            for work, done in calls:
                try:
                    done.set_result(work(self.models[0]))
                except BaseException as error:
                    done.set_exception(_as_dsbd_error(error))
            for submission in cancelled:  # unlocked: on_event may wait for a thread that submits
                if submission.live is not None:
                    decoder.leave(submission.live)
                self._end(submission, Cancelled())
            for submission in admitted:
                self._join(decoder, submission)
            if scheduler.running and not cancelled:
                return True

    def _admit(self, decoder: Decoder) -> list[Submission]:
        """Admit requests while rows are free that running requests are not expected to use."""
        if not self._scheduler.may_admit:
            return []
        num_taken = decoder.num_used_rows
        for submission in self._scheduler.running:
            num_taken += max(submission.rows_reserved - submission.num_rows, 0)
        return self._scheduler.admit(num_taken, self._most_sources, decoder.accepts)

    def _most_sources(self, sources: Sequence[Source]) -> int:
        models = (model for model in self.models if model is not None)
        readers = [part for model in models for part in model.parts_of(Sources)]
        return min((part.slots.most_together(sources) for part in readers), default=len(sources))

    def _join(self, decoder: Decoder, submission: Submission) -> None:
        try:
            if submission.live is None:
                submission.live = decoder.join(self._pipeline.models.planned(submission.request))
            else:
                decoder.resume(submission.live)
        except BaseException as error:
            self._end(submission, _as_dsbd_error(error))

    def _deliver(self, decoder: Decoder, submission: Submission, progress: Progress) -> None:
        if not submission.is_running:  # it failed at an earlier event of this iteration
            return
        if isinstance(progress.event, Preempted):
            with self._changed:
                self._scheduler.preempt(submission)
            return
        try:
            piece, ending = self._as_events(submission, progress.event)
        except BaseException as error:  # raised by the tokenizer for the text of this request
            decoder.leave(progress.live)
            piece, ending = None, _as_dsbd_error(error)
        if piece is not None:
            _notify(submission, piece)
        if isinstance(ending, GenerationResult):
            was_cut = ending.sequences[0].finish_reason == "length"
            num_rows = progress.live.num_rows_at_end - submission.num_prompt_tokens
            rows = self._scheduler.answer_rows(submission.request.config.num_beams)
            rows.learn(num_rows, was_cut=was_cut)
        if ending is not None:
            self._end(submission, ending)

    def _as_events(
        self, submission: Submission, event: IterationOutput | Outcome
    ) -> tuple[StreamPiece | None, Ending | None]:
        if isinstance(event, IterationOutput):
            return submission.texts.push(event), None
        if isinstance(event, BaseException):
            return None, _as_dsbd_error(event)
        result = self._pipeline.with_text(
            self._pipeline.models.with_peak(event), submission.request
        )
        return submission.texts.finish(result.sequences[0]), result

    def _end(self, submission: Submission, ending: Ending) -> None:
        with self._changed:
            self._scheduler.release(submission)
        _notify(submission, ending)

    def _fail_all(self, error: BaseException) -> None:
        self._start_error = error
        failure = (
            f"the thread that runs the engines has ended: {_shown(error)}; close the service and "
            "open it again"
        )
        with self._changed:
            self._failure, self._is_closing = failure, True
            unfinished = self._scheduler.unfinished
            calls, self._calls = self._calls, []
            for submission in unfinished:
                self._scheduler.release(submission)
        for _, done in calls:
            done.set_exception(EnginesEndedError(failure))
        for submission in unfinished:
            _notify(submission, EnginesEndedError(failure))
        if self._has_started.is_set():
            _log.critical("the thread that runs the engines has ended", exc_info=error)


def _notify(submission: Submission, event: ServiceEvent) -> None:
    try:
        submission.on_event(event)
    except BaseException:  # raised by the caller's code; the other requests go on
        submission.is_cancelled = True
        _log.exception("on_event of a request raised; the request is cancelled")


def _as_dsbd_error(error: BaseException) -> DsbdError:
    if isinstance(error, DsbdError):
        return error
    if isinstance(error, MemoryError):
        return capacity_error(error)
    _log.error("internal error in a request", exc_info=error)
    return InternalError(f"internal error, {_shown(error)}; see the service's log")


def _shown(error: BaseException) -> str:
    """Return type and text of an error; its ``__str__`` may be a caller's code and raise."""
    try:
        text = str(error)
    except BaseException:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
