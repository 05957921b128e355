"""Cost of each step of the loop's iterations, in microseconds and in calls.

The functions of each step are wrapped while a request runs. If a step calls a function of another
step, that time counts for the other step only. Calls of Python and of C functions are counted in a
separate run, because counting takes longer than most calls.
"""

import contextlib
import functools
import importlib
import inspect
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

from dsbd_ort.decoding import DecodingStats
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.beams import Agreement
from dsbd_ort.decoding.computed_distributions import ComputedDistributions
from dsbd_ort.decoding.draft_stage import DraftStage
from dsbd_ort.decoding.drafting.draft import FixedDraftPolicy
from dsbd_ort.decoding.drafting.throughput import ThroughputDraftPolicy
from dsbd_ort.decoding.forest_runner import ForestRunner
from dsbd_ort.decoding.kv_cache import SharedKVCache
from dsbd_ort.decoding.rule import LayerBuilder
from dsbd_ort.decoding.sample_rule import GumbelCoupling, SampleRule
from dsbd_ort.decoding.search_rule import SearchRule
from dsbd_ort.decoding.stats import StatsRecorder
from dsbd_runtime.engine.causal_lm import CausalLM
from scripts.document_sections import table

ENGINE = "engine"
_LOOP = importlib.import_module("dsbd_ort.decoding.decode")  # the package's `decode` is a function
_STAGE = importlib.import_module("dsbd_ort.decoding.draft_stage")
_POLICY = "rest", "begin", "wants_layer", "takes_all", "choose", "choose_forced", "observe"
STEPS: dict[str, tuple[tuple[type | ModuleType, tuple[str, ...]], ...]] = {
    "draft": (
        (DraftStage, ("draft",)),
        (_STAGE, ("draft_forest",)),
        (FixedDraftPolicy, _POLICY),
    ),
    "policy": ((ThroughputDraftPolicy, _POLICY),),
    "forward": (
        (BatchedDecoder, ("_run_together",)),
        (ForestRunner, ("compute",)),
        (SharedKVCache, ("forward",)),
        (CausalLM, ("forward",)),
    ),
    "warp": ((ComputedDistributions, ("append",)),),
    "select": (
        (_LOOP, ("_verify_and_select",)),
        (ComputedDistributions, ("joint",)),
        (ForestRunner, ("are_computed", "read_left_out")),
        (GumbelCoupling, ("propose", "scores")),
        (SampleRule, ("is_finished",)),
        (SearchRule, ("propose", "draft_scores", "is_finished")),
        (LayerBuilder, ("descended",)),
    ),
    "prune": ((_LOOP, ("_iteration", "_prune")),),
    "observe": ((StatsRecorder, ("observe",)), (Agreement, ("update",))),
}
"""For each step: classes and modules, and their functions that do the step. All other time is
counted as "loop"."""
OTHER = "loop"
NAMES = (*STEPS, OTHER)

Clock = Callable[[], float]
Request = Callable[[int], DecodingStats]
"""Decodes with a seed; returns the statistics."""


def table_of(runs: dict[str, Request], engine: tuple[type, str], repetitions: int) -> list[str]:
    """Return a table: microseconds (medians) and calls per iteration, by run and step.

    engine: the class whose method is a call of an engine, and the method.
    """
    rows = []
    for name, request in runs.items():
        request(0)
        spent = [_spent(request, engine, seed) for seed in range(1, 1 + repetitions)]
        counted = Budget()
        with counted.counted(engine):
            num_iterations = request(1).num_iterations
        calls = {step: counted.calls[step] / num_iterations for step in NAMES}
        cells = [
            f"{statistics.median(each[step] for each in spent):.0f} ({calls[step]:.0f})"
            for step in NAMES
        ]
        rows.append((name, *cells, f"{sum(calls.values()):.0f}"))
    return table(("run", *NAMES, "calls in all"), rows)


def _spent(request: Request, engine: tuple[type, str], seed: int) -> dict[str, float]:
    """Return the microseconds per iteration of one request, by step."""
    budget = Budget()
    with budget.measured(engine):
        num_iterations = request(seed).num_iterations
    return {step: 1e6 * budget.seconds[step] / num_iterations for step in NAMES}


class Budget:
    """Seconds and calls by step of all that runs inside ``measured`` or ``counted``.

    Attributes:
        seconds, calls: totals by step; engine calls are under ``ENGINE``.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._clock = clock
        self._steps = [OTHER]
        self._since = 0.0

    @contextlib.contextmanager
    def measured(self, engine: tuple[type, str]) -> Iterator[None]:
        """Add up the seconds of each step.

        engine: the class whose method is a call of an engine, and the method.
        """
        with self._wrapped(engine):
            self._since = self._clock()
            try:
                yield
            finally:
                self._enter(OTHER)
                self._steps = [OTHER]

    @contextlib.contextmanager
    def counted(self, engine: tuple[type, str]) -> Iterator[None]:
        """Add up the calls of each step, without those inside engines."""
        own_codes = {self._enter.__code__, self._leave.__code__}

        def profiled(frame: FrameType, event: str, argument: object) -> None:
            if event in ("call", "c_call") and frame.f_code not in own_codes:
                if frame.f_globals["__name__"] != __name__:
                    self.calls[self._steps[-1]] += 1

        with self._wrapped(engine):
            sys.setprofile(profiled)
            try:
                yield
            finally:
                sys.setprofile(None)

    @contextlib.contextmanager
    def _wrapped(self, engine: tuple[type, str]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for step, owners in (*STEPS.items(), (ENGINE, ((engine[0], (engine[1],)),))):
                for owner, names in owners:
                    for name in names:
                        function = getattr(owner, name)
                        setattr(owner, name, self._in_step(step, function))
                        stack.callback(setattr, owner, name, function)
            yield

    def _in_step(self, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of a function or generator function whose time counts for a step."""
        if not inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def wrapped(*arguments: Any, **options: Any) -> Any:
                self._enter(step)
                try:
                    return function(*arguments, **options)
                finally:
                    self._leave()

            return wrapped

        @functools.wraps(function)
        def wrapped_generator(*arguments: Any, **options: Any) -> Any:
            generator, sent = function(*arguments, **options), None
            while True:
                self._enter(step)
                try:
                    item = generator.send(sent)
                except StopIteration as end:
                    return end.value
                finally:
                    self._leave()
                sent = yield item

        return wrapped_generator

    def _enter(self, step: str) -> None:
        now = self._clock()
        self.seconds[self._steps[-1]] += now - self._since
        self._steps.append(step)
        self._since = now

    def _leave(self) -> None:
        now = self._clock()
        self.seconds[self._steps.pop()] += now - self._since
        self._since = now
