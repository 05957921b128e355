"""Logits to warped token laws: temperature, then top-k, then top-p, renormalised per position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.errors import ModelError

Floats = NDArray[np.float64]


class TokenLaw(NamedTuple):
    """The next-token law of one position.

    Attributes:
        tokens: (num_tokens,) int64. The tokens that may be drawn: top_k of them by decreasing
            logit, ties by increasing id, or all by id.
        log_probs: (num_tokens,) float64. Warped; -inf where top-p has cut.
        raw_log_probs: (num_tokens,) float64. Unwarped, over the whole vocabulary.
    """

    tokens: NDArray[np.int64]
    log_probs: Floats
    raw_log_probs: Floats

    def raw_log_prob(self, index: int) -> float:
        """Return the entry ``index`` of ``raw_log_probs``."""
        return float(self.raw_log_probs[index])


class WholeLaw:
    """A TokenLaw over the whole vocabulary that is computed when it is read.

    It holds the float32 logits, half of one array of a TokenLaw: of the nodes whose laws a request
    keeps most are never read.
    """

    __slots__ = ("_largest", "_log_normalizer", "_logits", "_warp")

    def __init__(self, warp: Warp, logits: NDArray[np.float32], largest: np.float32) -> None:
        """Take a copy of (vocab_size,) logits and the largest of them."""
        self._warp = warp
        self._logits = logits.copy()
        self._largest = largest
        self._log_normalizer: float | None = None

    @property
    def tokens(self) -> NDArray[np.int64]:
        """See TokenLaw."""
        return _all_tokens(len(self._logits))

    @property
    def log_probs(self) -> Floats:
        """See TokenLaw."""
        if self._warp.changes_nothing:
            return self.raw_log_probs
        log_probs: Floats = self._warp.warped(self._centred()[None])[0]
        return log_probs

    @property
    def raw_log_probs(self) -> Floats:
        """See TokenLaw."""
        centred = self._centred()
        centred -= self._normalizer()
        return centred

    def raw_log_prob(self, index: int) -> float:
        """Return the entry ``index`` of ``raw_log_probs``."""
        return float(self._logits[index]) - float(self._largest) - self._normalizer()

    def _normalizer(self) -> float:
        if self._log_normalizer is None:
            self._log_normalizer = float(np.log(np.exp(self._centred()).sum()))
        return self._log_normalizer

    def _centred(self) -> Floats:
        centred: Floats = self._logits.astype(np.float64) - self._largest
        return centred


AnyLaw = TokenLaw | WholeLaw
"""The next-token law of one position."""


@lru_cache(maxsize=8)  # two models of one vocabulary, as a rule
def _all_tokens(vocab_size: int) -> NDArray[np.int64]:
    tokens = np.arange(vocab_size)
    tokens.flags.writeable = False
    return tokens


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

    @property
    def changes_nothing(self) -> bool:
        """Whether the warped law of the whole vocabulary is the raw one."""
        return self.is_raw or (self.temperature == 1.0 and self.top_p == 1.0)

    def laws(self, logits: NDArray[np.float32]) -> Sequence[AnyLaw]:
        """Return the law of every row of (num_rows, vocab_size) logits.

        Raises:
            ModelError: a row without a finite largest logit (NaN, +inf, or all -inf).
        """
        if not len(logits):
            return []
        if not self.top_k:
            largest = _finite(logits.max(axis=1))
            return [WholeLaw(self, *row) for row in zip(logits, largest, strict=True)]
        tokens, centred, log_normalizers = _top(logits, min(self.top_k, logits.shape[1]))
        return self._laws(tokens, centred, log_normalizers)

    def laws_of_candidates(
        self,
        top_ids: NDArray[np.int64],
        top_logits: NDArray[np.float32],
        logsumexp: NDArray[np.float32],
    ) -> list[TokenLaw]:
        """Return the laws that ``laws`` returns, from the K largest logits of every row.

        Args:
            top_ids: (num_rows, K) int64, see step_model.TopLogits; 1 <= top_k <= K.
            top_logits: (num_rows, K) float32.
            logsumexp: (num_rows,) float32.

        Raises:
            ModelError: a row without a finite largest logit or logsumexp, or with NaN.
        """
        if not len(top_ids):
            return []
        top = top_logits[:, : self.top_k].astype(np.float64)
        largest = _finite(top[:, :1]).copy()
        if not (top <= largest).all():
            raise ModelError(
                "the model returned top_logits with NaN or a larger one behind the first; check "
                "the engine's precision and the export's parity report"
            )
        log_normalizers = _finite(logsumexp[:, None]) - largest
        top -= largest
        return self._laws(top_ids[:, : self.top_k], top, log_normalizers)

    def _laws(
        self, tokens: NDArray[np.int64], centred: Floats, log_normalizers: Floats
    ) -> list[TokenLaw]:
        """Return the laws by row: tokens and centred (num_rows, n), log_normalizers (num_rows, 1).

        centred: logits less the row's largest. log_normalizers: the log of the sum of
        exponentials of such differences over the whole vocabulary.
        """
        raw = centred - log_normalizers
        log_probs = raw if self.is_raw else self.warped(centred)
        return list(map(TokenLaw, tokens, log_probs, raw))

    def warped(self, centred: Floats) -> Floats:
        """Return warped log-probabilities of logits, both (num_rows, n) float64."""
        log_probs = _log_normalise(
            centred if self.temperature == 1.0 else centred / self.temperature
        )
        if self.top_p < 1.0:
            log_probs = _log_normalise(_cut_top_p(log_probs, self.top_p))
        return log_probs


def _top(
    logits: NDArray[np.float32], top_k: int
) -> tuple[NDArray[np.int64], Floats, NDArray[np.float64]]:
    """Return the most probable tokens of every row without a second (num_rows, vocab) array.

    Returns:
        tokens (num_rows, top_k) int64 by decreasing logit, ties by increasing id (the order of
        ONNX's TopK), their logits less the row's largest (num_rows, top_k), and the log of the
        row's sum of exponentials of such differences (num_rows, 1).
    """
    num_rows, vocab_size = logits.shape
    tokens = np.empty((num_rows, top_k), dtype=np.int64)
    sums = np.empty((num_rows, 1))
    scratch = np.empty(vocab_size, dtype=np.float32)
    for i, row in enumerate(logits):  # row by row: a row fits the processor's cache, all do not
        largest = _finite(row.max())
        scratch[:] = row
        scratch.partition(vocab_size - top_k)
        chosen = np.flatnonzero(row >= scratch[vocab_size - top_k])
        tokens[i] = chosen if len(chosen) == top_k else _lowest_of_ties(row, chosen, top_k)
        np.exp(np.subtract(row, largest, out=scratch), out=scratch)
        sums[i] = scratch.sum(dtype=np.float64)
    chosen_logits = np.take_along_axis(logits, tokens, axis=1)
    order = np.argsort(-chosen_logits, axis=1, kind="stable")  # tokens are increasing: ties too
    centred = np.take_along_axis(chosen_logits, order, axis=1).astype(np.float64)
    centred -= centred[:, :1].copy()
    return np.take_along_axis(tokens, order, axis=1), centred, np.log(sums)


def _lowest_of_ties(
    row: NDArray[np.float32], chosen: NDArray[np.int64], top_k: int
) -> NDArray[np.int64]:
    """Return the ``top_k`` best of ``chosen`` (increasing ids), increasing; ties by lowest id."""
    best = np.argsort(-row[chosen], kind="stable")[:top_k]
    return np.sort(chosen[best])


def _finite(largest: Any) -> Any:
    """Return the largest logits if they are finite."""
    if not np.isfinite(largest).all():
        raise ModelError(
            "the model returned logits without a finite largest value (NaN or infinite); "
            "check the engine's precision and the export's parity report"
        )
    return largest


def _log_normalise(scores: Floats) -> Floats:
    """Return ``scores`` (num_rows, n) as log-probabilities by row.

    The largest of a row is 0, or the log of what was the largest probability: no exp can overflow,
    nor all of a row underflow.
    """
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
