"""Times of tokens, from the attention of the model to the sound.

As in transformers' Whisper: the weights of the heads that follow the sound are normalized over the
tokens, smoothed by a median over the positions, and averaged. Dynamic time warping then finds the
path through tokens and positions, both in order, with the highest weights. The position at which it
reaches a token is the time of the token.
"""

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]
_DIAGONAL, _TOKEN, _POSITION = 0, 1, 2  # a step of the path: to the next of both, or of one


def token_positions(weights: Matrix, median_filter_width: int) -> NDArray[np.int64]:
    """Return the position of the sound of each token, (n,) int64, increasing.

    weights: (A, n - 1, N) float32, of A heads. The last token, which usually ends the text, has the
        position of the token before it.
    """
    if not weights.shape[1]:
        return np.zeros(1, np.int64)
    positions = warped(-smoothed(weights, median_filter_width))
    return np.append(positions, positions[-1])


def smoothed(weights: Matrix, median_filter_width: int) -> Matrix:
    """Return the mean of the heads of weights (A, S, N), normalized and smoothed, (S, N)."""
    deviation = weights.std(axis=1, keepdims=True)
    centred = weights - weights.mean(axis=1, keepdims=True)
    # A position with equal weights of all tokens carries no information.
    scaled = np.divide(centred, deviation, out=np.zeros_like(centred), where=deviation > 0)
    medians = [_median(head, median_filter_width) for head in scaled]
    return np.asarray(np.mean(medians, axis=0, dtype=np.float32))


def _median(values: Matrix, width: int) -> Matrix:
    """Return the medians of ``width`` neighbours in each row, mirrored at its ends."""
    half = width // 2
    if values.shape[1] <= half:
        return values
    padded = np.pad(values, [(0, 0), (half, half)], mode="reflect")
    neighbours = np.lib.stride_tricks.sliding_window_view(padded, width, axis=1)
    return np.asarray(np.partition(neighbours, half, axis=2)[..., half])


def warped(costs: Matrix) -> NDArray[np.int64]:
    """Return the first position of each token on the cheapest path, (S,) int64.

    costs: (S, N) float32, of each token at each position. The path leads from the first token and
    position to the last of both, by steps to the next token, the next position, or both. As in
    transformers, sums are float32, and the step is to the next position unless one of the others is
    cheaper than both alternatives. Cells with the same sum of token and position do not depend on
    each other: they are computed together.
    """
    num_tokens, num_positions = costs.shape
    tokens = np.arange(num_tokens)[:, None]
    by_sum = np.zeros((num_tokens + num_positions - 1, num_tokens), np.float32)
    by_sum[tokens + np.arange(num_positions), tokens] = costs
    steps = np.empty(by_sum.shape, np.int8)
    # Sums of the two diagonals before, by token + 1; a path may only start at the first token and
    # position.
    before_last, last = (np.full(num_tokens + 1, np.inf, np.float32) for _ in range(2))
    before_last[0] = 0.0
    for place, costs_here in enumerate(by_sum):
        first, stop = max(0, place - num_positions + 1), min(num_tokens, place + 1)
        both, token = before_last[first:stop], last[first:stop]
        position = last[first + 1 : stop + 1]
        is_both = (both < token) & (both < position)
        is_token = (token < both) & (token < position)
        steps[place, first:stop] = np.where(
            is_both, _DIAGONAL, np.where(is_token, _TOKEN, _POSITION)
        )
        sums = np.full(num_tokens + 1, np.inf, np.float32)
        best = np.where(is_both, both, np.where(is_token, token, position))
        sums[first + 1 : stop + 1] = costs_here[first:stop] + best
        before_last, last = last, sums
    return _first_positions(steps, num_positions)


def _first_positions(steps: NDArray[np.int8], num_positions: int) -> NDArray[np.int64]:
    """Walk back over the steps, by sum and token, from the last token and position."""
    num_tokens = steps.shape[1]
    found = np.zeros(num_tokens, np.int64)
    token, position = num_tokens - 1, num_positions - 1
    while token > 0:
        found[token] = position
        step = steps[token + position, token] if position else _TOKEN
        token -= step != _POSITION
        position -= step != _TOKEN
    return found  # the first token begins at the first position
