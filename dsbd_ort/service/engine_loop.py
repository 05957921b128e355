"""The one thread that runs the engines: takes requests in, iterates, tells what came of it."""

from __future__ import annotations

import logging
import threading

from dsbd_errors import DsbdError
from dsbd_ort.decoding import DecodeStep
from dsbd_ort.decoding.shared_forest import Outcome, Progress, SharedForest, Tree
from dsbd_ort.memory_error import capacity_error
from dsbd_ort.pipeline import Pipeline
from dsbd_ort.service.admission import Admission
from dsbd_ort.service.errors import InternalError, ServiceClosedError
from dsbd_ort.service.events import Cancelled, Ending, ServiceEvent
from dsbd_ort.service.live_request import LiveRequest
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
        self._changed = threading.Condition()  # guards admission and the two flags
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

    def enqueue(self, request: LiveRequest) -> None:
        """Take a request; see Admission.enqueue for the errors, and ServiceClosedError."""
        with self._changed:
            if self._is_closing:
                raise ServiceClosedError("the service is closing; send the request elsewhere")
            self._admission.enqueue(request)
            self._changed.notify()

    def wake(self) -> None:
        """Have a look at the requests, should there be nothing else to do."""
        with self._changed:
            self._changed.notify()

    def close(self, *, drain: bool) -> None:
        """Take no more requests, answer those there are or give them up, and end the thread."""
        with self._changed:
            self._is_closing = True
            self._gives_up = self._gives_up or not drain
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        try:
            with self._pipeline.engines() as self.models:
                forest = SharedForest(
                    *self.models,
                    max_rows=self._admission.max_rows,
                    shares_prefixes=self._pipeline.reuses_prefix,
                )
                self._has_started.set()
                while self._take_in(forest):
                    for progress in forest.iterate():
                        self._tell(progress)
        except BaseException as error:
            self._break_off(error)
        finally:
            self._has_started.set()

    def _take_in(self, forest: SharedForest) -> bool:
        """Let requests leave and join; wait while there is none; return False at the end."""
        with self._changed:
            while True:
                self._let_go(forest)
                joining = list(iter(self._admission.admit, None))
                if joining or self._trees:
                    break
                if self._is_closing and not self._admission.waiting:
                    return False
                self._changed.wait()
        for request in joining:
            self._join(forest, request)
        return True

    def _let_go(self, forest: SharedForest) -> None:
        """Part with the requests that are given up."""
        for request in (*self._admission.waiting, *self._admission.live):
            request.is_cancelled = request.is_cancelled or self._gives_up
        for request in self._admission.withdraw_cancelled():
            _notify(request, Cancelled())
        for tree, request in list(self._trees.items()):
            if request.is_cancelled:
                forest.leave(tree)
                self._end(tree, Cancelled())

    def _join(self, forest: SharedForest, request: LiveRequest) -> None:
        try:
            tree = forest.join(self._pipeline.planned(request.request))
        except Exception as error:
            with self._changed:
                self._admission.release(request)
            _notify(request, _as_told(error))
            return
        self._trees[tree] = request

    def _tell(self, progress: Progress) -> None:
        request = self._trees[progress.tree]
        event = progress.event
        if isinstance(event, DecodeStep):
            _notify(request, request.texts.push(event))
        else:
            self._end(progress.tree, self._ending(request, event))

    def _ending(self, request: LiveRequest, outcome: Outcome) -> Ending:
        """Return what a request ends with, after telling the last of its text."""
        if isinstance(outcome, Exception):
            return _as_told(outcome)
        result = self._pipeline.with_text(self._pipeline.with_peak(outcome), request.request.config)
        _notify(request, request.texts.finish(result.sequences[0]))
        return result

    def _end(self, tree: Tree, ending: Ending) -> None:
        request = self._trees.pop(tree)
        with self._changed:
            self._admission.release(request)
        _notify(request, ending)

    def _break_off(self, error: BaseException) -> None:
        """Leave nobody waiting for a thread that has ended."""
        self._refusal = error
        with self._changed:
            self._is_closing = True
            left = [*self._trees.values(), *self._admission.waiting]
            self._admission.waiting.clear()
            self._admission.live.clear()
        for request in left:
            _notify(request, _as_told(error))
        if self._has_started.is_set():
            _log.critical("the thread that runs the engines has ended", exc_info=error)


def _notify(request: LiveRequest, event: ServiceEvent) -> None:
    try:
        request.on_event(event)
    except Exception:  # the caller's; the others must not suffer
        _log.exception("a request's on_event has failed; the request is given up")
        request.is_cancelled = True


def _as_told(error: BaseException) -> DsbdError:
    """Return the error as callers get it."""
    if isinstance(error, DsbdError):
        return error
    if isinstance(error, MemoryError):
        return capacity_error(error)
    _log.error("a request met a bug", exc_info=error)
    return InternalError(f"internal error, {type(error).__name__}: {error}; see the service's log")
