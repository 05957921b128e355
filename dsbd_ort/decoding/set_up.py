"""The parts of a request that begins: forest, rule, draft policy, caches, observers."""

from __future__ import annotations

from dataclasses import dataclass

from dsbd_forward.engine import EngineSpec
from dsbd_ort.decoding.beams import Agreement, Hypotheses
from dsbd_ort.decoding.cache_view import CacheView
from dsbd_ort.decoding.control.controls import Controls, controls_of
from dsbd_ort.decoding.control.forbidden_tokens import ForbiddenTokens
from dsbd_ort.decoding.control.path_states import PathStates, StopStates
from dsbd_ort.decoding.drafting.acceptance import AcceptanceEstimator
from dsbd_ort.decoding.drafting.draft import Drafter, DraftPolicy, FixedDraftPolicy, Observer
from dsbd_ort.decoding.drafting.drafters import ChainedDrafter, Proposers
from dsbd_ort.decoding.drafting.ngram import NGramDrafter
from dsbd_ort.decoding.drafting.throughput import ThroughputDraftPolicy
from dsbd_ort.decoding.engine_call import Meter
from dsbd_ort.decoding.forest import Forest
from dsbd_ort.decoding.forest_cache import ForestCache
from dsbd_ort.decoding.joint_rule import JointGreedyRule, JointSpeculativeRule
from dsbd_ort.decoding.node_features import DraftFeatures, TargetFeatures, align_prefixes
from dsbd_ort.decoding.rejection_coupling import GeneratorSource, RejectionCoupling
from dsbd_ort.decoding.request import DecodingRequest, check_request
from dsbd_ort.decoding.rule import Growth, SelectionRule
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
    check_top_k("target", target, config)
    if draft and config.has_draft_model:
        check_top_k("draft", draft, config)


@dataclass(frozen=True)
class RunningRequest:
    """The parts of one running request.

    Attributes:
        draft: the draft engine's side of the forest, None where no model drafts.
        follower: the same where it computes the prompt part by part, as the target does; else None.
        drafter: what drafts: the same, or it and others; None where nothing does.
        observers: of every iteration, before it is pruned.
    """

    request: DecodingRequest
    forest: Forest
    hypotheses: Hypotheses
    agreement: Agreement
    rule: SelectionRule
    policy: DraftPolicy
    target: ForestCache
    draft: ForestCache | None
    follower: ForestCache | None
    drafter: Drafter | None
    stats: StatsRecorder
    tracer: Tracer | None
    observers: list[Observer]
    tops: TopTokens | None
    scorer: PromptScorer | None

    @property
    def caches(self) -> list[ForestCache]:
        """Of the engines in use."""
        return [self.target, self.draft] if self.draft else [self.target]


