"""The loop: draft a forest, verify it in one target call, select layer by layer, prune.

The page to read first. Every strategy is this loop (ALGORITHM.md section 3); what differs lies in
the config's row of the strategy table.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dsbd_ort.decoding.beams import Beams, Hypothesis, common_tokens, joint_law
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.draft import DraftLayer, draft_forest
from dsbd_ort.decoding.errors import DecodingError
from dsbd_ort.decoding.forest import Forest
from dsbd_ort.decoding.forest_cache import ForestCache
from dsbd_ort.decoding.sample_gumbel import draw_gumbel
from dsbd_ort.decoding.stats import Clock, DecodingStats, MeteredModel, Recorder
from dsbd_ort.decoding.step_model import StepModel
from dsbd_ort.decoding.warp import Warp
from dsbd_ort.decoding.width import layer_width


@dataclass(frozen=True, kw_only=True)
class DecodedSequence:
    """One returned sequence.

    Attributes:
        token_ids: the new tokens, the end-of-sequence token included.
        token_logprobs: raw log-probability of every new token under the target.
        logprob: their sum.
        score: logprob / num_new_tokens ** length_penalty, the ranking.
        finish_reason: "eos" or "length".
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
    """The beams after one iteration of the loop."""

    beams: Beams

    @cached_property
    def agreed_tokens(self) -> list[int]:
        """New tokens, from the first on, that all live beams share: they are final."""
        return common_tokens(self.beams.hypotheses)


def decode(
    target: StepModel,
    draft: StepModel | None,
    prompt_ids: Sequence[int],
    config: DecodingConfig,
    rng: np.random.Generator,
) -> DecodeResult:
    """Continue a prompt. See ``decode_steps``."""
    steps = decode_steps(target, draft, prompt_ids, config, rng)
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
    clock: Clock = time.perf_counter,
) -> Generator[DecodeStep, None, DecodeResult]:
    """Continue a prompt; yield the beams after every iteration, return the result.

    Args:
        target: the model whose law the output follows. What its cache holds is dropped.
        draft: the model that proposes; must be None exactly if the strategy has no draft.
        prompt_ids: at least one token id.
        config: the request. ``eos_token_id`` None means that nothing ends a sequence.
        rng: its first 63-bit draw is the noise key; nothing else is taken from it.
        clock: seconds, for the statistics.

    Raises:
        DecodingError: an empty prompt, ids outside the vocabulary, or a missing draft.
    """
    _check_request(target, draft, prompt_ids, config)
    metered_target = MeteredModel(target, clock)
    metered_draft = MeteredModel(draft, clock) if draft else None
    recorder = Recorder(metered_target, metered_draft, clock)

    prompt = np.array(prompt_ids, dtype=np.int64)
    seed = int(rng.integers(2**63))
    forest = Forest(int(prompt[-1]), len(prompt) - 1, seed, config.eos_ids)
    warp = Warp(config.temperature, config.top_k, config.top_p)
    target_cache = ForestCache(metered_target, forest, warp)
    draft_cache = ForestCache(metered_draft, forest, warp) if metered_draft else None
    caches = [target_cache, draft_cache] if draft_cache else [target_cache]
    for cache in caches:
        cache.prefill(prompt[:-1])

    beams, num_layers = Beams([0], np.zeros(1), [Hypothesis()]), 0
    while num_layers < config.max_new_tokens and not _all_absorbing(forest, beams):
        layers: list[DraftLayer] = []
        if draft_cache:
            layer_widths = config.layer_widths[: config.max_new_tokens - num_layers - 1]
            layers = draft_forest(forest, draft_cache, beams, layer_widths, draw_gumbel, num_layers)
        target_cache.compute(list(range(len(forest))))
        widths: list[int] = []
        while all(map(target_cache.is_computed, beams.nodes)):
            layer = layers[len(widths)] if len(widths) < len(layers) else None
            beams = select_layer(forest, target_cache, beams, layer, config, num_layers)
            widths.append(len(beams.nodes))
            num_layers += 1
            if num_layers == config.max_new_tokens or _all_absorbing(forest, beams):
                break
        beams = _prune(forest, caches, beams)
        recorder.record(len(layers), widths)
        yield DecodeStep(beams)
    return _result(forest, beams, config, recorder, len(prompt))


def select_layer(
    forest: Forest,
    target: ForestCache,
    beams: Beams,
    layer: DraftLayer | None,
    config: DecodingConfig,
    step: int,
) -> Beams:
    """Return the next beams: draws from the target's joint law, whatever was drafted."""
    law = joint_law(beams.log_weights, [target.law(node) for node in beams.nodes])
    width = layer_width(config, beams.nodes, law, layer)
    drawn = draw_gumbel(forest, beams.nodes, law, width, step)
    chosen = law.subset(drawn)
    hypotheses = [
        beams.hypotheses[parent]
        if forest.is_absorbing[beams.nodes[parent]]
        else beams.hypotheses[parent].extended(token, logprob)
        for parent, token, logprob in zip(
            chosen.parents.tolist(),
            chosen.tokens.tolist(),
            chosen.raw_log_probs.tolist(),
            strict=True,
        )
    ]
    return Beams(forest.descend(beams.nodes, law, drawn), chosen.log_probs, hypotheses)


def _all_absorbing(forest: Forest, beams: Beams) -> bool:
    return all(forest.is_absorbing[node] for node in beams.nodes)


def _prune(forest: Forest, caches: list[ForestCache], beams: Beams) -> Beams:
    """Keep the beams, their descendants and what these still need; drop the rest everywhere."""
    live = forest.subtree(beams.nodes)
    for cache in caches:
        live |= cache.parents_of_pending(live)
    renumbered = forest.prune(sorted(live))
    for cache in caches:
        cache.prune(renumbered)
    nodes = [renumbered[node] for node in beams.nodes]
    return Beams(nodes, beams.log_weights, beams.hypotheses)


def _result(
    forest: Forest, beams: Beams, config: DecodingConfig, recorder: Recorder, num_prompt: int
) -> DecodeResult:
    sequences = []
    for node, hypothesis in zip(beams.nodes, beams.hypotheses, strict=True):
        chain = hypothesis.chain()
        sequences.append(
            DecodedSequence(
                token_ids=[link.token for link in chain],
                token_logprobs=[link.token_logprob for link in chain],
                logprob=hypothesis.logprob,
                score=hypothesis.score(config.length_penalty),
                finish_reason="eos" if forest.is_absorbing[node] else "length",
            )
        )
    sequences.sort(key=lambda sequence: -sequence.score)
    stats = recorder.stats(num_prompt, len(sequences[0].token_ids))
    return DecodeResult(sequences[: config.num_return_sequences], stats)


def _check_request(
    target: StepModel, draft: StepModel | None, prompt_ids: Sequence[int], config: DecodingConfig
) -> None:
    if not len(prompt_ids):
        raise DecodingError("the prompt has no token; give at least one")
    lowest, highest = min(prompt_ids), max(prompt_ids)
    if lowest < 0 or highest >= target.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise DecodingError(
            f"prompt has token id {wrong}; expected 0 to {target.vocab_size - 1}, the target's "
            "vocabulary"
        )
    if (draft is None) == config.row.has_draft:
        state = "needs a draft model, none was given" if draft is None else "takes no draft model"
        raise DecodingError(f"strategy {config.strategy} {state}")
    if draft is not None and draft.vocab_size != target.vocab_size:
        raise DecodingError(
            f"draft has {draft.vocab_size} tokens, target {target.vocab_size}; use a pair that "
            "shares its vocabulary"
        )
