"""Near-ties: the gap between two candidates' scores at which runs with the same seed differ.

In each layer, beam sampling selects the candidates with the largest log-weight + Gumbel number
(dsbd_ort/decoding/sample_rule.py). The Gumbel numbers depend only on the seed. So two engines with
nearly equal distributions differ only if two scores are nearly equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Forward
from dsbd_ort.decoding import DecodingConfig, DecodingRequest, WithResult, decode_iterations
from dsbd_ort.decoding.distribution import TokenDistribution
from dsbd_ort.decoding.noise import child_key, gumbel_noise, root_key
from dsbd_ort.decoding.warp import Warp
from dsbd_runtime.engine.causal_lm import CausalLM

Tokens = tuple[int, ...]

CALL_SIZES = (1, 2, 3, 5, 8, 17, 40)  # rows of successive engine calls: several sizes


@dataclass(frozen=True)
class Trace:
    """Beam sampling on the reference engine.

    Attributes:
        layers: for each layer, the beams as their new tokens so far.
        best: new tokens of the best beam.
        scores: scores by which the final beams are ranked, by the beams' tokens.
    """

    layers: list[set[Tokens]]
    best: Tokens
    scores: dict[Tokens, float]


def trace_of(
    model: CausalLM, prompt_ids: Sequence[int], config: DecodingConfig, seed: int
) -> Trace:
    """Run beam sampling and record it; ``config`` must return all beams."""
    iterations = WithResult(
        decode_iterations(
            DecodingRequest(prompt_ids=prompt_ids, config=config, rng=np.random.default_rng(seed)),
            model,
            None,
        )
    )
    layers = [
        {tuple(link.token for link in hypothesis.chain()) for hypothesis in output.hypotheses}
        for output in iterations
    ]
    sequences = iterations.result.sequences
    scores = {tuple(sequence.token_ids): sequence.score for sequence in sequences}
    return Trace(layers, tuple(sequences[0].token_ids), scores)


def gap_of(
    model: CausalLM,
    prompt_ids: Sequence[int],
    config: DecodingConfig,
    seed: int,
    trace: Trace,
    other: Tokens,
) -> float:
    """Return the gap by which ``other``, another engine's best beam, is not the trace's best beam.

    In the first layer whose beams do not include ``other``: the lowest score of a beam minus the
    score of that candidate; infinite if the candidate is beyond top-k. If all layers include it:
    the difference of the two final scores.
    """
    for depth, beams in enumerate(trace.layers, start=1):
        if other[:depth] not in beams:
            scores = [_score(model, prompt_ids, beam, config, seed) for beam in beams]
            return min(scores) - _score(model, prompt_ids, other[:depth], config, seed)
    return trace.scores[trace.best] - trace.scores[other]


def _score(
    model: CausalLM, prompt_ids: Sequence[int], path: Tokens, config: DecodingConfig, seed: int
) -> float:
    """Return log-weight + Gumbel number of a candidate, by the distributions of ``model``."""
    warp = Warp.of(config)
    distributions = distributions_along(model, [*prompt_ids, *path[:-1]], warp)[
        len(prompt_ids) - 1 :
    ]
    log_weight, key = 0.0, root_key(int(np.random.default_rng(seed).integers(2**63)))
    for distribution, token in zip(distributions, path, strict=True):
        places = np.flatnonzero(distribution.tokens == token)
        log_weight += float(distribution.log_probs[places[0]]) if len(places) else -np.inf
        key = child_key(key, token)
    noise = gumbel_noise(np.array([key], np.uint64), len(path) - 1)
    return log_weight + float(noise[0])


def distributions_along(
    model: CausalLM, token_ids: Sequence[int], warp: Warp, sizes: Sequence[int] = CALL_SIZES
) -> list[TokenDistribution]:
    """Return the distribution after every token of a path, computed in calls of different sizes.

    ``warp.top_k`` must not be larger than the candidates of a top-k head.
    """
    model.keep(np.empty(0, np.int64))
    distributions: list[TokenDistribution] = []
    turn = 0
    while len(distributions) < len(token_ids):
        size = min(sizes[turn % len(sizes)], len(token_ids) - len(distributions))
        first = len(distributions)
        tokens = np.array(token_ids[first : first + size], np.int64)
        mask = np.tri(size, first + size, first, dtype=np.bool_)
        rows = np.arange(size)
        result = model.forward(Forward(tokens, first + rows, mask, rows))
        distributions.extend(iter(warp.distributions(result.logits)))
        turn += 1
    return distributions


def total_variation(distribution: TokenDistribution, other: TokenDistribution) -> float:
    """Return half the sum of absolute differences of the raw distributions.

    All tokens beyond a top-k head's are treated as one outcome.
    """
    probs, other_probs = (
        dict[int, float](
            zip(each.tokens.tolist(), np.exp(each.raw_log_probs).tolist(), strict=True)
        )
        for each in (distribution, other)
    )
    named = set(probs) | set(other_probs)
    difference = sum(abs(probs.get(t, 0.0) - other_probs.get(t, 0.0)) for t in named)
    rest = abs(sum(probs.values()) - sum(other_probs.values()))
    return 0.5 * float(difference + rest)


def raw_warp(model: CausalLM) -> Warp:
    """Return a warp that changes nothing, for as many tokens as the model returns."""
    return Warp(temperature=1.0, top_k=model.spec.head.num_top_logits, top_p=1.0)


def variations(
    distributions: Sequence[TokenDistribution], others: Sequence[TokenDistribution]
) -> NDArray[np.float64]:
    """Return the total variation at every position, (num_tokens,)."""
    return np.array([total_variation(a, b) for a, b in zip(distributions, others, strict=True)])
