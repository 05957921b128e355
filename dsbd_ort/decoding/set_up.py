"""The parts of a request that begins: forest, rule, draft policy, caches, observers."""

from __future__ import annotations

from dataclasses import dataclass

from dsbd_forward.spec import EngineSpec
from dsbd_ort.decoding.beams import Agreement, Hypotheses
from dsbd_ort.decoding.cache_view import CacheView
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.drafting.acceptance import AcceptanceEstimator
from dsbd_ort.decoding.drafting.draft import Drafter, DraftPolicy, FixedDraftPolicy, Observer
from dsbd_ort.decoding.drafting.drafters import ChainedDrafter, Proposers
from dsbd_ort.decoding.drafting.ngram import NGramDrafter
from dsbd_ort.decoding.drafting.request_costs import RequestCosts
from dsbd_ort.decoding.drafting.throughput import ThroughputDraftPolicy
from dsbd_ort.decoding.engine_call import Meter
from dsbd_ort.decoding.forest import Forest
from dsbd_ort.decoding.forest_runner import ForestRunner
from dsbd_ort.decoding.joint_rule import JointGreedyRule, JointSpeculativeRule
from dsbd_ort.decoding.logits_processing.forbidden_tokens import ForbiddenTokens
from dsbd_ort.decoding.logits_processing.path_states import PathStates, StopStates
from dsbd_ort.decoding.logits_processing.request_processing import RequestProcessing, processing_of
from dsbd_ort.decoding.node_features import DraftFeatures, TargetFeatures, align_prefixes
from dsbd_ort.decoding.rejection_coupling import GeneratorSource, RejectionCoupling
from dsbd_ort.decoding.request import (
    DecodingRequest,
    check_request,
    expected_rows,
    most_descendants,
)
from dsbd_ort.decoding.rule import LayerBuilder, SelectionRule
from dsbd_ort.decoding.sample_rule import GumbelCoupling, SampleRule
from dsbd_ort.decoding.search_rule import SearchRule
from dsbd_ort.decoding.stats import StatsRecorder
from dsbd_ort.decoding.top_tokens import PromptScorer, TopTokens, check_top_logprobs
from dsbd_ort.decoding.trace import Tracer
from dsbd_ort.decoding.warp import Warp, check_top_k


def check_decodable(request: DecodingRequest, target: EngineSpec, draft: EngineSpec | None) -> None:
    """Raise for a request that these engines cannot decode; none is called.

    Raises:
        DecodingError: an empty prompt, ids outside the vocabulary, a missing draft, or a top-k
            beyond the logits that an engine returns.
    """
    config = request.config
    check_request(request, target, draft)
    check_top_logprobs(target, config)
    check_top_k(target, config)


@dataclass(frozen=True)
class LoopParts:
    """What the loop of one request works with.

    Attributes:
        draft: the draft engine's side of the forest, None where no model drafts.
        lockstep_draft: the same where it computes the prompt part by part, as the target does;
            else None.
        late_draft: the same where it may compute a part of the one path later, as a prompt.
        drafter: what drafts: the same, or it and others; None where nothing does.
        observers: of every iteration, before it is pruned.
        caches: of the engines in use.
        most_descendants: nodes below the beams that pruning leaves at most.
    """

    request: DecodingRequest
    forest: Forest
    hypotheses: Hypotheses
    agreement: Agreement
    rule: SelectionRule
    policy: DraftPolicy
    target: ForestRunner
    draft: ForestRunner | None
    lockstep_draft: ForestRunner | None
    late_draft: ForestRunner | None
    drafter: Drafter | None
    stats: StatsRecorder
    tracer: Tracer | None
    observers: list[Observer]
    tops: TopTokens | None
    scorer: PromptScorer | None
    caches: list[ForestRunner]
    most_descendants: int


