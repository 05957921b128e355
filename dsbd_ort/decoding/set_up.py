"""The parts of a request that begins: forest, rule, draft policy, caches, observers."""

from dataclasses import dataclass

from dsbd_forward.spec import EngineSpec
from dsbd_ort.decoding.beams import Agreement, Hypotheses
from dsbd_ort.decoding.cache_view import CacheView
from dsbd_ort.decoding.computed_distributions import ComputedDistributions
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.draft_stage import DraftStage
from dsbd_ort.decoding.drafting.acceptance import WHOLE
from dsbd_ort.decoding.drafting.cost_curve import RequestCosts
from dsbd_ort.decoding.drafting.draft import (
    MOST_FORCED_LAYERS,
    Drafter,
    DraftPolicy,
    FixedDraftPolicy,
    Observer,
    Proposer,
)
from dsbd_ort.decoding.drafting.draft_context import DraftContext, reads_whole_path
from dsbd_ort.decoding.drafting.drafters import ChainedDrafter
from dsbd_ort.decoding.drafting.ngram import NGramDrafter
from dsbd_ort.decoding.drafting.throughput import ThroughputDraftPolicy
from dsbd_ort.decoding.engine_call import Meter
from dsbd_ort.decoding.forest import Forest
from dsbd_ort.decoding.forest_runner import ForestRunner, LateRunner
from dsbd_ort.decoding.joint_rule import JointGreedyRule, JointSpeculativeRule
from dsbd_ort.decoding.logits_processing.allowed_after import ForbiddenTokens
from dsbd_ort.decoding.logits_processing.path_states import PathStates, StopStates
from dsbd_ort.decoding.logits_processing.request_processing import RequestProcessing
from dsbd_ort.decoding.node_features import DraftFeatures, TargetFeatures, align_prefixes
from dsbd_ort.decoding.option_row import FREE_OF_THE_DRAFT, depends_on_draft
from dsbd_ort.decoding.rejection_coupling import RandomSource, RejectionCoupling
from dsbd_ort.decoding.request import DecodingRequest, check_request
from dsbd_ort.decoding.row_bounds import expected_rows
from dsbd_ort.decoding.rule import LayerBuilder, SelectionRule
from dsbd_ort.decoding.sample_rule import GumbelCoupling, SampleRule
from dsbd_ort.decoding.search_rule import SearchRule
from dsbd_ort.decoding.stats import StatsRecorder
from dsbd_ort.decoding.top_tokens import PromptScorer, TopTokens, check_top_logprobs
from dsbd_ort.decoding.trace import Tracer
from dsbd_ort.decoding.warp import Warp, check_top_k


def check_decodable(request: DecodingRequest, target: EngineSpec, draft: EngineSpec | None) -> None:
    """Raise DecodingError for a request that these engines cannot decode; none is called."""
    config = request.config
    check_request(request, target, draft)
    check_top_logprobs(target, config)
    check_top_k(target, config)


def _most_layers(request: DecodingRequest) -> int:
    """Return the most layers that a draft may have, those included that a constraint forces."""
    forced = MOST_FORCED_LAYERS if request.running_constraint is not None else 0
    return len(request.config.layer_widths) + forced


@dataclass(frozen=True)
class LoopParts:
    """The parts that the loop of one request works with."""

    request: DecodingRequest
    forest: Forest
    hypotheses: Hypotheses
    agreement: Agreement
    rule: SelectionRule
    draft_stage: DraftStage
    target: ForestRunner
    runners: list[ForestRunner]
    lockstep: list[ForestRunner]  # compute the prompt part by part, as the target does
    stats: StatsRecorder
    observers: list[Observer]
    tracers: list[Tracer]  # those of the observers that also observe the prompt


