"""From logits to distributions: temperature, top-k, top-p, renormalised per position."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.engine import EngineSpec
from dsbd_forward.logits import DenseLogits, GatheredLogits, Logits, TopLogits
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.distribution import (
    DenseDistributions,
    Floats,
    TokenDistributions,
    TopDistributions,
)
from dsbd_ort.decoding.engine_call import Role
from dsbd_ort.decoding.errors import ConfigError, ModelError


@dataclass(frozen=True)
class Warp:
    """The warping of a request: ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 and ``typical_p`` 1 are off.

    They come in this order, each with its renormalisation, as in transformers: the most probable
    tokens, the fewest that reach a mass (Holtzman et al. 2020), those of at least a share of the
    most probable one's, and the fewest nearest to the entropy that reach a mass (Meister et al.
    2023).

    With ``is_raw`` the ``log_probs`` are the raw ones: top-k then only bounds how many tokens are
    looked at.
    """

    temperature: float
    top_k: int
    top_p: float
    is_raw: bool = False
    min_p: float = 0.0
    typical_p: float = 1.0

    @classmethod
    def of(cls, config: DecodingConfig) -> Warp:
        """Return the warping of both models' logits that a request's rule requires."""
        if config.row.rule == "search":
            return cls(1.0, most_tokens_searched(config), 1.0, is_raw=True)
        return cls(
            config.temperature or 1.0,
            config.top_k,
            config.top_p,
            min_p=config.min_p,
            typical_p=config.typical_p,
        )

    def narrowed(self) -> Warp:
        """Return one for a search that looks at fewer tokens of a position and reads others later.

        All logits are there until the next forward: a search without a draft knows by then which
        of the others matter.
        """
        if not self.is_raw:
            return self
        return replace(self, top_k=min(self.top_k, _FIRST_TOKENS))

    @property
    def changes_nothing(self) -> bool:
        """Whether the warped distribution over the whole vocabulary is the raw one."""
        keeps_all = self.top_p == 1.0 and self.min_p == 0.0 and self.typical_p == 1.0
        return self.is_raw or (self.temperature == 1.0 and keeps_all)

    def distributions(self, logits: Logits) -> TokenDistributions:
        """Return the next-token distribution of every row of a forward's result.

        logits: see StepModel.forward; of ``TopLogits`` the first ``top_k`` of K >= top_k count.

        Raises:
            ModelError: a row without a finite largest logit or logsumexp (NaN, +inf, or all -inf).
        """
        if isinstance(logits, TopLogits):
            return self._from_top(logits.top_ids, logits.top_logits, logits.logsumexp)
        assert isinstance(logits, DenseLogits)
        values = logits.values
        if self.top_k:
            return self._top_distributions(*largest_logits(values, self.top_k))
        largest = _finite(values.max(axis=1)) if len(values) else values[:, 0]
        return DenseDistributions(values, largest, None if self.changes_nothing else self.warped)

    def _from_top(
        self,
        top_ids: NDArray[np.int64],
        top_logits: NDArray[np.float32],
        logsumexp: NDArray[np.float32],
    ) -> TopDistributions:
        top_k = min(self.top_k, top_ids.shape[1])
        entries = np.empty((3, len(top_ids), top_k))
        log_probs, raw = entries[0], entries[1]
        log_probs[:] = top_logits[:, :top_k]
        largest, normalizers = log_probs[:, :1].copy(), logsumexp.astype(np.float64)[:, None]
        _finite(largest + normalizers)  # both are, or the sum is not
        np.subtract(log_probs, normalizers, out=raw)
        entries[2].view(np.int64)[:] = top_ids[:, :top_k]
        log_probs -= largest
        _check_order(log_probs)
        if self.is_raw:
            log_probs[:] = raw
        else:
            log_probs[:] = self.warped(log_probs)
        return TopDistributions(entries)

    def _top_distributions(
        self, tokens: NDArray[np.int64], centred: Floats, log_normalizers: Floats
    ) -> TopDistributions:
        """Return distributions; tokens and centred: (num_rows, n), log_normalizers: (num_rows, 1).

        centred: logits less the row's largest. log_normalizers: the log of the sum of
        exponentials of such differences over the whole vocabulary.
        """
        raw = centred - log_normalizers
        return TopDistributions.of(tokens, raw if self.is_raw else self.warped(centred), raw)

    def warped(self, centred: Floats) -> Floats:
        """Return warped log-probabilities of logits, both (num_rows, n) float64."""
        log_probs = _log_normalise(
            centred if self.temperature == 1.0 else centred / self.temperature
        )
        if self.top_p < 1.0:
            log_probs = _log_normalise(_cut_top_p(log_probs, self.top_p))
        if self.min_p > 0.0:
            least = log_probs.max(axis=1, keepdims=True) + np.log(self.min_p)
            log_probs = _log_normalise(np.where(log_probs < least, -np.inf, log_probs))
        if self.typical_p < 1.0:
            log_probs = _log_normalise(_cut_typical(log_probs, self.typical_p))
        return log_probs


_FIRST_TOKENS = 128  # of a position that a search looks at before it knows the best
_BLOCK = 1 << 16  # logits looked at together: they and a copy fit the processor's cache


def largest_logits(
    logits: NDArray[np.float32], top_k: int
) -> tuple[NDArray[np.int64], Floats, NDArray[np.float64]]:
    """Return the most probable tokens of every row without a second (num_rows, vocab) array.

    Returns:
        tokens (num_rows, top_k) int64 by decreasing logit, ties by increasing id (the order of
        ONNX's TopK), their logits less the row's largest (num_rows, top_k), and the log of the
        row's sum of exponentials of such differences (num_rows, 1).
    """
    num_rows, vocab_size = logits.shape
    top_k = min(top_k, vocab_size)
    tokens = np.empty((num_rows, top_k), dtype=np.int64)
    sums = np.empty((num_rows, 1))
    size = max(1, _BLOCK // vocab_size)
    for first in range(0, num_rows, size):
        block = logits[first : first + size]
        largest = _finite(block.max(axis=1, keepdims=True))
        tokens[first : first + size] = largest_columns(block, top_k)
        sums[first : first + size, 0] = np.exp(block - largest).sum(axis=1, dtype=np.float64)
    rows = np.arange(num_rows)[:, None]
    chosen = logits[rows, tokens]
    order = (-chosen).argsort(axis=1, kind="stable")  # tokens are increasing: ties too
    centred = chosen[rows, order].astype(np.float64)
    centred -= centred[:, :1].copy()
    return tokens[rows, order], centred, np.log(sums)


def largest_columns(logits: NDArray[np.floating], top_k: int) -> NDArray[np.int64]:
    """Return the columns of the ``top_k`` largest entries of each row, increasing; ties by first.

    logits: (num_rows, n > top_k). Returns (num_rows, top_k) int64.
    """
    num_rows, num_columns = logits.shape
    last = num_columns - top_k
    bar = np.partition(logits, last, axis=1)[:, last, None]
    is_chosen = logits >= bar
    chosen = is_chosen.ravel().nonzero()[0]
    if len(chosen) > top_k * num_rows:  # some tie with the last
        is_above = logits > bar
        ties = is_chosen & ~is_above
        num_free = top_k - is_above.sum(axis=1, keepdims=True)
        is_chosen = is_above | (ties & (ties.cumsum(axis=1) <= num_free))
        chosen = is_chosen.ravel().nonzero()[0]
    columns: NDArray[np.int64] = chosen.reshape(num_rows, top_k)
    columns -= np.arange(0, logits.size, num_columns)[:, None]
    return columns


def _finite(largest: Any) -> Any:
    """Return the largest logits if they are finite."""
    if len(np.isfinite(largest).nonzero()[0]) < largest.size:
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


def num_searched(config: DecodingConfig) -> int:
    """Return how many candidates of a layer beam search takes, so that W of them go on."""
    return config.width * max(2, 1 + len(config.eos_ids))


def most_tokens_searched(config: DecodingConfig) -> int:
    """Return a bound of the candidates that beam search or its draft takes from one beam."""
    return max(num_searched(config), config.most_draft_beams + len(config.eos_ids))


def _cut_typical(log_probs: Floats, mass: float) -> Floats:
    """Set all but the fewest tokens nearest to the entropy that reach ``mass`` to -inf.

    Tokens as near as the last of them stay too.
    """
    finite = np.where(np.isfinite(log_probs), log_probs, 0.0)
    entropy = -(finite * np.exp(log_probs)).sum(axis=1, keepdims=True)
    distances = np.abs(-log_probs - entropy)
    order = np.argsort(distances, axis=1, kind="stable")
    reached = np.cumsum(np.exp(np.take_along_axis(log_probs, order, axis=1)), axis=1)
    last = np.minimum((reached < mass).sum(axis=1, keepdims=True), log_probs.shape[1] - 1)
    farthest = np.take_along_axis(distances, np.take_along_axis(order, last, axis=1), axis=1)
    return np.where(distances > farthest, -np.inf, log_probs)


def log_normalizers_of(logits: NDArray[np.float32]) -> Floats:
    """Return the log of the sum of exponentials of every row, (num_rows, 1) float64."""
    normalizers = np.empty((len(logits), 1))
    size = max(1, _BLOCK // logits.shape[1])
    for first in range(0, len(logits), size):
        block = logits[first : first + size]
        largest = _finite(block.max(axis=1, keepdims=True))
        sums = np.exp(block - largest).sum(axis=1, dtype=np.float64, keepdims=True)
        normalizers[first : first + size] = np.log(sums) + largest
    return normalizers


def checked_top(logits: TopLogits) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Return ids and logits of a top-k head, (num_rows, K), and log-normalizers (num_rows, 1).

    Raises:
        ModelError: see ``Warp.distributions``.
    """
    top_ids, top_logits, logsumexp = logits.top_ids, logits.top_logits, logits.logsumexp
    scores = top_logits.astype(np.float64)
    _check_order(scores - _finite(scores[:, :1]))
    return top_ids.astype(np.int64), scores, _finite(logsumexp)[:, None]


def checked_normalizers(gathered: GatheredLogits) -> Floats:
    """Return the log-normalizers of a gather head, (num_rows, 1) float64.

    Raises:
        ModelError: see ``Warp.distributions``.
    """
    if len(gathered.values) and not gathered.values.max() < np.inf:  # also when it is NaN
        raise ModelError(
            "the model returned gathered_logits with NaN or infinity; check the engine's precision "
            "and the export's parity report"
        )
    normalizers: Floats = _finite(gathered.logsumexp.astype(np.float64))[:, None]
    return normalizers


def _check_order(centred: Floats) -> None:
    """Raise for a logit less the first of its row, (num_rows, n), that is NaN or positive."""
    if centred.size and not centred.item(centred.argmax()) <= 0.0:  # the first NaN, if any
        raise ModelError(
            "the model returned top_logits with NaN or a larger one behind the first; check "
            "the engine's precision and the export's parity report"
        )


def check_top_k(role: Role, spec: EngineSpec, config: DecodingConfig) -> None:
    """Refuse a request that looks at more tokens of a position than the model returns.

    Args:
        role: for the message.
        spec: of the engine; one that returns all logits takes every request.
        config: the request.

    Raises:
        ConfigError: naming what to change.
    """
    most, top_k = spec.head.num_top_logits, Warp.of(config).top_k
    keeps_full_logits = spec.head.keeps_full_logits
    if most and config.has_controls and role == "target" and not keeps_full_logits:
        raise ConfigError(
            f"{', '.join(config.controls)} may raise tokens that are not among the {most} logits "
            "which the target's engine returns of a position, and it keeps no others; leave it "
            "out, or export again, where --logits topk keeps them all (or with --logits full)"
        )
    if not most or 1 <= top_k <= most:
        return
    if config.row.rule == "search" and (role == "draft" or keeps_full_logits):
        return  # a draft may look at fewer; the target's other logits are read where they matter
    returns = f"but the {role}'s engine returns the {most} largest logits of a position"
    if config.row.rule == "search":
        raise ConfigError(
            f"num_beams is {config.width}, for which strategy {config.strategy} looks at the "
            f"{top_k} best tokens of a position (top_k {top_k}), {returns} and keeps no others; "
            f"lower num_beams, or export again, where --logits topk keeps them all (or with "
            f"--logits full or --logits topk:{top_k})"
        )
    of_all = "" if top_k else " (all tokens)"
    larger = f" or --logits topk:{top_k}" if most < top_k <= spec.vocab_size else ""
    raise ConfigError(
        f"top_k is {top_k}{of_all}, {returns}; use top_k 1 to {most}, or export with --logits "
        f"full{larger}"
    )


def check_logits(
    logits: Logits, spec: EngineSpec, num_rows: int, num_pairs: int | None = None
) -> None:
    """Raise ModelError unless a model returned logits of ``num_rows`` rows and known tokens.

    num_pairs: of the gather that it was given, None without one.
    """
    if isinstance(logits, GatheredLogits):
        _check_shape("gathered_logits", logits.values, (num_pairs,), "pair of the gather")
        _check_shape("logsumexp", logits.logsumexp, (num_rows,))
    elif isinstance(logits, TopLogits):
        _check_top(logits, spec.vocab_size, (num_rows, spec.head.num_top_logits))
    else:
        assert isinstance(logits, DenseLogits)
        _check_shape("logits", logits.values, (num_rows, spec.vocab_size))


def _check_top(logits: TopLogits, vocab_size: int, expected: tuple[int, int]) -> None:
    top_ids, top_logits, logsumexp = logits.top_ids, logits.top_logits, logits.logsumexp
    if (top_ids.shape, top_logits.shape, logsumexp.shape) != (expected, expected, expected[:1]):
        _check_shape("top_ids", top_ids, expected)
        _check_shape("top_logits", top_logits, expected)
        _check_shape("logsumexp", logsumexp, expected[:1])
    ids = top_ids.view(np.uint64)  # negative ids are large
    if ids.size and ids.item(ids.argmax()) >= vocab_size:
        raise ModelError(
            f"the model returned top_ids from {top_ids.min()} to {top_ids.max()}, expected 0 to "
            f"{vocab_size - 1}; export the engine again"
        )


def _check_shape(
    name: str,
    found: NDArray[Any],
    expected: tuple[int | None, ...],
    per: str = "entry of logit_rows",
) -> None:
    if found.shape != expected:
        raise ModelError(
            f"the model returned {name} of shape {found.shape}, expected {expected}: one row per "
            f"{per}"
        )
