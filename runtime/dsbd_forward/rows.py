"""Rows of numbers: the largest of each row, and the log of its sum of exponentials."""

import math

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.errors import ModelError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NO_INTS: Ints = np.arange(0)
"""An empty array, shared by all uses."""

_BLOCK = 1 << 16  # logits processed together: they and a copy fit the processor's cache
_SUMMED_TOGETHER = 128  # columns
_NUM_PARTS = 512  # parts of a row; a multiple of the elements that one instruction compares


def added_up(logits: NDArray[np.float32]) -> Floats:
    """Return the log-normalizers, (R, 1), of rows (R, vocab); each depends only on its row."""
    normalizers = np.empty((len(logits), 1))
    size = max(1, _BLOCK // logits.shape[1])
    for first in range(0, len(logits), size):
        block = logits[first : first + size]
        largest = finite(np.maximum.reduce(block, axis=1, keepdims=True))
        terms = np.exp(block - largest)
        sums = np.add.reduce(terms, axis=1, dtype=np.float64, keepdims=True)
        normalizers[first : first + size] = np.log(sums) + largest
    return normalizers


def largest_logits(logits: NDArray[np.float32], number: int) -> tuple[Ints, Floats]:
    """Return the most probable tokens of whole rows without a second (R, vocab) array.

    Tokens (R, number) int64 by decreasing logit, ties by increasing id (the order of ONNX's TopK),
    and their logits, (R, number) float64.
    """
    num_rows, vocab_size = logits.shape
    number = min(number, vocab_size)
    tokens = np.empty((num_rows, number), dtype=np.int64)
    size = max(1, _BLOCK // vocab_size)
    for first in range(0, num_rows, size):
        tokens[first : first + size] = largest_columns(logits[first : first + size], number)
    rows = np.arange(num_rows)[:, None]
    chosen = logits[rows, tokens]
    order = (-chosen).argsort(axis=1, kind="stable")  # tokens are increasing: ties too
    return tokens[rows, order], chosen[rows, order].astype(np.float64)


def largest_columns(scores: NDArray[np.floating], number: int) -> Ints:
    """Return the columns of the ``number`` largest entries of each row, increasing.

    Of equal entries the first are chosen.

    scores: (num_rows, n > number). Returns (num_rows, number) int64.
    """
    num_rows, num_columns = scores.shape
    threshold = _least_of_largest(scores, number)
    is_chosen = scores >= threshold
    chosen = is_chosen.ravel().nonzero()[0]
    if len(chosen) > number * num_rows:  # some entries equal the threshold
        is_above = scores > threshold
        ties = is_chosen & ~is_above
        num_free = number - is_above.sum(axis=1, keepdims=True)
        is_chosen = is_above | (ties & (ties.cumsum(axis=1) <= num_free))
        chosen = is_chosen.ravel().nonzero()[0]
    columns: Ints = chosen.reshape(num_rows, number)
    columns -= np.arange(0, scores.size, num_columns)[:, None]
    return columns


def _least_of_largest(scores: NDArray[np.floating], number: int) -> NDArray[np.floating]:
    """Return the ``number``-th largest entry of each row, (num_rows, 1).

    In wide rows only entries that are not below the ``number``-th maximum of interleaved parts are
    searched. Partitioning a whole row takes several times as long, most of all if many entries are
    equal, such as those of forbidden tokens.
    """
    num_columns = scores.shape[1]
    if number > _NUM_PARTS // 2 or num_columns < 4 * _NUM_PARTS:
        last = num_columns - number
        return np.partition(scores, last, axis=1)[:, last, None]
    whole = num_columns // _NUM_PARTS * _NUM_PARTS
    parts = scores[:, :whole].reshape(len(scores), -1, _NUM_PARTS)
    maxima = np.maximum.reduce(parts, axis=1)
    maxima.partition(_NUM_PARTS - number, axis=1)
    bounds = maxima[:, _NUM_PARTS - number]
    entries = np.empty((len(scores), 1), scores.dtype)
    for index, (row, bound) in enumerate(zip(scores, bounds, strict=True)):
        kept = row[row > bound] if bound == -np.inf else row[row >= bound]
        if (last := len(kept) - number) >= 0:
            kept.partition(last)
            entries[index] = kept[last]
        elif bound == -np.inf:  # fewer than ``number`` entries are above it
            entries[index] = bound
        else:  # the bound is NaN, and no entry compares as above it
            entries[index] = np.partition(row, num_columns - number)[num_columns - number]
    return entries


def finite(largest: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the largest logits; raise ModelError unless they are finite."""
    if not math.isfinite(sum(largest.ravel().tolist())):  # sums of float32 fit a float64
        raise ModelError(
            "the model returned logits without a finite largest value (NaN or infinite); "
            "check the engine's precision and the export's parity report"
        )
    return largest


def log_normalised(scores: Floats) -> Floats:
    """Return ``scores`` (num_rows, n) as log-probabilities by row.

    The largest score of a row must be 0, or the log of the row's former largest probability. Then
    no exp overflows, and not all exps of a row underflow.
    """
    num_rows, num_columns = scores.shape
    terms = np.zeros((num_rows, -(-num_columns // _SUMMED_TOGETHER) * _SUMMED_TOGETHER))
    np.exp(scores, out=terms[:, :num_columns])
    normalised: Floats = scores - np.log(_block_sums(terms))
    return normalised


def row_sums(terms: Floats) -> Floats:
    """Return the sum of every row, (num_rows, n), as (num_rows, 1).

    Zeros after the terms of a row must not change any bit of its sum, because a table is as wide as
    the longest row of the call. So columns are summed in blocks, one after the other; the last
    block is filled up with zeros.
    """
    num_rows, num_columns = terms.shape
    blocks = np.zeros((num_rows, -(-num_columns // _SUMMED_TOGETHER) * _SUMMED_TOGETHER))
    blocks[:, :num_columns] = terms
    return _block_sums(blocks)


def _block_sums(terms: Floats) -> Floats:
    """Return the sums of rows that consist of whole blocks, (num_rows, 1); see ``row_sums``."""
    num_rows, num_columns = terms.shape
    if num_columns <= _SUMMED_TOGETHER:  # usually
        sums: Floats = np.add.reduce(terms, axis=1, keepdims=True)
    else:
        blocks = terms.reshape(num_rows, num_columns // _SUMMED_TOGETHER, _SUMMED_TOGETHER).sum(
            axis=2
        )
        sums = blocks.cumsum(axis=1)[:, -1:]
    return sums
