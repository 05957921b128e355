"""Engine loop: the one thread that runs the engines, admits requests and delivers their events."""

from __future__ import annotations

import logging
import threading

from dsbd_errors import DsbdError
from dsbd_ort.decoding import IterationOutput
from dsbd_ort.decoding.batched_decoder import (
    BatchedDecoder,
    BatchMember,
    Outcome,
    Preempted,
    Progress,
)
from dsbd_ort.engine.errors import EnginesEndedError, InternalError, ServiceClosedError
from dsbd_ort.engine.scheduler import Cancelled, Ending, LiveRequest, Scheduler, ServiceEvent
from dsbd_ort.model_pair import capacity_error
from dsbd_ort.pipeline import Pipeline
from dsbd_ort.results import GenerationResult, StreamPiece
from dsbd_runtime.causal_lm import CausalLM

_log = logging.getLogger(__name__)
_LONGEST_SLEEP_S = 5.0  # until it is seen that the service was abandoned, where nothing said so


class EngineLoop:
    """Runs requests in a thread of its own, from ``start`` to ``close``.

    Attributes:
        models: target and, where there is one, draft, after ``start``.
    """

    models: tuple[CausalLM, CausalLM | None]

    def __init__(self, pipeline: Pipeline, scheduler: Scheduler) -> None:
        self._pipeline = pipeline
        self._scheduler = scheduler
        self._changed = threading.Condition()  # guards the scheduler and the next four
        self._unfinished: dict[LiveRequest, None] = {}  # in the order of arrival
        self._failure: str | None = None
        self._is_closing = False
        self._cancels_all = False
        self._start_error: BaseException | None = None
        self._has_started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dsbd-engines", daemon=True)
        self._members: dict[BatchMember, LiveRequest] = {}

    def start(self) -> None:
        """Start the thread and wait until it holds the engines; raises as ``Pipeline.engines``."""
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
        """Whether the caller runs in the engine loop's thread."""
        return threading.current_thread() is self._thread

    def enqueue(self, request: LiveRequest) -> None:
        """Add a request to the queue.

        Raises:
            ServiceClosedError, EnginesEndedError: no requests are accepted any more.
            CapacityError, QueueFullError: see ``Scheduler.enqueue``.
        """
        with self._changed:
            if self._failure is not None:
                raise EnginesEndedError(self._failure)
            if self._is_closing:
                raise ServiceClosedError("the service is closed or closing; use another one")
            self._scheduler.enqueue(request)
            self._unfinished[request] = None
            self._changed.notify()

    def wake(self) -> None:
        """Wake the thread, if it is waiting, to look for cancelled requests."""
        with self._changed:
            self._changed.notify()

    def close(self, *, drain: bool) -> None:
        """Reject new requests, finish or cancel the others, and end the thread.

        Called from a callback, that is in the thread itself, it returns before this is done.
        """
        with self._changed:
            self._is_closing = True
            self._cancels_all = self._cancels_all or not drain
            self._changed.notify()
        if not self.is_own_thread:
            self._thread.join()

    def abandon(self) -> None:
        """Finish the requests that there are and end the thread, which nobody waits for.

        For the finalizer of a service: it may run in any thread, this one too, between any two of
        its instructions, and so waits for no lock.
        """
        self._is_closing = True
        if self._changed.acquire(blocking=False):
            try:
                self._changed.notify()
            finally:
                self._changed.release()

    def _run(self) -> None:
        try:
            with self._pipeline.engines() as self.models:
                decoder = BatchedDecoder(
                    *self.models,
                    max_rows=self._scheduler.max_rows,
                    shares_prefixes=self._pipeline.reuses_prefix,
                    costs=self._pipeline.costs,
                )
                self._has_started.set()
                while self._schedule(decoder):
                    for progress in decoder.iterate():
                        self._deliver(decoder, progress)
        except BaseException as error:
            self._fail_all(error)
        finally:
            self._has_started.set()

    def _schedule(self, decoder: BatchedDecoder) -> bool:
        """Remove cancelled requests and admit waiting ones, until at least one runs.

        Returns:
            False when the loop is closing and no request is left.
        """
        while True:
            with self._changed:
                cancelled = self._remove_cancelled(decoder)
                admitted = self._admit(decoder)
                if not cancelled and not admitted and not self._members:
                    if self._is_closing and not self._scheduler.waiting:
                        return False
                    self._changed.wait(_LONGEST_SLEEP_S)
            for request in cancelled:  # unlocked: on_event may wait for a thread that submits
                if request.preempted is not None:
                    decoder.leave(request.preempted)
                self._finish(request, Cancelled())
            for request in admitted:
                self._join(decoder, request)
            if self._members:
                return True

    def _remove_cancelled(self, decoder: BatchedDecoder) -> list[LiveRequest]:
        """Remove cancelled requests, waiting and running ones; return them."""
        for request in (*self._scheduler.waiting, *self._scheduler.running):
            request.is_cancelled = request.is_cancelled or self._cancels_all
        cancelled = self._scheduler.remove_cancelled()
        for member, request in list(self._members.items()):
            if request.is_cancelled:
                decoder.leave(member)
                self._release(member)
                cancelled.append(request)
        return cancelled

    def _admit(self, decoder: BatchedDecoder) -> list[LiveRequest]:
        """Admit those for whom rows are free beside what the others use and are expected to."""
        if not self._scheduler.may_admit:
            return []
        num_taken = decoder.num_used_rows
        for member, request in self._members.items():
            num_taken += max(request.rows_reserved - member.num_rows, 0)
        return self._scheduler.admit(num_taken)

    def _join(self, decoder: BatchedDecoder, request: LiveRequest) -> None:
        """Let an admitted request begin, or resume."""
        try:
            if request.preempted is None:
                member = decoder.join(self._pipeline.planned(request.request))
            else:
                member, request.preempted = request.preempted, None
                decoder.resume(member)
        except BaseException as error:
            with self._changed:
                self._scheduler.release(request)
            self._finish(request, _as_dsbd_error(error))
            return
        self._members[member] = request

    def _deliver(self, decoder: BatchedDecoder, progress: Progress) -> None:
        """Deliver the result of an iteration to its request."""
        member = progress.member
        request = self._members.get(member)
        if request is None:  # it failed in an earlier event of this iteration
            return
        if isinstance(progress.event, Preempted):
            del self._members[member]
            with self._changed:
                self._scheduler.preempt(request, member)
            return
        try:
            piece, ending = self._as_events(request, progress.event)
        except BaseException as error:  # of the tokenizer, at the text of this request
            decoder.leave(member)
            piece, ending = None, _as_dsbd_error(error)
        if piece is not None:
            _notify(request, piece)
        if ending is not None:
            if isinstance(ending, GenerationResult):
                was_cut = ending.sequences[0].finish_reason == "length"
                num_rows = member.num_rows_at_end - request.num_prompt_tokens
                rows = self._scheduler.answer_rows(request.request.config.width)
                rows.learn(num_rows, was_cut=was_cut)
            self._release(member)
            self._finish(request, ending)

    def _as_events(
        self, request: LiveRequest, event: IterationOutput | Outcome
    ) -> tuple[StreamPiece | None, Ending | None]:
        """Return the piece and the ending of an event; a result has both: the last text, itself."""
        if isinstance(event, IterationOutput):
            return request.texts.push(event), None
        if isinstance(event, BaseException):
            return None, _as_dsbd_error(event)
        result = self._pipeline.with_text(self._pipeline.with_peak(event), request.request)
        return request.texts.finish(result.sequences[0]), result

    def _release(self, member: BatchMember) -> None:
        """Release the rows of a request that has left the decoder."""
        request = self._members.pop(member)
        with self._changed:
            self._scheduler.release(request)

    def _finish(self, request: LiveRequest, ending: Ending) -> None:
        """Deliver the last event of a request."""
        with self._changed:
            del self._unfinished[request]
        _notify(request, ending)

    def _fail_all(self, error: BaseException) -> None:
        """End every request with an error, because the thread ends."""
        self._start_error = error
        failure = (
            f"the thread that runs the engines has ended: {_shown(error)}; close the service and "
            "open it again"
        )
        with self._changed:
            self._failure, self._is_closing = failure, True
            unfinished = list(self._unfinished)
            self._unfinished.clear()
            self._members.clear()
            self._scheduler.waiting.clear()
            self._scheduler.running.clear()
        for request in unfinished:
            _notify(request, EnginesEndedError(failure))
        if self._has_started.is_set():
            _log.critical("the thread that runs the engines has ended", exc_info=error)


def _notify(request: LiveRequest, event: ServiceEvent) -> None:
    try:
        request.on_event(event)
    except BaseException:  # of the caller's code; the other requests go on
        request.is_cancelled = True
        _log.exception("on_event of a request raised; the request is cancelled")


def _as_dsbd_error(error: BaseException) -> DsbdError:
    """Return the error that the caller gets."""
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
