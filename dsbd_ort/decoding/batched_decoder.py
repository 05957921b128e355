"""Requests on the same engines: the trees of several are one, verified in one forward.

Each request runs the loop of ``decode`` and gets what it would get alone; here its engine calls are
made, together with those of the others: as many draft calls as any request needs, then one call of
the target. If the rows of a call do not fit a bounded cache, the youngest request is preempted: its
rows are dropped, and computed again once it is resumed; what it returns stays the same.
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dsbd_forward.engine import Engine
from dsbd_forward.forward import ForwardResult
from dsbd_ort.decoding.cache_view import CacheView
from dsbd_ort.decoding.decode import DecodingLoop, decoding_loop
from dsbd_ort.decoding.decoder import LiveRequest, Outcome, Preempted, Progress
from dsbd_ort.decoding.drafting.cost_curve import Costs, observe_call
from dsbd_ort.decoding.engine_call import Clock, EngineCall, Role, forward_groups
from dsbd_ort.decoding.kv_cache import PREFILL_CHUNK, PrefixCache, RowIdentity, SharedKVCache
from dsbd_ort.decoding.preemption import PreemptedRows, Preemption
from dsbd_ort.decoding.request import DecodingRequest
from dsbd_ort.decoding.result import LiveHypotheses


@dataclass(eq=False)
class BatchedRequest:
    """See LiveRequest.

    Attributes:
        views: by engine, its rows of the cache.
        loop: None while another request computes its prompt.
        wanted: the engine call that the loop waits for; None before the loop begins, and once it is
            over.
        waits_since: when it began to wait for that, on the clock of the request.
        preemption: None while its rows are in the caches.
    """

    views: dict[Role, CacheView]
    request: DecodingRequest
    loop: DecodingLoop | None = None
    wanted: EngineCall | None = None
    waits_since: float = 0.0
    preemption: Preemption | None = None

    @property
    def call(self) -> EngineCall | None:
        """The engine call that the request waits for."""
        return self.wanted if self.preemption is None else self.preemption.wanted

    @property
    def rows(self) -> dict[Role, CacheView | PreemptedRows]:
        """By engine, the rows, or what they held if they were dropped."""
        return {**self.views, **(self.preemption.rows if self.preemption else {})}

    @property
    def num_rows(self) -> int:
        return max(rows.num_rows for rows in self.rows.values())

    @property
    def num_rows_at_end(self) -> int:
        return max(view.num_rows_at_end for view in self.views.values())


class BatchedDecoder:
    """The Decoder in numpy; ``caches``: by engine."""

    def __init__(
        self,
        target: Engine,
        draft: Engine | None,
        *,
        max_rows: int | None = None,
        shares_prefixes: bool = True,
        costs: Costs | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        """Take the engines, whose caches are used for nothing else.

        max_rows: most rows of each cache. shares_prefixes: whether prompts that begin alike are
            computed once. costs: learn from the calls.
        """
        models: dict[Role, Engine] = {"target": target}
        if draft is not None:
            models["draft"] = draft
        self.caches = {
            role: SharedKVCache(model, max_rows, shares_prefixes=shares_prefixes)
            for role, model in models.items()
        }
        self._costs, self._clock = costs, clock
        self._shares_prefixes = shares_prefixes
        self._live: list[BatchedRequest] = []

    @property
    def num_live(self) -> int:
        return len(self._live)

    def accepts(self, request: DecodingRequest, others: Sequence[DecodingRequest]) -> bool:
        return True

    def keep_for(self, request: DecodingRequest | None) -> None:
        assert not self._live, "rows of live requests cannot be dropped"
        identity = RowIdentity([]) if request is None else request.reusable_prompt("draft")
        for cache in self.caches.values():
            cache.keep_for(identity)

    def forget(self) -> None:
        for cache in self.caches.values():
            cache.forget()

    @property
    def num_used_rows(self) -> int:
        return max(cache.num_used for cache in self.caches.values())

    def join(self, request: DecodingRequest) -> BatchedRequest:
        views = {
            role: CacheView(cache, PrefixCache(source=request.source))
            for role, cache in self.caches.items()
        }
        request = dataclasses.replace(request, num_sharers=lambda: len(self._live))
        live = BatchedRequest(views, request)
        self._live.append(live)
        try:
            if not self._prompt_is_coming(live):
                self._start(live)
        except BaseException:
            self.leave(live)
            raise
        return live

    def preempt(self, live: LiveRequest) -> None:
        assert isinstance(live, BatchedRequest)
        self._live.remove(live)
        if live.preemption is None:
            live.preemption = Preemption(live.views)
        else:  # before all of its rows were there again
            live.preemption.interrupt()

    def resume(self, live: LiveRequest) -> None:
        assert isinstance(live, BatchedRequest)
        assert live.preemption is not None  # as it was preempted
        self._live.append(live)
        if live.preemption.begin():
            live.preemption = None

    def _prompt_is_coming(self, live: BatchedRequest) -> bool:
        """Return whether another request computes the prompt of one that has not started."""
        request = live.request
        if not self._shares_prefixes or request.config.prompt_logprobs:
            return False
        return any(
            other.wanted is not None
            and other.wanted.is_prefill
            and other.request.identity == request.identity
            for other in self._live
        )

    def _start(self, live: BatchedRequest) -> None:
        """Run a request up to its first engine call, after the rows that it can share."""
        request = live.request
        for role, view in live.views.items():
            if view.spec.reads_features and not request.config.has_draft_model:
                continue  # its rows could not be computed again without features
            if not request.chooses_start(role, view.spec):
                view.prefix = self.caches[role].longest_prefix(request.reusable_prompt(role))
        live.loop = decoding_loop(request, live.views["target"], live.views.get("draft"))
        live.wanted = next(live.loop)  # type: ignore[assignment]  # a call precedes any output
        live.waits_since = live.request.clock()

    def leave(self, live: LiveRequest) -> None:
        assert isinstance(live, BatchedRequest)
        if live in self._live:
            self._live.remove(live)
        live.wanted = None
        if live.loop is not None:
            live.loop.close()
        for role, rows in live.rows.items():
            self.caches[role].close_view(rows)
            self.caches[role].release_source(live.views[role])

    def iterate(self) -> list[Progress]:
        progress: list[Progress] = []
        for live in [live for live in self._live if live.loop is None]:
            if not self._prompt_is_coming(live):
                try:
                    self._start(live)
                except BaseException as error:  # of this request alone
                    self._end(live, error, progress)
        drafting = self._callers("draft")
        while drafting:
            self._run("draft", drafting, progress)
            drafting = self._callers("draft", takes_prompts=False)
        self._run("target", self._callers("target"), progress)
        return progress

    def _callers(self, role: Role, *, takes_prompts: bool = True) -> list[BatchedRequest]:
        """Return who waits for an engine: the oldest prompts, no more rows than one piece, first.

        An engine keeps all logits of its last rows alone.
        """
        prompts: list[BatchedRequest] = []
        others: list[BatchedRequest] = []
        num_rows = 0
        for live in self._live:
            call = live.call
            if call is None or call.role != role:
                continue
            if not call.is_prefill:
                others.append(live)
            elif takes_prompts:
                num_rows += call.num_rows
                if takes_prompts := not prompts or num_rows <= PREFILL_CHUNK:
                    prompts.append(live)
        return prompts + others

    def _run(self, role: Role, callers: list[BatchedRequest], progress: list[Progress]) -> None:
        """Make the calls of the callers in as few forwards as can be; let each go on."""
        if len(callers) < 2:
            if callers:  # usually
                self._run_together(role, callers, progress)
            return
        live_by_call = {live.call: live for live in callers if live.call is not None}
        joins_sources = self.caches[role].model.spec.joins_sources
        for calls in forward_groups(list(live_by_call), joins_sources=joins_sources):
            # Those that were not preempted for others.
            together = [live_by_call[call] for call in calls]
            callers = [live for live in together if live in self._live]
            self._run_together(role, callers, progress)

    def _run_together(
        self, role: Role, callers: list[BatchedRequest], progress: list[Progress]
    ) -> None:
        preempts = self._live[-1].request.preempts if self._live else None
        if preempts is not None and self._live[-1] in callers:
            call = self._live[-1].call
            if call is not None and preempts(call):
                self._preempt_youngest(callers, progress)
        if len(callers) > 1:
            self._read_sources(role, callers, progress)
        if len(self._live) > 1:
            self._make_room(role, callers, progress)
        if not callers:
            return
        calls = [call for live in callers if (call := live.call) is not None]
        began = self._clock()
        try:
            results = self.caches[role].forward(calls)
        except Exception as error:  # of the engine: all who took part have lost their rows
            for live in callers:
                self._end(live, error, progress)
            return
        seconds = self._clock() - began
        if self._costs:
            observe_call(self._costs, calls, seconds, results[0])
        failed = results[0].failed
        for live, call, result in zip(callers, calls, results, strict=True):
            if failed and (error_of_source := failed.get(live.request.source)) is not None:
                self._end(live, error_of_source, progress)
                continue
            call.meter.count(call.num_rows, seconds, result)
            self._advance(live, result, progress)

    def _preempt_youngest(self, callers: list[BatchedRequest], progress: list[Progress]) -> None:
        youngest = self._live[-1]
        self.preempt(youngest)
        progress.append(Progress(youngest, Preempted()))
        if youngest in callers:
            callers.remove(youngest)

    def _read_sources(
        self, role: Role, callers: list[BatchedRequest], progress: list[Progress]
    ) -> None:
        """Let the engine read the sources of a call; end, and remove, whose source it cannot."""
        sources = dict.fromkeys(live.request.source for live in callers)
        if len(sources) < 2 or not self.caches[role].model.spec.joins_sources:
            return  # an error is of the one source
        for source in sources:
            try:
                self.caches[role].read_source(source)
            except Exception as error:
                for live in [each for each in callers if each.request.source == source]:
                    callers.remove(live)
                    self._end(live, error, progress)

    def _make_room(
        self, role: Role, callers: list[BatchedRequest], progress: list[Progress]
    ) -> None:
        """Preempt the youngest of several requests until the calls of ``callers`` fit."""
        cache = self.caches[role]
        while len(self._live) > 1:
            calls = (live.call for live in callers)
            if cache.has_room(sum(call.num_rows for call in calls if call is not None)):
                return
            self._preempt_youngest(callers, progress)

    def _advance(
        self, live: BatchedRequest, result: ForwardResult, progress: list[Progress]
    ) -> None:
        try:
            if live.preemption is not None:
                if live.preemption.advance(result):
                    live.preemption = None
                return
            assert live.loop is not None  # the call with this result
            assert live.wanted is not None
            live.wanted.meter.waited += live.request.clock() - live.waits_since
            wanted = live.loop.send(result)
            while isinstance(wanted, LiveHypotheses):
                progress.append(Progress(live, wanted))
                wanted = live.loop.send(None)
            live.wanted, live.waits_since = wanted, live.request.clock()
        except StopIteration as stop:
            self._end(live, stop.value, progress)
        except BaseException as error:  # of this request alone
            self._end(live, error, progress)

    def _end(self, live: BatchedRequest, outcome: Outcome, progress: list[Progress]) -> None:
        self.leave(live)
        progress.append(Progress(live, outcome))