def set_up(request: DecodingRequest, target: CacheView, draft: CacheView | None) -> LoopParts:
    """Return the parts of a request that begins; raises what ``check_decodable`` raises."""
    check_decodable(request, target.spec, draft.spec if draft else None)
    config = request.config
    num_rows = expected_rows(len(request.prompt_ids), config)
    target.row_cache.expect(num_rows - len(target.prefix.tokens))
    paths, costs = _paths(request, target.spec.vocab_size), _request_costs(request)
    builder, rule = paths.builder, _rule(request, paths.builder)
    runners = _runners(request, paths, target, draft, costs)
    of_target, *of_draft = runners
    meters = of_target.meter, of_draft[0].meter if of_draft else Meter()
    late = next((runner for runner in of_draft if isinstance(runner, LateRunner)), None)
    if draft is not None:
        num_skipped = late.context.offset if late else 0
        draft.row_cache.expect(num_rows - num_skipped - len(draft.prefix.tokens))
    policy = _draft_policy(request, rule, builder.forest, *meters, late, costs)
    num_tokens, num_cached = len(request.prompt_ids), len(target.prefix.tokens)
    name = config.drafter or "model"
    stats = StatsRecorder(num_tokens, *meters, request.clock, name, num_cached)
    tracers, proposers = [], dict[int, Proposer]()
    if request.trace is not None:
        tracers = [Tracer(request.trace, builder, runners, stats, proposers, paths.forbidden)]
    chained = _chained_drafters(paths, rule, of_draft, config, proposers if tracers else None)
    drafters: list[Drafter] = [*chained, *of_draft]
    drafter = drafters[0] if drafters else None
    tops = of_target.distributions.tops
    return LoopParts(
        request=request,
        forest=builder.forest,
        hypotheses=builder.hypotheses,
        agreement=Agreement(builder.hypotheses),
        rule=rule,
        draft_stage=DraftStage(config, rule, policy, drafter, of_target, late),
        target=of_target,
        runners=runners,
        lockstep=[] if late else of_draft,
        stats=stats,
        observers=[policy, stats, *tracers, *chained, *([tops] if tops else [])],
        tracers=tracers,
    )


@dataclass(frozen=True)
class _Paths:
    """State of the paths of a request that does not depend on the engine."""

    builder: LayerBuilder
    processing: RequestProcessing | None
    forbidden: ForbiddenTokens | None
    ngram: NGramDrafter | None


def _paths(request: DecodingRequest, vocab_size: int) -> _Paths:
    config, constraint, prompt_ids = request.config, request.running_constraint, request.prompt_ids
    is_traced = request.trace is not None and constraint is not None
    forbidden = ForbiddenTokens() if is_traced else None
    processing = None
    if config.processes_logits:
        notes = forbidden, request.source_ids, request.allowed_mass
        processing = RequestProcessing(config, constraint, prompt_ids, vocab_size, *notes)
    ngram = None
    if config.has_ngram_drafter:
        ngram = NGramDrafter(
            prompt_ids,
            request.ngram_pool,
            config.temperature or 1.0,
            only_long_matches=config.has_draft_model,
            copied_ids=request.copied_ids,
            num_beams=config.num_beams,
        )
    states: list[PathStates] = []
    seed = int(request.rng.integers(2**63))
    if request.stop:
        states.append(StopStates(request.stop, config.min_new_tokens))
    states += processing.path_states if processing else []
    states += [ngram.paths] if ngram else []
    forest = Forest(int(prompt_ids[-1]), len(prompt_ids) - 1, seed, config.eos_ids, states)
    builder = LayerBuilder(forest, Hypotheses(), repeats=config.replacement)
    return _Paths(builder, processing, forbidden, ngram)