def set_up(request: DecodingRequest, target: CacheView, draft: CacheView | None) -> LoopParts:
    """Return the parts of a request that begins; raises what ``check_decodable`` raises."""
    check_decodable(request, target.spec, draft.spec if draft else None)
    for view in (target, draft):
        if view is not None:
            num_rows = expected_rows(len(request.prompt_ids), request.config)
            view.row_cache.expect(num_rows - len(view.prefix.tokens))
    paths = _paths(request, target.spec.vocab_size)
    engines = _engines(request, paths, target, draft)
    builder, rule = paths.builder, _rule(request, paths.builder)
    draft_meter = engines.draft.meter if engines.draft else None
    policy = _draft_policy(request, rule, builder.forest, [target.meter, draft_meter or Meter()])
    num_prompt, config = len(request.prompt_ids), request.config
    stats = StatsRecorder(
        num_prompt, target.meter, draft_meter, request.clock, config.drafter or "model"
    )
    observers: list[Observer] = [policy, stats]
    tracer = proposers = None
    if request.trace is not None:
        tracer = Tracer(
            request.trace,
            builder,
            engines.target,
            engines.draft,
            stats,
            proposers := Proposers(),
            paths.forbidden,
        )
        observers.append(tracer)
    drafter: Drafter | None = engines.draft
    if chained := _chained_drafter(paths, rule, engines.draft, config, proposers):
        drafter = chained
        observers.append(chained)
    return LoopParts(
        request=request,
        forest=builder.forest,
        hypotheses=builder.hypotheses,
        agreement=Agreement(builder.hypotheses),
        rule=rule,
        policy=policy,
        target=engines.target,
        draft=engines.draft,
        lockstep_draft=engines.lockstep_draft,
        late_draft=None if engines.lockstep_draft or config.width > 1 else engines.draft,
        drafter=drafter,
        stats=stats,
        tracer=tracer,
        observers=observers,
        tops=engines.tops,
        scorer=engines.scorer,
        caches=[engines.target, engines.draft] if engines.draft else [engines.target],
        most_descendants=most_descendants(config) if drafter and rule.keeps_descendants else 0,
    )


@dataclass(frozen=True)
class _Paths:
    """What is known of every path of a request, whichever engine computes it.

    Attributes:
        forbidden: what the constraint forbids, of a request that is traced.
        ngram: the n-gram drafter, whose states go along the paths.
    """

    builder: LayerBuilder
    processing: RequestProcessing | None
    forbidden: ForbiddenTokens | None
    ngram: NGramDrafter | None


def _paths(request: DecodingRequest, vocab_size: int) -> _Paths:
    """Return forest, hypotheses, processors and constraint of a request that begins."""
    config, constraint = request.config, request.running_constraint
    forbidden = None
    if request.trace is not None and constraint is not None:
        forbidden = ForbiddenTokens()
    notes = forbidden, request.source_ids, request.allowed_mass
    processing = processing_of(config, constraint, request.prompt_ids, vocab_size, *notes)
    ngram = _ngram_drafter(request)
    return _Paths(_builder(request, processing, ngram), processing, forbidden, ngram)


@dataclass(frozen=True)
class _Engines:
    """The engines' sides of the forest, see ``LoopParts``."""

    target: ForestRunner
    draft: ForestRunner | None
    lockstep_draft: ForestRunner | None
    tops: TopTokens | None
    scorer: PromptScorer | None


def _engines(
    request: DecodingRequest, paths: _Paths, target: CacheView, draft: CacheView | None
) -> _Engines:
    """Return each engine's side of the forest, and what keeps log-probabilities of the target's."""
    config, spec, forest = request.config, target.spec, paths.builder.forest
    num_top = min(config.top_logprobs, spec.vocab_size)
    tops = TopTokens(num_top, paths.builder.hypotheses) if num_top else None
    scorer = PromptScorer(request.prompt_ids, num_top) if config.prompt_logprobs else None
    warp = target_warp = Warp.of(config)
    if not config.row.has_draft and not spec.head.num_top_logits:  # all logits are read later
        target_warp = warp.narrowed()
    draft = draft if config.has_draft_model else None
    of_target = of_draft = None
    if draft is not None and draft.spec.reads_features:
        align_prefixes(target.prefix, draft.prefix)
        of_target = TargetFeatures(target)
        draft.own_features = of_draft = DraftFeatures(forest, of_target)
    processing = paths.processing
    of_engine = ForestRunner("target", target, forest, target_warp, processing, of_target, tops)
    if draft is None:
        return _Engines(of_engine, None, None, tops, scorer)
    draft_warp = warp.within(draft.spec.head.num_top_logits)
    draft_cache = ForestRunner("draft", draft, forest, draft_warp, processing, of_draft)
    return _Engines(of_engine, draft_cache, draft_cache if of_draft else None, tops, scorer)


