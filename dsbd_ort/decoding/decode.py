"""The loop: draft a forest, verify it in one target call, select layer by layer, prune.

The page to read first. Every strategy is this loop (ALGORITHM.md section 3); what differs lies in
the selection rule that its row of the strategy table names.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dsbd_ort.decoding.beams import Beams, Hypothesis, common_tokens
from dsbd_ort.decoding.cached_prefix import CachedPrefix
from dsbd_ort.decoding.chance import Chance, RandomChance
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.cost_curve import EngineCosts, measure_costs
from dsbd_ort.decoding.draft import DraftLayer, draft_forest
from dsbd_ort.decoding.drafting import Drafting, FixedDrafting
from dsbd_ort.decoding.experience import Experience
from dsbd_ort.decoding.forest import Forest
from dsbd_ort.decoding.forest_cache import ForestCache
from dsbd_ort.decoding.law_source import check_top_k
from dsbd_ort.decoding.request_checks import check_request
from dsbd_ort.decoding.rule import Finished, SelectionRule
from dsbd_ort.decoding.rules import rule_of
from dsbd_ort.decoding.stats import Clock, DecodingStats, MeteredModel, Recorder
from dsbd_ort.decoding.step_model import StepModel
from dsbd_ort.decoding.stopping import StopState, state_after
from dsbd_ort.decoding.throughput import ThroughputDrafting
from dsbd_ort.decoding.trace import TraceRecorder
from dsbd_ort.decoding.tracer import Observed, Tracer


@dataclass(frozen=True, kw_only=True)
class DecodedSequence:
    """One returned sequence.

    Attributes:
        token_ids: the new tokens, those included that end the sequence.
        token_logprobs: raw log-probability of every new token under the target.
        logprob: their sum.
        score: logprob / num_new_tokens ** length_penalty, the ranking.
        finish_reason: "eos", "stop" (a stop string) or "length".
    """

    token_ids: list[int]
    token_logprobs: list[float]
    logprob: float
    score: float
    finish_reason: str


@dataclass(frozen=True)
class DecodeResult:
    """The sequences, best first, and the statistics of a request."""

    sequences: list[DecodedSequence]
    stats: DecodingStats


@dataclass(frozen=True)
class DecodeStep:
    """What is alive after one iteration of the loop."""

    hypotheses: list[Hypothesis]

    @cached_property
    def agreed_tokens(self) -> list[int]:
        """New tokens, from the first on, that all live hypotheses share: they are final."""
        return common_tokens(self.hypotheses)


def decode(
    target: StepModel,
    draft: StepModel | None,
    prompt_ids: Sequence[int],
    config: DecodingConfig,
    rng: np.random.Generator,
    *,
    stop: StopState | None = None,
    trace: TraceRecorder | None = None,
) -> DecodeResult:
    """Continue a prompt. See ``decode_steps``."""
    steps = decode_steps(target, draft, prompt_ids, config, rng, stop=stop, trace=trace)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: DecodeResult = stop.value
            return result


def decode_steps(
    target: StepModel,
    draft: StepModel | None,
    prompt_ids: Sequence[int],
    config: DecodingConfig,
    rng: np.random.Generator,
    *,
    stop: StopState | None = None,
    chance: Chance | None = None,
    clock: Clock = time.perf_counter,
    costs: EngineCosts | None = None,
    experience: Experience | None = None,
    prefixes: tuple[CachedPrefix, CachedPrefix] | None = None,
    trace: TraceRecorder | None = None,
) -> Generator[DecodeStep, None, DecodeResult]:
    """Continue a prompt; yield the beams after every iteration, return the result.

    Args:
        target: the model whose law the output follows. Of what its cache holds, no more than a
            prefix of the prompt is kept.
        draft: the model that proposes; strategies without a draft do not touch it.
        prompt_ids: at least one token id.
        config: the request. ``eos_token_id`` None means that nothing ends a sequence.
        rng: its first 63-bit draw is the noise key; only the rejection coupling takes more.
        stop: of the empty continuation: what finds the request's ``stop_strings``. A beam ends
            with the token that makes its state end.
        chance: what the rejection coupling draws by, instead of ``rng``.
        clock: seconds, for the statistics.
        costs: of both engines, for draft_policy "throughput"; None measures them first.
        experience: of earlier requests with the same widths, for the same policy; is added to.
        prefixes: what the caches of target and draft hold already, updated for the next request;
            None drops it.
        trace: is told what every iteration did.

    Raises:
        DecodingError: an empty prompt, ids outside the vocabulary, a missing draft, or more
            tokens to look at than an engine returns.
    """
    check_request(target, draft, prompt_ids, config, stop)
    metered_target = MeteredModel(target, clock)
    metered_draft = MeteredModel(draft, clock) if draft and config.row.has_draft else None
    recorder = Recorder(metered_target, metered_draft, clock)

    prompt = np.array(prompt_ids, dtype=np.int64)
    seed = int(rng.integers(2**63))
    forest = Forest(int(prompt[-1]), len(prompt) - 1, seed, config.eos_ids, stop)
    rule = rule_of(config, forest, chance or RandomChance(rng))
    check_top_k("target", metered_target, config, rule.warp.top_k)
    if metered_draft:
        check_top_k("draft", metered_draft, config, rule.warp.top_k)
    if config.draft_policy == "throughput" and draft and costs is None:
        costs, prefixes = measure_costs(target, draft, clock), None
    of_target, of_draft = prefixes or (CachedPrefix(), CachedPrefix())
    target_cache = ForestCache("target", metered_target, forest, rule.warp, of_target)
    draft_cache = None
    if metered_draft:
        draft_cache = ForestCache("draft", metered_draft, forest, rule.warp, of_draft)
    caches = [target_cache, draft_cache] if draft_cache else [target_cache]
    drafting = _drafting(config, rule, costs, experience)
    for cache in caches:
        cache.prefill(prompt[:-1])

    beams, num_layers = Beams.single(0, Hypothesis()), 0
    tracer = None
    if trace is not None:
        trace.begin(prompt.tolist(), config)
        tracer = Tracer(trace, forest, target_cache, draft_cache, recorder, beams)
    while not rule.is_finished(beams, num_layers):
        layers: list[DraftLayer] = []
        if draft_cache:
            num_pending = len(target_cache.pending(beams.nodes))
            drafting.begin(num_pending, config.max_new_tokens - num_layers - 1)
            layers = draft_forest(forest, draft_cache, beams, drafting, num_layers)
        target_cache.compute(list(range(len(forest))))
        committed: list[Beams] = []
        for selected in rule.select(target_cache, beams, layers, num_layers):
            committed.append(selected)
            beams = selected
            if rule.is_finished(beams, num_layers + len(committed)):
                break
        num_layers += len(committed)
        drafting.observe(forest, [layer.nodes for layer in committed])
        if config.memory == "single":
            beams = _most_likely(beams)
        survivors = _survivors(forest, caches, beams, rule.keeps_descendants)
        if tracer:
            tracer.observe(Observed(layers, committed, beams, rule.live(beams), survivors))
        beams = _prune(forest, caches, beams, survivors)
        recorder.record(len(layers), [layer.width for layer in committed])
        yield DecodeStep(rule.live(beams))

    for cache in caches:
        cache.finish([*prompt_ids, *common_tokens(beams.hypotheses)])
    finished = rule.results(beams)[: config.num_return_sequences]
    sequences = [_sequence(sequence, config, stop) for sequence in finished]
    return DecodeResult(sequences, recorder.stats(len(prompt), len(sequences[0].token_ids)))


def _drafting(
    config: DecodingConfig,
    rule: SelectionRule,
    costs: EngineCosts | None,
    experience: Experience | None,
) -> Drafting:
    """Return the drafting policy of a request."""
    if costs is None or rule.draft_scores is None or config.draft_policy == "fixed":
        return FixedDrafting(config.layer_widths, rule.propose)
    return ThroughputDrafting(
        costs,
        experience or Experience.initial(),
        rule.draft_scores,
        num_beams=config.width,
        most_layers=config.draft_length or 0,
        most_beams=config.most_draft_beams,
    )


def _most_likely(beams: Beams) -> Beams:
    """Keep the beam of highest log-probability per token (DSBD paper, memory reduction)."""
    per_token = [hypothesis.score(1.0) for hypothesis in beams.hypotheses]
    return beams.only(int(np.argmax(per_token)))


def _survivors(
    forest: Forest, caches: list[ForestCache], beams: Beams, keeps_descendants: bool
) -> set[int]:
    """Return the nodes that can still matter: beams, what they need, perhaps descendants."""
    live = forest.subtree(beams.nodes) if keeps_descendants else set(beams.nodes)
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


def _sequence(
    finished: Finished, config: DecodingConfig, stop: StopState | None
) -> DecodedSequence:
    chain = finished.hypothesis.chain()
    token_ids = [link.token for link in chain]
    return DecodedSequence(
        token_ids=token_ids,
        token_logprobs=[link.token_logprob for link in chain],
        logprob=finished.hypothesis.logprob,
        score=finished.score,
        finish_reason=_finish_reason(token_ids, config, stop),
    )


def _finish_reason(token_ids: list[int], config: DecodingConfig, stop: StopState | None) -> str:
    if token_ids[-1] in config.eos_ids:
        return "eos"
    return "stop" if stop and state_after(stop, token_ids).has_ended else "length"