def _runners(
    request: DecodingRequest,
    paths: _Paths,
    target: CacheView,
    draft: CacheView | None,
    costs: RequestCosts | None,
) -> list[ForestRunner]:
    """Return each engine's rows of the forest: the target's, and the draft's if a model drafts."""
    config, spec, forest = request.config, target.spec, paths.builder.forest
    num_top = min(config.top_logprobs, spec.vocab_size)
    tops = TopTokens(num_top, forest, paths.builder.hypotheses) if num_top else None
    scorer = PromptScorer(request.prompt_ids, num_top) if config.prompt_logprobs else None
    warp = target_warp = Warp.of(config)
    if not config.row.has_draft and not spec.head.num_top_logits:  # all logits are read later
        target_warp = warp.narrowed()
    of_target = ComputedDistributions("target", spec, forest, target_warp, paths.processing, tops)
    if draft is None or not config.has_draft_model:
        return [ForestRunner("target", target, forest, of_target, scorer=scorer)]
    draft_warp = warp.within(draft.spec.head.num_top_logits)
    drafted = ComputedDistributions("draft", draft.spec, forest, draft_warp, paths.processing)
    if not draft.spec.reads_features:
        path = request.prompt_ids, paths.builder.hypotheses
        context = _draft_context(request, draft.spec, costs)
        late = LateRunner(draft, forest, drafted, *path, context)
        return [ForestRunner("target", target, forest, of_target, scorer=scorer), late]
    align_prefixes(target.prefix, draft.prefix)
    features = TargetFeatures(target)
    draft_features = DraftFeatures(forest, features)
    draft.own_features = draft_features.own_of
    return [
        ForestRunner("target", target, forest, of_target, [features], scorer),
        ForestRunner("draft", draft, forest, drafted, [draft_features]),
    ]


def _draft_context(
    request: DecodingRequest, draft: EngineSpec, costs: RequestCosts | None
) -> DraftContext:
    lengths = len(request.prompt_ids), request.config.max_new_tokens, _most_layers(request)
    if reads_whole_path(draft, request.source):
        return DraftContext("all", None, None, lengths, None, request.estimator)
    config, size = request.config, request.config.draft_context
    if size == "auto" and (not FREE_OF_THE_DRAFT.is_met(config) or depends_on_draft(config)):
        size = "all"
    max_positions, begin_token = draft.context_length, request.begin_token
    return DraftContext(size, max_positions, begin_token, lengths, costs, request.estimator)


def _chained_drafters(
    paths: _Paths,
    rule: SelectionRule,
    of_draft: list[ForestRunner],
    config: DecodingConfig,
    proposers: dict[int, Proposer] | None,
) -> list[ChainedDrafter]:
    """Return the drafter that tries a constraint or n-grams before the model, if needed."""
    has_forced = paths.processing is not None and paths.processing.constraint is not None
    if not paths.ngram and not (config.drafts and has_forced and config.row.rule != "joint"):
        return []
    chained = ChainedDrafter(
        paths.builder.forest,
        paths.processing,
        paths.ngram,
        of_draft[0] if of_draft else None,
        proposers=proposers,
        proposes_ends=not rule.reads_draft_distributions,
    )
    return [chained]


def _rule(request: DecodingRequest, builder: LayerBuilder) -> SelectionRule:
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
    source = request.random_source or RandomSource(request.rng)
    return SampleRule(config, builder, RejectionCoupling(source, config.replacement))


def _request_costs(request: DecodingRequest) -> RequestCosts | None:
    if request.costs is None:
        return None
    config = request.config
    most_layers, most_beams = config.draft_length or 0, config.most_draft_beams
    return RequestCosts(
        request.costs,
        request.num_sharers,
        num_beams=config.num_beams,
        most_rows=(most_layers + 2) * (most_beams + config.num_beams),
        most_beams=most_beams,
        has_draft_model=config.has_draft_model,
    )


def _draft_policy(
    request: DecodingRequest,
    rule: SelectionRule,
    forest: Forest,
    of_target: Meter,
    of_draft: Meter,
    late: LateRunner | None,
    costs: RequestCosts | None,
) -> DraftPolicy:
    config = request.config
    if costs is None or config.draft_policy == "fixed":
        return FixedDraftPolicy(config.layer_widths, rule.propose)
    assert rule.draft_scores is not None  # as the options require of policy "throughput"
    return ThroughputDraftPolicy(
        costs,
        request.estimator,
        rule.draft_scores,
        forest,
        most_layers=config.draft_length or 0,
        host_seconds=lambda: request.clock() - of_target.waited - of_draft.waited,
        target_seconds=lambda: of_target.seconds,
        unread=late.unread if late else lambda: (0, 0),
        context_size=(lambda: late.context.size) if late else lambda: WHOLE,
        may_rest=request.running_constraint is None,
    )