def _chained_drafter(
    paths: _Paths,
    rule: SelectionRule,
    draft: ForestRunner | None,
    config: DecodingConfig,
    proposers: Proposers | None,
) -> ChainedDrafter | None:
    """Return what drafts by a constraint or by n-grams before the model; None without these."""
    has_forced = paths.processing is not None and paths.processing.constraint is not None
    if not paths.ngram and not (config.drafts and has_forced and config.row.rule != "joint"):
        return None
    return ChainedDrafter(
        paths.builder.forest,
        paths.processing,
        paths.ngram,
        draft,
        proposers=proposers,
        proposes_ends=not rule.reads_draft_distributions,
    )


def _ngram_drafter(request: DecodingRequest) -> NGramDrafter | None:
    """Return the n-gram drafter of a request that has one."""
    config = request.config
    if not config.has_ngram_drafter:
        return None
    return NGramDrafter(
        request.prompt_ids,
        request.ngram_pool,
        config.temperature or 1.0,
        only_long_matches=config.has_draft_model,
        copied_ids=request.copied_ids,
    )


def _builder(
    request: DecodingRequest, processing: RequestProcessing | None, ngram: NGramDrafter | None
) -> LayerBuilder:
    """Return the forest and the hypotheses of a request that begins."""
    config, prompt_ids = request.config, request.prompt_ids
    seed = int(request.rng.integers(2**63))
    states: list[PathStates] = []
    if request.stop:
        states.append(StopStates(request.stop, config.min_new_tokens))
    states += processing.path_states if processing else []
    states += [ngram.paths] if ngram else []
    forest = Forest(int(prompt_ids[-1]), len(prompt_ids) - 1, seed, config.eos_ids, states)
    return LayerBuilder(forest, Hypotheses(), repeats=config.replacement)


def _rule(request: DecodingRequest, builder: LayerBuilder) -> SelectionRule:
    """Return the selection rule of the strategy, with the state of one request."""
    config = request.config
    match config.row.rule:
        case "search":
            return SearchRule(config, builder)
        case "joint":
            return JointSpeculativeRule(config, builder)
        case "joint-greedy":
            return JointGreedyRule(config, builder)
    if config.coupling == "gumbel":
        return SampleRule(config, builder, GumbelCoupling(builder.forest, config.replacement))
    source = request.random_source or GeneratorSource(request.rng)
    return SampleRule(config, builder, RejectionCoupling(source, config.replacement))


def _draft_policy(
    request: DecodingRequest, rule: SelectionRule, forest: Forest, meters: list[Meter]
) -> DraftPolicy:
    """Return the draft policy of a request; ``meters`` are those of its engines."""
    config = request.config
    if request.costs is None or config.draft_policy == "fixed":
        return FixedDraftPolicy(config.layer_widths, rule.propose)
    most_layers, most_beams = config.draft_length or 0, config.most_draft_beams
    of_target, of_draft = meters
    return ThroughputDraftPolicy(
        RequestCosts(
            request.costs,
            request.num_sharers,
            num_beams=config.width,
            most_rows=(most_layers + 2) * (most_beams + config.width),
            most_beams=most_beams,
            has_draft_model=config.has_draft_model,
        ),
        request.estimator or AcceptanceEstimator(),
        rule.draft_scores,
        forest,
        num_beams=config.width,
        most_layers=most_layers,
        most_beams=most_beams,
        has_draft_model=config.has_draft_model,
        host_seconds=lambda: request.clock() - of_target.waited - of_draft.waited,
        target_seconds=lambda: of_target.seconds,
        may_rest=request.running_constraint is None,
    )
