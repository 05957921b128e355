"""The loop: draft a forest, verify it in one target call, select layer by layer, prune.

The page to read first. Every strategy is this loop (ALGORITHM.md section 3); what differs lies in
the selection rule that its row of the strategy table names. The loop asks for engine calls and
never makes one: ``lone`` answers them one by one, ``shared_forest`` those of several requests
together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np

from dsbd_ort.decoding.beams import Beams, Hypothesis, common_tokens
from dsbd_ort.decoding.cached_prefix import CachedPrefix
from dsbd_ort.decoding.chance import Chance, RandomChance
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.cost_curve import EngineCosts
from dsbd_ort.decoding.decoded import DecodeResult, DecodeStep, decoded_sequence
from dsbd_ort.decoding.draft import DraftLayer, draft_forest
from dsbd_ort.decoding.drafting import Drafting, FixedDrafting
from dsbd_ort.decoding.experience import Experience
from dsbd_ort.decoding.forest import Forest
from dsbd_ort.decoding.forest_cache import ForestCache
from dsbd_ort.decoding.law_source import check_top_k
from dsbd_ort.decoding.meter import Clock, Meter
from dsbd_ort.decoding.request_checks import check_request
from dsbd_ort.decoding.row_bound import most_descendants
from dsbd_ort.decoding.rule import SelectionRule
from dsbd_ort.decoding.rules import rule_of
from dsbd_ort.decoding.stats import Recorder
from dsbd_ort.decoding.step_model import EngineCall, Logits, RowCache
from dsbd_ort.decoding.stopping import StopState
from dsbd_ort.decoding.throughput import ThroughputDrafting
from dsbd_ort.decoding.trace import TraceRecorder
from dsbd_ort.decoding.tracer import Observed, Tracer


def _one() -> int:
    return 1


@dataclass(frozen=True, kw_only=True)
class DecodingRequest:
    """A prompt and all that its continuation depends on besides the models.

    Attributes:
        prompt_ids: at least one token id.
        config: the options. ``eos_token_id`` None means that nothing ends a sequence.
        rng: its first 63-bit draw is the noise key; only the rejection coupling takes more.
        stop: of the empty continuation: what finds the request's ``stop_strings``. A beam ends
            with the token that makes its state end.
        chance: what the rejection coupling draws by, instead of ``rng``.
        clock: seconds, for the statistics.
        costs: of both engines; draft_policy "throughput" needs them.
        experience: of earlier requests with the same widths, for the same policy; is added to.
        trace: is told what every iteration did.
        num_sharers: tells how many requests share the engine calls just now, for the same policy.
    """

    prompt_ids: Sequence[int]
    config: DecodingConfig
    rng: np.random.Generator
    stop: StopState | None = None
    chance: Chance | None = None
    clock: Clock = time.perf_counter
    costs: EngineCosts | None = None
    experience: Experience | None = None
    trace: TraceRecorder | None = None
    num_sharers: Callable[[], int] = _one


DecodingLoop = Generator[EngineCall | DecodeStep, Logits | None, DecodeResult]
"""A request on its way: each EngineCall is to be answered by its outputs, a DecodeStep by None."""


def decoding_loop(
    request: DecodingRequest,
    target: RowCache,
    draft: RowCache | None,
    prefixes: tuple[CachedPrefix, CachedPrefix] | None = None,
) -> DecodingLoop:
    """Continue a prompt; ask for engine calls, yield the beams after every iteration.

    Args:
        request: what to continue and how.
        target: the model whose law the output follows. Of what its cache holds, no more than a
            prefix of the prompt is kept.
        draft: the model that proposes; strategies without a draft do not touch it.
        prefixes: what the caches of target and draft hold already, updated for the next request;
            None drops it.

    Raises what ``check_decodable`` raises.
    """
    check_decodable(request, target, draft)
    prompt_ids, config, stop = request.prompt_ids, request.config, request.stop
    target_meter = Meter(request.clock)
    draft_meter = Meter(request.clock) if draft and config.row.has_draft else None
    recorder = Recorder(target_meter, draft_meter, request.clock)

    prompt = np.array(prompt_ids, dtype=np.int64)
    seed = int(request.rng.integers(2**63))
    forest = Forest(int(prompt[-1]), len(prompt) - 1, seed, config.eos_ids, stop)
    rule = rule_of(config, forest, request.chance or RandomChance(request.rng))
    of_target, of_draft = prefixes or (CachedPrefix(), CachedPrefix())
    target_cache = ForestCache("target", target, target_meter, forest, rule.warp, of_target)
    draft_cache = None
    if draft and draft_meter:
        draft_cache = ForestCache("draft", draft, draft_meter, forest, rule.warp, of_draft)
    caches = [target_cache, draft_cache] if draft_cache else [target_cache]
    drafting = _drafting(request, rule)
    for cache in caches:
        yield from cache.prefill(prompt[:-1])

    beams, num_layers = Beams.single(0, Hypothesis()), 0
    tracer = None
    if request.trace is not None:
        request.trace.begin(prompt.tolist(), config)
        tracer = Tracer(request.trace, forest, target_cache, draft_cache, recorder, beams)
    while not rule.is_finished(beams, num_layers):
        layers: list[DraftLayer] = []
        num_undecided = len(forest.drafted)
        if draft_cache:
            num_pending = len(target_cache.pending(beams.nodes))
            drafting.begin(num_pending, config.max_new_tokens - num_layers - 1)
            layers = yield from draft_forest(
                forest,
                draft_cache,
                beams,
                drafting,
                num_layers,
                keeps_laws=rule.reads_draft_laws,
            )
        yield from target_cache.compute(list(range(len(forest))))
        num_drafted = len(forest.drafted) - num_undecided
        committed: list[Beams] = []
        for selected in rule.select(target_cache, beams, layers, num_layers):
            committed.append(selected)
            beams = selected
            if rule.is_finished(beams, num_layers + len(committed)):
                break
        num_layers += len(committed)
        drafting.observe(forest, [layer.nodes for layer in committed])
        num_accepted = sum(forest.commit(layer.nodes) for layer in committed)
        if config.memory == "single":
            beams = _most_likely(beams)
        most_kept = most_descendants(config) if rule.keeps_descendants else 0
        survivors = _survivors(forest, caches, beams, most_kept)
        if tracer:
            tracer.observe(Observed(layers, committed, beams, rule.live(beams), survivors))
        beams = _prune(forest, caches, beams, survivors)
        widths = [layer.width for layer in committed]
        recorder.record(len(layers), widths, num_drafted, num_accepted)
        yield DecodeStep(rule.live(beams))

    for cache in caches:
        cache.finish([*prompt_ids, *common_tokens(beams.hypotheses)])
    finished = rule.results(beams)[: config.num_return_sequences]
    sequences = [decoded_sequence(sequence, config, stop) for sequence in finished]
    return DecodeResult(sequences, recorder.stats(len(prompt), len(sequences[0].token_ids)))


def check_decodable(request: DecodingRequest, target: RowCache, draft: RowCache | None) -> None:
    """Refuse a request that these models cannot decode; no engine is called.

    Raises:
        DecodingError: an empty prompt, ids outside the vocabulary, a missing draft, or more
            tokens to look at than an engine returns.
    """
    config = request.config
    check_request(target, draft, request.prompt_ids, config, request.stop)
    rule = rule_of(config, Forest(0, 0, 0, config.eos_ids), RandomChance(request.rng))
    check_top_k("target", target, config, rule.warp.top_k)
    if draft and config.row.has_draft:
        check_top_k("draft", draft, config, rule.warp.top_k)


def _drafting(request: DecodingRequest, rule: SelectionRule) -> Drafting:
    """Return the drafting policy of a request."""
    config, costs = request.config, request.costs
    if costs is None or rule.draft_scores is None or config.draft_policy == "fixed":
        return FixedDrafting(config.layer_widths, rule.propose)
    return ThroughputDrafting(
        costs,
        request.experience or Experience.initial(),
        rule.draft_scores,
        num_beams=config.width,
        most_layers=config.draft_length or 0,
        most_beams=config.most_draft_beams,
        num_sharers=request.num_sharers,
    )


def _most_likely(beams: Beams) -> Beams:
    """Keep the beam of highest log-probability per token (DSBD paper, memory reduction)."""
    per_token = [hypothesis.score(1.0) for hypothesis in beams.hypotheses]
    return beams.only(int(np.argmax(per_token)))


def _survivors(
    forest: Forest, caches: list[ForestCache], beams: Beams, most_descendants: int
) -> set[int]:
    """Return the nodes that can still matter: beams, what they need, perhaps descendants."""
    live = set(beams.nodes)
    if most_descendants:
        live |= set(forest.descendants(beams.nodes)[:most_descendants])
    for cache in caches:
        live |= cache.parents_of_pending(live)
    return live


def _prune(forest: Forest, caches: list[ForestCache], beams: Beams, survivors: set[int]) -> Beams:
    """Keep the ``survivors``, drop the rest everywhere; return the beams renumbered."""
    renumbered = forest.prune(sorted(survivors))
    for cache in caches:
        cache.prune(renumbered)
    nodes = [renumbered[node] for node in beams.nodes]
    return Beams(nodes, beams.log_weights, beams.hypotheses, beams.copies)
