"""The one thread that runs the engines: takes requests in, iterates, tells what came of it."""

from __future__ import annotations

import logging
import threading

from dsbd_errors import DsbdError
from dsbd_ort.decoding import IterationOutput
from dsbd_ort.decoding.batched_decoder import BatchedDecoder, Outcome, Progress, Tree
from dsbd_ort.engine.admission import Admission
from dsbd_ort.engine.errors import EnginesEndedError, InternalError, ServiceClosedError
from dsbd_ort.engine.events import Cancelled, Ending, ServiceEvent
from dsbd_ort.engine.live_request import LiveRequest
from dsbd_ort.generated import StreamStep
from dsbd_ort.memory_error import capacity_error
from dsbd_ort.pipeline import Pipeline
from dsbd_runtime.causal_lm import CausalLM

_log = logging.getLogger(__name__)


class EngineLoop:
    """Runs in a thread of its own from ``start`` to ``close``.

    Attributes:
        models: target and draft, once it has started.
    """

    models: tuple[CausalLM, CausalLM]

    def __init__(self, pipeline: Pipeline, admission: Admission) -> None:
        self._pipeline = pipeline
        self._admission = admission
        self._changed = threading.Condition()  # guards admission and the next four
        self._unanswered: dict[LiveRequest, None] = {}  # in the order they came
        self._failure: str | None = None
        self._is_closing = False
        self._gives_up = False
        self._refusal: BaseException | None = None
        self._has_started = threading.Event()
        self._thread = threading.Thread(target=self._work, name="dsbd-engines", daemon=True)
        self._trees: dict[Tree, LiveRequest] = {}

    def start(self) -> None:
        """Start; return once the engines are held. Raises what holding them raises."""
        self._thread.start()
        self._has_started.wait()
        if self._refusal is not None:
            raise self._refusal

    @property
    def is_open(self) -> bool:
        """Whether requests are taken: neither closing nor broken off."""
        return not self._is_closing

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is called by the thread that runs the engines."""
        return threading.current_thread() is self._thread

    def enqueue(self, request: LiveRequest) -> None:
        """Take a request.

        Raises what Admission.enqueue raises, ServiceClosedError and EnginesEndedError.
        """
        with self._changed:
            if self._failure is not None:
                raise EnginesEndedError(self._failure)
            if self._is_closing:
                raise ServiceClosedError("the service is closing; send the request elsewhere")
            self._admission.enqueue(request)
            self._unanswered[request] = None
            self._changed.notify()

    def wake(self) -> None:
        """Have a look at the requests, should there be nothing else to do."""
        with self._changed:
            self._changed.notify()

    def close(self, *, drain: bool) -> None:
        """Take no more requests, answer those there are or give them up, and end the thread.

        In that thread itself, which a callback is called in, it returns before this is done.
        """
        with self._changed:
            self._is_closing = True
            self._gives_up = self._gives_up or not drain
            self._changed.notify()
        if not self.is_own_thread:
            self._thread.join()

    def _work(self) -> None:
        try:
            with self._pipeline.engines() as self.models:
                forest = BatchedDecoder(
                    *self.models,
                    max_rows=self._admission.max_rows,
                    shares_prefixes=self._pipeline.reuses_prefix,
                )
                self._has_started.set()
                while self._take_in(forest):
                    for progress in forest.iterate():
                        self._tell(forest, progress)
        except BaseException as error:
            self._break_off(error)
        finally:
            self._has_started.set()

    def _take_in(self, forest: BatchedDecoder) -> bool:
        """Let requests leave and join; wait while there is none; return False at the end."""
        while True:
            with self._changed:
                gone = self._leave(forest)
                joining = list(iter(self._admission.admit, None))
                if not gone and not joining and not self._trees:
                    if self._is_closing and not self._admission.waiting:
                        return False
                    self._changed.wait()
            for request in gone:  # without the lock: who is told may wait for who wants it
                self._finish(request, Cancelled())
            for request in joining:
                self._join(forest, request)
            if self._trees:
                return True

    def _leave(self, forest: BatchedDecoder) -> list[LiveRequest]:
        """Let the requests that are given up leave queue and forest; return them."""
        for request in (*self._admission.waiting, *self._admission.live):
            request.is_cancelled = request.is_cancelled or self._gives_up
        gone = self._admission.withdraw_cancelled()
        for tree, request in list(self._trees.items()):
            if request.is_cancelled:
                forest.leave(tree)
                self._release(tree)
                gone.append(request)
        return gone

    def _join(self, forest: BatchedDecoder, request: LiveRequest) -> None:
        try:
            tree = forest.join(self._pipeline.planned(request.request))
        except BaseException as error:
            with self._changed:
                self._admission.release(request)
            self._finish(request, _as_told(error))
            return
        self._trees[tree] = request

    def _tell(self, forest: BatchedDecoder, progress: Progress) -> None:
        """Tell a caller what an iteration brought to its request."""
        tree = progress.tree
        request = self._trees.get(tree)
        if request is None:  # it failed in an earlier event of this iteration
            return
        try:
            step, ending = self._as_events(request, progress.event)
        except BaseException as error:  # of the tokenizer, at the text of this request
            forest.leave(tree)
            step, ending = None, _as_told(error)
        if step is not None:
            _notify(request, step)
        if ending is not None:
            self._release(tree)
            self._finish(request, ending)

    def _as_events(
        self, request: LiveRequest, event: IterationOutput | Outcome
    ) -> tuple[StreamStep | None, Ending | None]:
        """Return the step and the ending that an event means; a result brings the last text."""
        if isinstance(event, IterationOutput):
            return request.texts.push(event), None
        if isinstance(event, BaseException):
            return None, _as_told(event)
        result = self._pipeline.with_text(self._pipeline.with_peak(event), request.request.config)
        return request.texts.finish(result.sequences[0]), result

    def _release(self, tree: Tree) -> None:
        """Give back the place of a request that has left the forest."""
        request = self._trees.pop(tree)
        with self._changed:
            self._admission.release(request)

    def _finish(self, request: LiveRequest, ending: Ending) -> None:
        """Tell a request its last event."""
        with self._changed:
            del self._unanswered[request]
        _notify(request, ending)

    def _break_off(self, error: BaseException) -> None:
        """Leave nobody waiting for a thread that has ended."""
        self._refusal = error
        failure = (
            f"the thread that runs the engines has ended: {_shown(error)}; close the service and "
            "open it again"
        )
        with self._changed:
            self._failure, self._is_closing = failure, True
            left = list(self._unanswered)
            self._unanswered.clear()
            self._trees.clear()
            self._admission.waiting.clear()
            self._admission.live.clear()
        for request in left:
            _notify(request, EnginesEndedError(failure))
        if self._has_started.is_set():
            _log.critical("the thread that runs the engines has ended", exc_info=error)


def _notify(request: LiveRequest, event: ServiceEvent) -> None:
    try:
        request.on_event(event)
    except BaseException:  # the caller's; the others must not suffer
        request.is_cancelled = True
        _log.exception("a request's on_event has failed; the request is given up")


def _as_told(error: BaseException) -> DsbdError:
    """Return the error as callers get it."""
    if isinstance(error, DsbdError):
        return error
    if isinstance(error, MemoryError):
        return capacity_error(error)
    _log.error("a request met a bug", exc_info=error)
    return InternalError(f"internal error, {_shown(error)}; see the service's log")


def _shown(error: BaseException) -> str:
    """Return the type of an error and its text, which may be a caller's code as well."""
    try:
        text = str(error)
    except BaseException:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
