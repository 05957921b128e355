"""Requests on the same engines: the trees of several are one, verified in one forward.

Each request runs the loop of ``decode`` and gets what it would get alone; here its engine calls are
made, together with those of the others: as many draft calls as any request needs, then one call of
the target. If the rows of a call do not fit a bounded cache, the youngest request is preempted: its
rows are dropped, and computed again once it is resumed; what it returns stays the same.
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dsbd_forward.engine import Engine
from dsbd_forward.forward import ForwardResult
from dsbd_ort.decoding.cache_view import CacheView
from dsbd_ort.decoding.decode import DecodingLoop, decoding_loop
from dsbd_ort.decoding.decoder import Member, Outcome, Preempted, Progress
from dsbd_ort.decoding.drafting.cost_curve import Costs, observe_call
from dsbd_ort.decoding.engine_call import Clock, EngineCall, EngineCalls, Role, forward_groups
from dsbd_ort.decoding.kv_cache import PREFILL_CHUNK, PrefixCache, RowIdentity, SharedKVCache
from dsbd_ort.decoding.preemption import PreemptedRows, recomputed
from dsbd_ort.decoding.request import DecodingRequest
from dsbd_ort.decoding.result import LiveHypotheses


@dataclass(eq=False)
class BatchMember:
    """See Member.

    wanted: the engine call that the loop waits for, None once it is over, and before it starts.
    has_started: whether the loop runs; before, the prompt is being computed for another.
    preempted: by engine, rows that must be computed again before.
    recomputation: of these, once it is resumed; ``wanted_again``: the call it waits for.
    """

    views: dict[Role, CacheView]  # by engine, its rows of the cache
    loop: DecodingLoop
    request: DecodingRequest
    wanted: EngineCall | None = None
    waits_since: float = 0.0  # when it began to wait for that, on the clock of the request
    has_started: bool = False
    preempted: dict[Role, PreemptedRows] = field(default_factory=dict)
    recomputation: EngineCalls[None] | None = None
    wanted_again: EngineCall | None = None

    @property
    def call(self) -> EngineCall | None:
        return self.wanted_again or self.wanted

    @property
    def num_rows(self) -> int:
        return max(
            self.preempted[role].num_rows if role in self.preempted else view.num_rows
            for role, view in self.views.items()
        )

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
        self._members: list[BatchMember] = []

    @property
    def num_members(self) -> int:
        return len(self._members)

    def accepts(self, request: DecodingRequest, others: Sequence[DecodingRequest]) -> bool:
        return True

    def keep_for(self, request: DecodingRequest | None) -> None:
        assert not self._members, "rows of live requests cannot be dropped"
        identity = RowIdentity([]) if request is None else request.reusable_prompt("draft")
        for cache in self.caches.values():
            cache.keep_for(identity)

    def forget(self) -> None:
        for cache in self.caches.values():
            cache.forget()

    @property
    def num_used_rows(self) -> int:
        return max(cache.num_used for cache in self.caches.values())

    def join(self, request: DecodingRequest) -> BatchMember:
        views = {
            role: CacheView(cache, PrefixCache(source=request.source))
            for role, cache in self.caches.items()
        }
        request = dataclasses.replace(request, num_sharers=lambda: len(self._members))
        loop = decoding_loop(request, views["target"], views.get("draft"))
        member = BatchMember(views, loop, request)
        self._members.append(member)
        try:
            if not self._prompt_is_coming(member):
                self._start(member)
        except BaseException:
            self.leave(member)
            raise
        return member

    def preempt(self, member: Member) -> None:
        assert isinstance(member, BatchMember)
        self._members.remove(member)
        if member.recomputation is not None:
            member.recomputation.close()
        member.recomputation = member.wanted_again = None
        for role, view in member.views.items():
            if role in member.preempted:  # again, before all of them were there
                self.caches[role].close_view(member.preempted[role])
            else:
                member.preempted[role] = PreemptedRows(view)

    def resume(self, member: Member) -> None:
        assert isinstance(member, BatchMember)
        member.recomputation = recomputed(member.preempted)
        self._members.append(member)
        self._recompute(member)

    def _prompt_is_coming(self, member: BatchMember) -> bool:
        """Return whether another request computes the prompt of one that has not started."""
        request = member.request
        if not self._shares_prefixes or request.config.prompt_logprobs:
            return False
        return any(
            other.wanted is not None
            and other.wanted.is_prefill
            and other.request.identity == request.identity
            for other in self._members
        )

    def _start(self, member: BatchMember) -> None:
        """Run a request up to its first engine call, after the rows that it can share."""
        member.has_started = True
        for role, view in member.views.items():
            request = member.request
            if view.spec.reads_features and not request.config.has_draft_model:
                continue  # its rows could not be computed again without features
            if not request.chooses_start(role, view.spec):
                view.prefix = self.caches[role].longest_prefix(request.reusable_prompt(role))
        member.wanted = next(member.loop)  # type: ignore[assignment]  # a call precedes any output
        member.waits_since = member.request.clock()

    def leave(self, member: Member) -> None:
        assert isinstance(member, BatchMember)
        if member in self._members:
            self._members.remove(member)
        member.wanted = member.wanted_again = None
        member.loop.close()
        for role, view in member.views.items():
            self.caches[role].close_view(member.preempted.get(role, view))
            self.caches[role].release_source(view)

    def iterate(self) -> list[Progress]:
        progress: list[Progress] = []
        for member in [member for member in self._members if not member.has_started]:
            if not self._prompt_is_coming(member):
                try:
                    self._start(member)
                except BaseException as error:  # of this request alone
                    self._end(member, error, progress)
        drafting = self._callers("draft")
        while drafting:
            self._run("draft", drafting, progress)
            drafting = self._callers("draft", takes_prompts=False)
        self._run("target", self._callers("target"), progress)
        return progress

    def _callers(self, role: Role, *, takes_prompts: bool = True) -> list[BatchMember]:
        """Return who waits for an engine: the oldest prompts, no more rows than one piece, first.

        An engine keeps all logits of its last rows alone.
        """
        prompts: list[BatchMember] = []
        others: list[BatchMember] = []
        num_rows = 0
        for member in self._members:
            call = member.wanted_again or member.wanted
            if call is None or call.role != role:
                continue
            if not call.is_prefill:
                others.append(member)
            elif takes_prompts:
                num_rows += call.num_rows
                if takes_prompts := not prompts or num_rows <= PREFILL_CHUNK:
                    prompts.append(member)
        return prompts + others

    def _run(self, role: Role, members: list[BatchMember], progress: list[Progress]) -> None:
        """Make the calls of the members in as few forwards as can be; let each go on."""
        if len(members) < 2:
            if members:  # usually
                self._run_together(role, members, progress)
            return
        member_by_call = {member.call: member for member in members if member.call is not None}
        joins_sources = self.caches[role].model.spec.joins_sources
        for calls in forward_groups(list(member_by_call), joins_sources=joins_sources):
            # Those that were not preempted for others.
            together = [member_by_call[call] for call in calls]
            live = [member for member in together if member in self._members]
            self._run_together(role, live, progress)

    def _run_together(
        self, role: Role, members: list[BatchMember], progress: list[Progress]
    ) -> None:
        preempts = self._members[-1].request.preempts if self._members else None
        if preempts is not None and self._members[-1] in members:
            call = self._members[-1].call
            if call is not None and preempts(call):
                self._preempt_youngest(members, progress)
        if len(members) > 1:
            self._read_sources(role, members, progress)
        if len(self._members) > 1:
            self._make_room(role, members, progress)
        if not members:
            return
        calls = [call for member in members if (call := member.call) is not None]
        began = self._clock()
        try:
            results = self.caches[role].forward(calls)
        except Exception as error:  # of the engine: all who took part have lost their rows
            for member in members:
                self._end(member, error, progress)
            return
        seconds = self._clock() - began
        if self._costs:
            observe_call(self._costs, calls, seconds, results[0].reading)
        failed = results[0].failed
        for member, call, result in zip(members, calls, results, strict=True):
            if failed and (error_of_source := failed.get(member.request.source)) is not None:
                self._end(member, error_of_source, progress)
                continue
            call.meter.count(call.num_rows, seconds, result)
            self._advance(member, result, progress)

    def _preempt_youngest(self, members: list[BatchMember], progress: list[Progress]) -> None:
        youngest = self._members[-1]
        self.preempt(youngest)
        progress.append(Progress(youngest, Preempted()))
        if youngest in members:
            members.remove(youngest)

    def _read_sources(
        self, role: Role, members: list[BatchMember], progress: list[Progress]
    ) -> None:
        """Let the engine read the sources of a call; end, and remove, whose source it cannot."""
        sources = dict.fromkeys(member.request.source for member in members)
        if len(sources) < 2 or not self.caches[role].model.spec.joins_sources:
            return  # an error is of the one source
        for source in sources:
            try:
                self.caches[role].read_source(source)
            except Exception as error:
                for member in [each for each in members if each.request.source == source]:
                    members.remove(member)
                    self._end(member, error, progress)

    def _make_room(self, role: Role, members: list[BatchMember], progress: list[Progress]) -> None:
        """Preempt the youngest of several requests until the calls of ``members`` fit."""
        cache = self.caches[role]
        while len(self._members) > 1:
            calls = (member.call for member in members)
            if cache.has_room(sum(call.num_rows for call in calls if call is not None)):
                return
            self._preempt_youngest(members, progress)

    @staticmethod
    def _recompute(member: BatchMember, result: ForwardResult | None = None) -> None:
        assert member.recomputation is not None
        try:
            # A generator that has not started takes no result.
            member.wanted_again = member.recomputation.send(result)  # type: ignore[arg-type]
        except StopIteration:
            member.recomputation = member.wanted_again = None

    def _advance(
        self, member: BatchMember, result: ForwardResult, progress: list[Progress]
    ) -> None:
        try:
            if member.recomputation is not None:
                self._recompute(member, result)
                return
            assert member.wanted is not None  # the call with this result
            member.wanted.meter.waited += member.request.clock() - member.waits_since
            wanted = member.loop.send(result)
            while isinstance(wanted, LiveHypotheses):
                progress.append(Progress(member, wanted))
                wanted = member.loop.send(None)
            member.wanted, member.waits_since = wanted, member.request.clock()
        except StopIteration as stop:
            self._end(member, stop.value, progress)
        except BaseException as error:  # of this request alone
            self._end(member, error, progress)

    def _end(self, member: BatchMember, outcome: Outcome, progress: list[Progress]) -> None:
        self.leave(member)
        progress.append(Progress(member, outcome))
