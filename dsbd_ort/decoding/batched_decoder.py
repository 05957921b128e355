"""Several requests on one pair of engines: their trees are one forest, verified in one forward.

Each request runs the loop of ``decode`` and gets what it would get alone; here its engine calls are
made together with those of the others. An iteration makes draft calls as long as a request needs
one, then one call of the target for all. Of the prompts that are still being computed, as many go
on as fit one prefill chunk. Requests join and leave between two iterations.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from dsbd_ort.decoding.cost_curve import Costs
from dsbd_ort.decoding.decode import DecodingLoop, decoding_loop
from dsbd_ort.decoding.kv_cache import PREFILL_CHUNK, CacheView, KVCache
from dsbd_ort.decoding.request import DecodeResult, DecodingRequest, IterationOutput
from dsbd_ort.decoding.step_model import Clock, EngineCall, Logits, Role, StepModel

Outcome = DecodeResult | BaseException
"""How a request ended; an exception is the one that ``decode`` would have raised.

Trace recorders and stop states are callers' code, so it may be any exception: the other requests
go on."""


@dataclass(eq=False)
class Tree:
    """A live request, made by ``BatchedDecoder.join``.

    Attributes:
        views: by engine, its rows of the cache.
        loop: of the request.
        wanted: the engine call that it waits for, None once it is over.
    """

    views: dict[Role, CacheView]
    loop: DecodingLoop
    wanted: EngineCall | None = None

    def call_of(self, role: Role) -> EngineCall | None:
        """Return the call that the request waits for if it is one of this engine."""
        call = self.wanted
        return call if call is not None and call.role == role else None


@dataclass(frozen=True)
class Progress:
    """The output of an iteration for one request, or its end."""

    tree: Tree
    event: IterationOutput | Outcome


class BatchedDecoder:
    """The live requests of one pair of engines.

    Attributes:
        caches: by engine, its cache, of which every request has a view.
    """

    def __init__(
        self,
        target: StepModel,
        draft: StepModel,
        *,
        max_rows: int | None = None,
        shares_prefixes: bool = True,
        costs: Costs | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        """Take both engines, whose caches are used for nothing else.

        Args:
            target: the large engine.
            draft: the small one.
            max_rows: most rows of each cache, None for no limit.
            shares_prefixes: whether prompts that begin alike are computed once.
            costs: learn from the calls.
            clock: seconds, for the statistics.
        """
        models: dict[Role, StepModel] = {"target": target, "draft": draft}
        self.caches = {
            role: KVCache(model, max_rows, shares_prefixes=shares_prefixes)
            for role, model in models.items()
        }
        self._costs = costs
        self._clock = clock
        self._trees: list[Tree] = []

    @property
    def num_trees(self) -> int:
        """Live requests."""
        return len(self._trees)

    def join(self, request: DecodingRequest) -> Tree:
        """Take in a request; it starts with the next iteration.

        Raises what ``decoding_loop`` raises.
        """
        known = request.prompt_ids[:-1]
        views = {
            role: cache.open_view(cache.longest_prefix(known))
            for role, cache in self.caches.items()
        }
        request = dataclasses.replace(request, num_sharers=lambda: len(self._trees))
        tree = Tree(views, decoding_loop(request, views["target"], views["draft"]))
        self._trees.append(tree)
        try:
            tree.wanted = next(tree.loop)  # type: ignore[assignment]  # a call precedes any output
        except BaseException:
            self.leave(tree)
            raise
        return tree

    def leave(self, tree: Tree) -> None:
        """Give up a request between two iterations; one that is over has left already."""
        if tree in self._trees:
            self._trees.remove(tree)
            tree.wanted = None
            tree.loop.close()
            for role, view in tree.views.items():
                self.caches[role].close_view(view)

    def iterate(self) -> list[Progress]:
        """Run one iteration of every request; return what it brought.

        A request whose prompt is still being computed brings nothing; one that ends has left.
        """
        progress: list[Progress] = []
        prompts = self._next_prompts("draft")
        while drafting := self._callers("draft", prompts):
            self._run("draft", drafting, progress)
            prompts = set()
        if verifying := self._callers("target", self._next_prompts("target")):
            self._run("target", verifying, progress)
        return progress

    def _next_prompts(self, role: Role) -> set[Tree]:
        """Return whose prompts go on in this iteration: the oldest, no more rows than one piece.

        So the others wait no longer for many long prompts than for one.
        """
        prompts: set[Tree] = set()
        num_rows = 0
        for tree in self._trees:
            if (call := tree.call_of(role)) is not None and call.is_prefill:
                num_rows += len(call.token_ids)
                if prompts and num_rows > PREFILL_CHUNK:
                    break
                prompts.add(tree)
        return prompts

    def _callers(self, role: Role, prompts: set[Tree]) -> list[Tree]:
        """Return who waits for an engine; of those whose prompt it computes, only ``prompts``."""
        return [
            tree
            for tree in self._trees
            if (call := tree.call_of(role)) is not None and (tree in prompts or not call.is_prefill)
        ]

    def _run(self, role: Role, trees: list[Tree], progress: list[Progress]) -> None:
        """Make the calls that the trees wait for together, and let each go on."""
        calls = [tree.wanted for tree in trees if tree.wanted is not None]
        began = self._clock()
        try:
            parts = self.caches[role].forward(calls)
        except Exception as error:  # of the engine: all who took part have lost their rows
            for tree in trees:
                self._end(tree, error, progress)
            return
        seconds = self._clock() - began
        if self._costs and not any(call.is_prefill for call in calls):
            self._costs.observe(role, sum(len(call.token_ids) for call in calls), seconds)
        for tree, call, part in zip(trees, calls, parts, strict=True):
            call.meter.count(len(call.token_ids), seconds)
            self._advance(tree, part, progress)

    def _advance(self, tree: Tree, logits: Logits, progress: list[Progress]) -> None:
        """Let a request go on to the next call that it needs, or to its end."""
        try:
            wanted = tree.loop.send(logits)
            while isinstance(wanted, IterationOutput):
                progress.append(Progress(tree, wanted))
                wanted = tree.loop.send(None)
            tree.wanted = wanted
        except StopIteration as stop:
            self._end(tree, stop.value, progress)
        except BaseException as error:  # of this request alone
            self._end(tree, error, progress)

    def _end(self, tree: Tree, outcome: Outcome, progress: list[Progress]) -> None:
        self.leave(tree)
        progress.append(Progress(tree, outcome))
