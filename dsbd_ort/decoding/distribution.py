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
from dsbd_ort.decoding.step_model import (
    Head,
    Logits,
    Role,
    TopLogits,
    keeps_full_logits,
    num_top_logits,
)

Floats = NDArray[np.float64]


class TokenDistribution(NamedTuple):
    """The next-token distribution of one position.

    Attributes:
        tokens: (num_tokens,) int64. The tokens that may be drawn: top_k of them by decreasing
            logit, ties by increasing id, or all by id.
        log_probs: (num_tokens,) float64. Warped; -inf where top-p has cut.
        raw_log_probs: (num_tokens,) float64. Unwarped, over the whole vocabulary.
    """

    tokens: NDArray[np.int64]
    log_probs: Floats
    raw_log_probs: Floats


class TopDistributions(Sequence[TokenDistribution]):
    """Next-token distributions over K tokens each, in one array with room for more.

    The array is (3, room, K) float64: log-probabilities, raw ones, and token ids, whose int64 bits
    are kept as they are.
    """

    def __init__(self, entries: Floats) -> None:
        """Take (3, num_rows, K) entries."""
        self._entries = entries
        self._size = int(entries.shape[1])
        self._num_narrow = int(entries.shape[2])  # tokens of rows that were not completed

    @classmethod
    def of(
        cls, tokens: NDArray[np.int64], log_probs: Floats, raw_log_probs: Floats
    ) -> TopDistributions:
        """Return distributions, (num_rows, K) each; see TokenDistribution."""
        entries = np.empty((3, *tokens.shape))
        entries[0], entries[1], entries[2].view(np.int64)[:] = log_probs, raw_log_probs, tokens
        return cls(entries)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, row: int) -> TokenDistribution:  # type: ignore[override]  # no slices
        if row >= self._size:
            raise IndexError(row)
        return TokenDistribution(*self.candidates(np.array([row])))

    def behind_unused_row(self) -> TopDistributions:
        """Return a copy whose row 0 is no distribution."""
        return TopDistributions(np.concatenate([self._entries[:, :1], self._entries], axis=1))

    def append(self, more: TopDistributions) -> None:
        """Add rows."""
        size = self._size + more._size
        if size > self._entries.shape[1]:
            entries = np.empty((3, 2 * size, self._entries.shape[2]))
            entries[:, : self._size] = self._entries[:, : self._size]
            self._entries = entries
        num_tokens = more._entries.shape[2]
        added = self._entries[:, self._size : size]
        added[:, :, :num_tokens] = more._entries
        if num_tokens < added.shape[2]:
            _make_impossible(added[:, :, num_tokens:])
        self._size = size

    def keep(self, rows: NDArray[np.int64]) -> None:
        """Keep row 0 and ``rows``, which become 1, 2, ...; drop all others."""
        self._size = 1 + len(rows)
        self._entries[:, 1 : self._size] = self._entries.take(rows, axis=1)
        narrow = self._num_narrow
        if narrow < self._entries.shape[2] and not (self._entries[0, rows, narrow] > -np.inf).any():
            self._entries = self._entries[:, :, :narrow].copy()

    def candidates(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], Floats, Floats]:
        """Return tokens, warped and raw log-probabilities of these rows, (num_rows * K,) each."""
        found = self._entries.take(rows, axis=1).reshape(3, -1)
        return found[2].view(np.int64), found[0], found[1]

    @property
    def num_tokens(self) -> int:
        """Tokens of a row that was not completed."""
        return self._num_narrow

    def least_log_probs(self, rows: NDArray[np.int64]) -> Floats:
        """Return the smallest known log-probability of each row, -inf of one that is complete."""
        narrow = self._num_narrow
        least: Floats = self._entries[0, rows, narrow - 1]
        if narrow < self._entries.shape[2]:
            least = np.where(self._entries[0, rows, narrow] > -np.inf, -np.inf, least)
        return least

    def complete(self, rows: NDArray[np.int64], logits: NDArray[np.float32], most: int) -> None:
        """Take the ``most`` largest of all logits, (num_rows, vocab), of raw distributions.

        Other rows get as many entries, of which the further ones are impossible.
        """
        most = min(most, logits.shape[1])
        num_known = self._entries.shape[2]
        if num_known < most:
            wider = np.empty((*self._entries.shape[:2], most))
            wider[:, :, :num_known] = self._entries
            _make_impossible(wider[:, :, num_known:])
            self._entries = wider
        tokens, centred, _ = _top(logits, most)
        raw = centred + self._entries[1, rows, :1]  # of the most probable: minus the normalizer
        self._entries[:2, rows] = raw
        self._entries[2].view(np.int64)[rows] = tokens

    def log_probs_of(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> Floats:
        """Return the warped log-probability of one token of each of these rows, (num_rows,)."""
        log_probs, _, known = self._entries[:, rows]
        is_token = known.view(np.int64) == tokens[:, None]
        found: Floats = log_probs[np.arange(len(rows)), is_token.argmax(axis=1)]
        return np.where(is_token.any(axis=1), found, -np.inf)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return int(self._entries.nbytes)


def _make_impossible(entries: Floats) -> None:
    entries[:2] = -np.inf
    entries[2].view(np.int64)[:] = _NO_TOKEN


_NO_TOKEN = -2


class DenseDistributions(Sequence[TokenDistribution]):
    """Next-token distributions over the whole vocabulary, computed when they are read.

    They are held as float32 logits, half of one float64 array: most nodes of a forest are never
    selected, and their distributions never read.
    """

    def __init__(
        self, warp: Warp, logits: NDArray[np.float32], largest: NDArray[np.float32]
    ) -> None:
        """Take (num_rows, vocab) logits and the largest of each row."""
        self._warp = warp
        self._arrays = logits, largest
        self._size = len(logits)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, row: int) -> TokenDistribution:  # type: ignore[override]  # no slices
        if row >= self._size:
            raise IndexError(row)
        return TokenDistribution(*self.candidates(np.array([row])))

    def behind_unused_row(self) -> DenseDistributions:
        """Return a copy whose row 0 is no distribution."""
        arrays = [np.concatenate([old[:1], old]) for old in self._arrays]
        return DenseDistributions(self._warp, *arrays)

    def append(self, more: DenseDistributions) -> None:
        """Add rows."""
        size = self._size + len(more)
        if size > len(self._arrays[0]):
            self._arrays = tuple(larger(array, size + size // 4) for array in self._arrays)  # type: ignore[assignment]
        for array, added in zip(self._arrays, more._arrays, strict=True):
            array[self._size : size] = added
        self._size = size

    def keep(self, rows: NDArray[np.int64]) -> None:
        """Keep row 0 and ``rows``, which become 1, 2, ...; drop all others and their memory."""
        self._size = 1 + len(rows)
        kept = np.concatenate([[0], rows])
        logits, largest = self._arrays
        self._arrays = logits[kept], largest[kept]

    def candidates(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], Floats, Floats]:
        """Return tokens, warped and raw log-probabilities of rows, (num_rows * vocab,) each."""
        logits, largest = self._arrays
        centred = logits[rows].astype(np.float64)
        centred -= largest[rows, None]
        raw = centred - np.log(np.exp(centred).sum(axis=1, keepdims=True))
        log_probs = raw if self._warp.changes_nothing else self._warp.warped(centred)
        tokens = np.broadcast_to(_all_tokens(logits.shape[1]), raw.shape)
        return tokens.ravel(), log_probs.ravel(), raw.ravel()

    def log_probs_of(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> Floats:
        """Return the warped log-probability of one token of each of these rows, (num_rows,)."""
        log_probs = self.candidates(rows)[1].reshape(len(rows), -1)
        found: Floats = log_probs[np.arange(len(rows)), tokens]
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in self._arrays)


TokenDistributions = TopDistributions | DenseDistributions


def larger(array: NDArray[Any], num_rows: int) -> NDArray[Any]:
    """Return a copy with room for ``num_rows`` rows."""
    copy = np.empty((num_rows, *array.shape[1:]), dtype=array.dtype)
    copy[: len(array)] = array
    return copy


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

    def distributions(self, logits: Logits) -> TokenDistributions:
        """Return the next-token distribution of every row of a forward's result.

        logits: see StepModel.forward; of ``TopLogits`` the first ``top_k`` of K >= top_k count.

        Raises:
            ModelError: a row without a finite largest logit or logsumexp (NaN, +inf, or all -inf).
        """
        if isinstance(logits, tuple):
            return self._from_top(*logits[:3])
        if self.top_k:
            return self._top_distributions(*_top(logits, min(self.top_k, logits.shape[1])))
        largest = _finite(logits.max(axis=1)) if len(logits) else logits[:, 0]
        return DenseDistributions(self, logits, largest)

    def _from_top(
        self,
        top_ids: NDArray[np.int64],
        top_logits: NDArray[np.float32],
        logsumexp: NDArray[np.float32],
    ) -> TopDistributions:
        top = top_logits[:, : self.top_k].astype(np.float64)
        largest = top[:, :1].copy()
        if np.count_nonzero(top <= largest) < top.size or not _are_finite(largest):
            raise ModelError(
                "the model returned top_logits with NaN, infinity or a larger one behind the "
                "first; check the engine's precision and the export's parity report"
            )
        log_normalizers = _finite(logsumexp[:, None]) - largest
        top -= largest
        return self._top_distributions(top_ids[:, : self.top_k], top, log_normalizers)

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
        return log_probs


_BLOCK = 1 << 16  # logits looked at together: they and a copy fit the processor's cache


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
    size = max(1, _BLOCK // vocab_size)
    for first in range(0, num_rows, size):
        block = logits[first : first + size]
        largest = _finite(block.max(axis=1, keepdims=True))
        tokens[first : first + size] = _largest(block, top_k)
        sums[first : first + size, 0] = np.exp(block - largest).sum(axis=1, dtype=np.float64)
    chosen = np.take_along_axis(logits, tokens, axis=1)
    order = np.argsort(-chosen, axis=1, kind="stable")  # tokens are increasing: ties too
    centred = np.take_along_axis(chosen, order, axis=1).astype(np.float64)
    centred -= centred[:, :1].copy()
    return np.take_along_axis(tokens, order, axis=1), centred, np.log(sums)


def _largest(logits: NDArray[np.float32], top_k: int) -> NDArray[np.int64]:
    """Return the ids of the ``top_k`` largest logits of each row, increasing; ties by lowest id."""
    last = logits.shape[1] - top_k
    bar = np.partition(logits, last, axis=1)[:, last, None]
    is_chosen = logits >= bar
    if is_chosen.sum() > top_k * len(logits):  # some tie with the last
        is_above = logits > bar
        ties = is_chosen & ~is_above
        num_free = top_k - is_above.sum(axis=1, keepdims=True)
        is_chosen = is_above | (ties & (ties.cumsum(axis=1) <= num_free))
    return is_chosen.nonzero()[1].reshape(len(logits), top_k)


def _are_finite(values: NDArray[Any]) -> bool:
    return bool(np.count_nonzero(np.isfinite(values)) == values.size)


def _finite(largest: Any) -> Any:
    """Return the largest logits if they are finite."""
    if not _are_finite(largest):
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


def check_top_k(role: Role, model: Head, config: DecodingConfig, top_k: int) -> None:
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
    if config.row.rule == "search" and (role == "draft" or keeps_full_logits(model)):
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
    larger = f" or --logits topk:{top_k}" if most < top_k <= model.vocab_size else ""
    raise ConfigError(
        f"top_k is {top_k}{of_all}, {returns}; use top_k 1 to {most}, or export with --logits "
        f"full{larger}"
    )


def check_logits(logits: Logits, model: Head, num_rows: int) -> None:
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
    if top_ids.size and top_ids.view(np.uint64).max() >= vocab_size:  # negative ids are large
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
