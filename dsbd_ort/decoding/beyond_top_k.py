"""Distributions over more tokens than a top-k head returns, from its K logits if these suffice.

With top-p or min-p few tokens may be drawn, usually all among the K largest: with the row's
log-normalizer they bound the mass of the others, and so where the cut lies. A row that they do not
settle is read whole, as every row is without such a cut; then more of its largest logits usually
settle it.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.logits import Logits
from dsbd_forward.rows import largest_logits
from dsbd_ort.decoding.distribution import DenseDistributions, Floats, ListedDistributions
from dsbd_ort.decoding.warp import Warp

_PRECISION = 1e-5  # of a head's log-normalizer, times the largest logit, as the export demands
_NUMBERS = 256, 4096  # of largest logits, of a row that is read whole
_NEAR = 1e-9  # a cut this near to a token's mass, relatively, is settled by the whole row


def distributions_beyond_top_k(
    warp: Warp, logits: Logits, vocab_size: int
) -> ListedDistributions | DenseDistributions:
    """Return the distributions after nodes; raises as ``Warp.distributions``.

    warp: of a sampling request, whose top_k is 0 or more than K. logits: of an engine with a top-k
    head that keeps all logits.
    """
    tokens, scores = logits.most_probable(0)
    normalizers = logits.log_normalizers
    log_probs, is_settled = settled(warp, scores, normalizers, vocab_size)
    unsettled = np.logical_not(is_settled).nonzero()[0]
    rows = logits.read(unsettled)[0] if len(unsettled) else np.empty((0, vocab_size), np.float32)
    if not (warp.top_k or _cuts(warp)):
        largest = scores[:, 0].astype(np.float32)
        return DenseDistributions(rows, largest, warp.warped, normalizers)
    log_probs[unsettled] = -np.inf
    distributions = _listed(warp, tokens, log_probs, scores - normalizers)
    if len(unsettled):
        read = _of_whole_rows(warp, rows, normalizers[unsettled], _NUMBERS)
        distributions = distributions.replaced(unsettled, read)
    return distributions


def _of_whole_rows(
    warp: Warp, rows: NDArray[np.float32], normalizers: Floats, numbers: Sequence[int]
) -> ListedDistributions:
    """Return the distributions of rows, (n, V), whose log-normalizers are (n, 1).

    numbers: of largest logits, tried one after the other before a row is sorted whole.
    """
    vocab_size = rows.shape[1]
    if warp.top_k:
        tokens, scores = largest_logits(rows, warp.top_k)
        return _listed(warp, tokens, warp.warped(scores - scores[:, :1]), scores - normalizers)
    if not numbers or numbers[0] >= vocab_size:
        scores = rows.astype(np.float64)
        tokens = np.broadcast_to(np.arange(vocab_size), scores.shape)
        log_probs = warp.warped(scores - scores.max(axis=1, keepdims=True))
        return ListedDistributions.of(tokens, log_probs, scores - normalizers)
    tokens, scores = largest_logits(rows, numbers[0])
    log_probs, is_settled = settled(warp, scores, normalizers, vocab_size)
    unsettled = np.logical_not(is_settled).nonzero()[0]
    log_probs[unsettled] = -np.inf
    distributions = _listed(warp, tokens, log_probs, scores - normalizers)
    if not len(unsettled):
        return distributions
    others = _of_whole_rows(warp, rows[unsettled], normalizers[unsettled], numbers[1:])
    return distributions.replaced(unsettled, others)


def _listed(
    warp: Warp, tokens: NDArray[np.int64], log_probs: Floats, raw: Floats
) -> ListedDistributions:
    """Return distributions of the tokens of largest logits, (n, K), in the order of whole rows."""
    if not warp.top_k:  # which is that of the ids
        by_id = tokens.argsort(axis=1)
        tokens = np.take_along_axis(tokens, by_id, axis=1)
        log_probs, raw = (np.take_along_axis(each, by_id, axis=1) for each in (log_probs, raw))
    return ListedDistributions.of(tokens, log_probs, raw)


def settled(
    warp: Warp, scores: Floats, normalizers: Floats, vocab_size: int
) -> tuple[Floats, NDArray[np.bool_]]:
    """Return warped log-probabilities of the K largest logits, and of which rows they are right.

    scores: (num_rows, K) float64, by decreasing logit. normalizers: (num_rows, 1) float64, at
    temperature 1, of all V logits. Returns (num_rows, K) float64, -inf if a token is cut;
    (num_rows,) bool.
    """
    if not _cuts(warp):
        return np.full_like(scores, -np.inf), np.zeros(len(scores), dtype=np.bool_)
    centred = scores - scores[:, :1]
    scaled = centred / warp.temperature
    if warp.top_p < 1.0:
        masses = np.exp(scaled)
        sums = masses.cumsum(axis=1)
        before = sums - masses
        fewest, most = mass_of_others(warp.temperature, scores, normalizers, vocab_size)
        if warp.top_k:  # of which but a few count
            fewest = np.zeros_like(fewest)
        least = warp.top_p * (sums[:, -1:] + fewest) * (1.0 - _NEAR)
        most = warp.top_p * (sums[:, -1:] + most) * (1.0 + _NEAR)
        is_kept = before < least
        is_kept[:, 0] = True
        is_sure = is_kept == (before < most)
        is_sure[:, 0] = True
        is_settled = is_sure.all(axis=1) & (sums[:, -1] >= most[:, 0])
        scaled = np.where(is_kept, scaled, -np.inf)
    else:
        is_settled = scaled[:, -1] < np.log(warp.min_p) - _NEAR
    return replace(warp, temperature=1.0, top_p=1.0).warped(scaled), is_settled


def mass_of_others(
    temperature: float, scores: Floats, normalizers: Floats, vocab_size: int
) -> tuple[Floats, Floats]:
    """Return bounds of the mass of all tokens except the K, if the most probable one weighs 1.

    At temperature 1 their mass M is what the log-normalizer leaves, and none of them weighs more
    than w, the last of the K. With weights to the power 1 / T their mass is M * w ** (1 / T - 1) if
    as few as can be have all of M, and n ** (1 - 1 / T) * M ** (1 / T) if all n have as much: in a
    colder distribution the upper and the lower bound, in a hotter one the other way round.

    Returns (num_rows, 1) float64 each.
    """
    centred = scores - scores[:, :1]
    whole = np.exp(normalizers - scores[:, :1])
    listed_mass = np.exp(centred).sum(axis=1, keepdims=True)
    error = whole * _PRECISION * (1.0 + np.abs(scores[:, :1]))
    least, most = (np.maximum(whole - listed_mass + sign * error, 0.0) for sign in (-1.0, 1.0))
    power, last = 1.0 / temperature, centred[:, -1:]
    if np.isneginf(last).any():  # the others are impossible too
        is_empty = np.isneginf(last)
        least, most, last = (np.where(is_empty, 0.0, each) for each in (least, most, last))
    num_others = max(vocab_size - scores.shape[1], 1)
    of_few, of_all = np.exp(last * (power - 1.0)), num_others ** (1.0 - power)
    if power >= 1.0:
        return of_all * least**power, of_few * most
    return of_few * least, np.minimum(num_others * np.exp(last * power), of_all * most**power)


def _cuts(warp: Warp) -> bool:
    return warp.top_p < 1.0 or warp.min_p > 0.0
