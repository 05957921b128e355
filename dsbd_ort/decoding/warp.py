"""Logits to warped token laws: temperature, then top-k, then top-p, renormalised per position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.errors import ModelError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TokenLaw:
    """The next-token law of one position.

    Attributes:
        tokens: (num_tokens,) int64. The tokens that may be drawn: top_k of them, or all.
        log_probs: (num_tokens,) float64. Warped; -inf where top-p has cut.
        raw_log_probs: (num_tokens,) float64. Unwarped, over the whole vocabulary.
    """

    tokens: NDArray[np.int64]
    log_probs: Floats
    raw_log_probs: Floats


@dataclass(frozen=True)
class Warp:
    """The warping of a request: ``top_k`` 0 and ``top_p`` 1 switch a stage off.

    With ``is_raw`` the laws' ``log_probs`` are the raw ones: top-k then only bounds how many
    tokens are looked at.
    """

    temperature: float
    top_k: int
    top_p: float
    is_raw: bool = False

    def laws(self, logits: NDArray[np.float32]) -> list[TokenLaw]:
        """Return the law of every row of (num_rows, vocab_size) logits.

        Raises:
            ModelError: a row without a finite largest logit (NaN, +inf, or all -inf).
        """
        if not len(logits):
            return []
        largest = logits.max(axis=1, keepdims=True)
        if not np.isfinite(largest).all():
            raise ModelError(
                "the model returned logits without a finite largest value (NaN or infinite); "
                "check the engine's precision and the export's parity report"
            )
        vocab_size = logits.shape[1]
        normalizer = np.exp(logits - largest).sum(axis=1, keepdims=True, dtype=np.float64)
        if 0 < self.top_k < vocab_size:
            tokens = np.argpartition(logits, vocab_size - self.top_k, axis=1)[:, -self.top_k :]
            logits = np.take_along_axis(logits, tokens, axis=1)
        else:
            tokens = np.broadcast_to(np.arange(vocab_size), logits.shape)
        centred = logits.astype(np.float64) - largest
        raw = centred - np.log(normalizer)
        log_probs = raw if self.is_raw else self._warped(centred)
        return [TokenLaw(*row) for row in zip(tokens, log_probs, raw, strict=True)]

    def _warped(self, centred: Floats) -> Floats:
        log_probs = _log_normalise(centred / self.temperature)
        if self.top_p < 1.0:
            log_probs = _log_normalise(_cut_top_p(log_probs, self.top_p))
        return log_probs


def _log_normalise(scores: Floats) -> Floats:
    """Return ``scores`` (num_rows, n), whose largest is finite, as log-probabilities by row."""
    scores = scores - scores.max(axis=1, keepdims=True)
    normalised: Floats = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return normalised


def _cut_top_p(log_probs: Floats, top_p: float) -> Floats:
    """Set all but the smallest set of most probable tokens that reaches ``top_p`` to -inf."""
    order = np.argsort(-log_probs, axis=1, kind="stable")
    probs = np.exp(np.take_along_axis(log_probs, order, axis=1))
    is_cut_sorted = np.cumsum(probs, axis=1) - probs >= top_p  # mass before this token
    is_cut_sorted[:, 0] = False
    is_cut = np.empty_like(is_cut_sorted)
    np.put_along_axis(is_cut, order, is_cut_sorted, axis=1)
    return np.where(is_cut, -np.inf, log_probs)
