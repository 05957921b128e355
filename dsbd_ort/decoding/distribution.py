"""Next-token distributions from logits: temperature, top-k, top-p, renormalised per position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.errors import ConfigError, ModelError
from dsbd_ort.decoding.step_model import Logits, Role, RowCache, TopLogits, num_top_logits

Floats = NDArray[np.float64]


class TopDistribution(NamedTuple):
    """The next-token distribution of one position, as arrays.

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


class DenseDistribution:
    """A distribution over the whole vocabulary, with the same members, computed when it is read.

    It holds the float32 logits, half of one float64 array: most nodes of a forest are never
    selected, and their distributions never read.
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
        """See TopDistribution."""
        return _all_tokens(len(self._logits))

    @property
    def log_probs(self) -> Floats:
        """See TopDistribution."""
        if self._warp.changes_nothing:
            return self.raw_log_probs
        log_probs: Floats = self._warp.warped(self._centred()[None])[0]
        return log_probs

    @property
    def raw_log_probs(self) -> Floats:
        """See TopDistribution."""
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


TokenDistribution = TopDistribution | DenseDistribution
"""The next-token distribution of one position."""


@lru_cache(maxsize=8)  # two models of one vocabulary, as a rule
def _all_tokens(vocab_size: int) -> NDArray[np.int64]:
    tokens = np.arange(vocab_size)
    tokens.flags.writeable = False
    return tokens


@dataclass(frozen=True)
class Warp:
    """The warping of a request: ``top_k`` 0 and ``top_p`` 1 switch a stage off.

    With ``is_raw`` the ``log_probs`` are the raw ones: top-k then only bounds how many tokens are
    looked at.
    """

    temperature: float
    top_k: int
    top_p: float
    is_raw: bool = False

    @property
    def changes_nothing(self) -> bool:
        """Whether the warped distribution over the whole vocabulary is the raw one."""
        return self.is_raw or (self.temperature == 1.0 and self.top_p == 1.0)

    def distributions(self, logits: Logits) -> Sequence[TokenDistribution]:
        """Return the next-token distribution of every row of a forward's result.

        logits: see StepModel.forward; of ``TopLogits`` the first ``top_k`` of K >= top_k count.

        Raises:
            ModelError: a row without a finite largest logit or logsumexp (NaN, +inf, or all -inf).
        """
        if isinstance(logits, tuple):
            return self._from_top(*logits[:3]) if len(logits[0]) else []
        return self._from_all(logits) if len(logits) else []

    def _from_all(self, logits: NDArray[np.float32]) -> Sequence[TokenDistribution]:
        if not self.top_k:
            largest = _finite(logits.max(axis=1))
            return [DenseDistribution(self, *row) for row in zip(logits, largest, strict=True)]
        return self._by_row(*_top(logits, min(self.top_k, logits.shape[1])))

    def _from_top(
        self,
        top_ids: NDArray[np.int64],
        top_logits: NDArray[np.float32],
        logsumexp: NDArray[np.float32],
    ) -> list[TopDistribution]:
        top = top_logits[:, : self.top_k].astype(np.float64)
        largest = _finite(top[:, :1]).copy()
        if not (top <= largest).all():
            raise ModelError(
                "the model returned top_logits with NaN or a larger one behind the first; check "
                "the engine's precision and the export's parity report"
            )
        log_normalizers = _finite(logsumexp[:, None]) - largest
        top -= largest
        return self._by_row(top_ids[:, : self.top_k], top, log_normalizers)

    def _by_row(
        self, tokens: NDArray[np.int64], centred: Floats, log_normalizers: Floats
    ) -> list[TopDistribution]:
        """Return distributions; tokens and centred: (num_rows, n), log_normalizers: (num_rows, 1).

        centred: logits less the row's largest. log_normalizers: the log of the sum of
        exponentials of such differences over the whole vocabulary.
        """
        raw = centred - log_normalizers
        log_probs = raw if self.is_raw else self.warped(centred)
        return list(map(TopDistribution, tokens, log_probs, raw))

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


def check_top_k(role: Role, model: RowCache, config: DecodingConfig, top_k: int) -> None:
    """Refuse a request that looks at more tokens of a position than the model returns.

    Args:
        role: for the message.
        model: one that returns all logits takes every request.
        config: the request.
        top_k: most tokens of a position that its rule looks at (``Warp.top_k``), 0 for all.

    Raises:
        ConfigError: naming what to change.
    """
    most = num_top_logits(model)
    if not most or 1 <= top_k <= most:
        return
    returns = f"but the {role}'s engine returns the {most} largest logits of a position"
    if config.row.rule == "search":
        raise ConfigError(
            f"num_beams is {config.width}, for which strategy {config.strategy} looks at the "
            f"{top_k} best tokens of a position (top_k {top_k}), {returns}; lower num_beams, or "
            f"export with --logits full or --logits topk:{top_k}"
        )
    of_all = "" if top_k else " (all tokens)"
    larger = f" or --logits topk:{top_k}" if most < top_k <= model.vocab_size else ""
    raise ConfigError(
        f"top_k is {top_k}{of_all}, {returns}; use top_k 1 to {most}, or export with --logits "
        f"full{larger}"
    )


def check_logits(logits: Logits, model: RowCache, num_rows: int) -> None:
    """Raise ModelError unless a model returned logits of ``num_rows`` rows and known tokens."""
    if isinstance(logits, tuple):
        _check_top(logits, model.vocab_size, (num_rows, num_top_logits(model)))
    else:
        _check_shape("logits", logits, (num_rows, model.vocab_size))


def _check_top(logits: TopLogits, vocab_size: int, expected: tuple[int, int]) -> None:
    top_ids, top_logits, logsumexp, _ = logits
    _check_shape("top_ids", top_ids, expected)
    _check_shape("top_logits", top_logits, expected)
    _check_shape("logsumexp", logsumexp, expected[:1])
    if top_ids.size and not (0 <= top_ids.min() and top_ids.max() < vocab_size):
        raise ModelError(
            f"the model returned top_ids from {top_ids.min()} to {top_ids.max()}, expected 0 to "
            f"{vocab_size - 1}; export the engine again"
        )


def _check_shape(name: str, found: NDArray[np.generic], expected: tuple[int, ...]) -> None:
    if found.shape != expected:
        raise ModelError(
            f"the model returned {name} of shape {found.shape}, expected {expected}: one row per "
            "entry of logit_rows"
        )
