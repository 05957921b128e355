"""Next-token laws of a model along a path, and how far those of two models are apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.distribution import TopDistribution, Warp
from dsbd_runtime.causal_lm import CausalLM

CALL_SIZES = (1, 2, 3, 5, 8, 17, 40)  # rows of the calls in turn: several sizes of engine calls


def laws_along(
    model: CausalLM, token_ids: Sequence[int], warp: Warp, sizes: Sequence[int] = CALL_SIZES
) -> list[TopDistribution]:
    """Return the law after every token of a path, computed in calls of different sizes.

    ``warp.top_k`` must not be larger than the candidates of a top-k head.
    """
    model.keep(np.empty(0, np.int64))
    laws: list[TopDistribution] = []
    turn = 0
    while len(laws) < len(token_ids):
        size = min(sizes[turn % len(sizes)], len(token_ids) - len(laws))
        first = len(laws)
        tokens = np.array(token_ids[first : first + size], np.int64)
        mask = np.tri(size, first + size, first, dtype=np.bool_)
        rows = np.arange(size)
        logits = model.forward(tokens, first + rows, mask, rows)
        laws += warp.distributions(logits)
        turn += 1
    return laws


def total_variation(law: TopDistribution, other: TopDistribution) -> float:
    """Return half the sum of absolute differences of the raw laws.

    Tokens that a law does not name (beyond the candidates of a top-k head) count as one outcome.
    """
    probs, other_probs = (
        dict[int, float](
            zip(each.tokens.tolist(), np.exp(each.raw_log_probs).tolist(), strict=True)
        )
        for each in (law, other)
    )
    named = set(probs) | set(other_probs)
    difference = sum(abs(probs.get(t, 0.0) - other_probs.get(t, 0.0)) for t in named)
    rest = abs(sum(probs.values()) - sum(other_probs.values()))
    return 0.5 * float(difference + rest)


def whole_law_warp(model: CausalLM) -> Warp:
    """Return the warp that changes nothing, over as many tokens as the model names."""
    return Warp(temperature=1.0, top_k=model.num_top_logits, top_p=1.0)


def variations(
    laws: Sequence[TopDistribution], others: Sequence[TopDistribution]
) -> NDArray[np.float64]:
    """Return the total variation at every position, (num_tokens,)."""
    return np.array([total_variation(a, b) for a, b in zip(laws, others, strict=True)])