def set_up(request: DecodingRequest, target: CacheView, draft: CacheView | None) -> RunningRequest:
    """Return the parts of a request that begins; raises what ``check_decodable`` raises."""
    spec, draft_spec = target.kv.model.spec, draft.kv.model.spec if draft else None
    check_decodable(request, spec, draft_spec)
    config, vocab_size = request.config, spec.vocab_size
    controls = controls_of(config, request.running_constraint, request.prompt_ids, vocab_size)
    ngram = _ngram_drafter(request)
    growth = _growth(request, controls, ngram)
    forest, rule, warp = growth.forest, _rule(request, growth), Warp.of(config)
    num_top = min(config.top_logprobs, vocab_size)
    tops = TopTokens(num_top, growth.hypotheses) if num_top else None
    reads_later = not config.row.has_draft and not spec.head.num_top_logits
    target_warp = warp.narrowed() if reads_later else warp
    clock = request.clock
    has_feature_draft = config.has_draft_model and draft_spec and draft_spec.reads_features
    if draft is not None and has_feature_draft:
        align_prefixes(target.prefix, draft.prefix)
        target.features = of_target = TargetFeatures(target)
        draft.features = DraftFeatures(forest, of_target)
    target_cache = ForestCache("target", target, forest, target_warp, controls, tops, clock)
    draft_cache, draft_meter = None, None
    if draft is not None and config.has_draft_model:
        draft_cache = ForestCache("draft", draft, forest, warp, controls, clock=clock)
        draft_meter = draft.meter
    stats = StatsRecorder(
        len(request.prompt_ids),
        target.meter,
        draft_meter,
        request.clock,
        config.drafter or "model",
    )
    meters = [target.meter, draft_meter or Meter()]
    policy = _draft_policy(request, rule, forest, meters)
    tracer, proposers = None, None
    if request.trace is not None:
        forbidden, proposers = None, Proposers()
        if controls is not None and controls.constraint is not None:
            forbidden = controls.forbidden = ForbiddenTokens()
        tracer = Tracer(
            request.trace, growth, target_cache, draft_cache, stats, proposers, forbidden
        )
    drafter: Drafter | None = draft_cache
    observers: list[Observer] = [policy, stats, *([tracer] if tracer else [])]
    has_forced = controls is not None and controls.constraint is not None
    if ngram or (config.drafts and has_forced and config.row.rule != "joint"):
        drafter = chained = ChainedDrafter(
            forest,
            controls,
            ngram,
            draft_cache,
            proposers=proposers,
            proposes_ends=not rule.reads_draft_distributions,
        )
        observers.append(chained)
    return RunningRequest(
        request=request,
        forest=forest,
        hypotheses=growth.hypotheses,
        agreement=Agreement(growth.hypotheses),
        rule=rule,
        policy=policy,
        target=target_cache,
        draft=draft_cache,
        follower=draft_cache if has_feature_draft else None,
        drafter=drafter,
        stats=stats,
        tracer=tracer,
        observers=observers,
        tops=tops,
        scorer=PromptScorer(request.prompt_ids, num_top)
        if request.config.prompt_logprobs
        else None,
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
    )


def _growth(
    request: DecodingRequest, controls: Controls | None, ngram: NGramDrafter | None
) -> Growth:
    """Return the forest and the hypotheses of a request that begins."""
    config, prompt_ids = request.config, request.prompt_ids
    seed = int(request.rng.integers(2**63))
    states: list[PathStates] = []
    if request.stop:
        states.append(StopStates(request.stop, config.min_new_tokens))
    states += controls.path_states if controls else []
    states += [ngram.paths] if ngram else []
    forest = Forest(int(prompt_ids[-1]), len(prompt_ids) - 1, seed, config.eos_ids, states)
    return Growth(forest, Hypotheses(), repeats=config.replacement)


def _rule(request: DecodingRequest, growth: Growth) -> SelectionRule:
    """Return the selection rule of the strategy, with the state of one request."""
    config = request.config
    match config.row.rule:
        case "search":
            return SearchRule(config, growth)
        case "joint":
            return JointSpeculativeRule(config, growth)
        case "joint-greedy":
            return JointGreedyRule(config, growth)
    if config.coupling == "gumbel":
        return SampleRule(config, growth, GumbelCoupling(growth.forest, config.replacement))
    source = request.random_source or GeneratorSource(request.rng)
    return SampleRule(config, growth, RejectionCoupling(source, config.replacement))


def _draft_policy(
    request: DecodingRequest, rule: SelectionRule, forest: Forest, meters: list[Meter]
) -> DraftPolicy:
    """Return the draft policy of a request; ``meters`` are those of its engines."""
    config = request.config
    if request.costs is None or config.draft_policy == "fixed":
        return FixedDraftPolicy(config.layer_widths, rule.propose)
    return ThroughputDraftPolicy(
        request.costs,
        request.estimator or AcceptanceEstimator.initial(),
        rule.draft_scores,
        forest,
        num_beams=config.width,
        most_layers=config.draft_length or 0,
        most_beams=config.most_draft_beams,
        num_sharers=request.num_sharers,
        has_draft_model=config.has_draft_model,
        host_seconds=lambda: request.clock() - sum(meter.waited for meter in meters),
        may_rest=request.running_constraint is None,
    )
