"""Next-token distributions of many positions in arrays, of the K best tokens or of all."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.rows import added_up

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
Warped = Callable[[Floats], Floats]


class TokenDistribution(NamedTuple):
    """The next-token distribution of one position.

    tokens: (num_tokens,) int64. The tokens that may be drawn: top_k of them by decreasing logit,
        ties by increasing id, or all by id.
    log_probs: (num_tokens,) float64. Warped; -inf where top-p has cut.
    raw_log_probs: (num_tokens,) float64. Unwarped, over the whole vocabulary.
    """

    tokens: NDArray[np.int64]
    log_probs: Floats
    raw_log_probs: Floats


class TopDistributions:
    """Distributions over K tokens each: log-probabilities, raw ones, and the int64 bits of ids."""

    def __init__(self, entries: Floats) -> None:
        """Take these, (3, num_rows, K), see TokenDistribution; of two, the first is both."""
        self._entries, self._size = entries, int(entries.shape[1])

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, row: int) -> TokenDistribution:
        if row >= self._size:
            raise IndexError(row)
        return TokenDistribution(*self.candidates(np.array([row])))

    def after_unused_row(self) -> TopDistributions:
        """Return a copy whose row 0 is no distribution."""
        return TopDistributions(np.concatenate([self._entries[:, :1], self._entries], axis=1))

    def append(self, more: TopDistributions) -> None:
        size = self._size + more._size
        if size > self._entries.shape[1]:
            entries = np.empty((len(self._entries), 2 * size, self._entries.shape[2]))
            entries[:, : self._size] = self._entries[:, : self._size]
            self._entries = entries
        self._entries[:, self._size : size] = more._entries
        self._size = size

    def keep(self, rows: NDArray[np.int64]) -> None:
        """Keep row 0 and ``rows``, which become 1, 2, ...; drop all others."""
        self._size = 1 + len(rows)
        self._entries[:, 1 : self._size] = self._entries.take(rows, axis=1)

    def candidates(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], Floats, Floats]:
        """Return tokens, warped and raw log-probabilities of these rows, (num_rows * K,) each."""
        found = self._entries.take(rows, axis=1).reshape(len(self._entries), -1)
        return found[-1].view(np.int64), found[0], found[-2]

    @property
    def num_tokens(self) -> int:
        return int(self._entries.shape[2])

    def least(self, rows: NDArray[np.int64]) -> Floats:
        """Return the last log-probability of these rows, (num_rows,)."""
        last: Floats = self._entries[0, rows, -1]
        return last

    def log_probs_of(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> Floats:
        """Return the warped log-probability of one token of each of these rows, (num_rows,)."""
        log_probs, *_, known = self._entries[:, rows]
        is_token = known.view(np.int64) == tokens[:, None]
        found: Floats = log_probs[np.arange(len(rows)), is_token.argmax(axis=1)]
        return np.where(is_token.any(axis=1), found, -np.inf)

    @property
    def num_bytes(self) -> int:
        return int(self._entries.nbytes)


class DenseDistributions:
    """Distributions over the whole vocabulary, held as float32 logits, computed when read."""

    def __init__(
        self,
        logits: NDArray[np.float32],
        largest: NDArray[np.float32],
        warped: Warped | None,
        normalizers: Floats | None = None,
    ) -> None:
        """Take the rows of a forward.

        logits: (num_rows, vocab). largest: (num_rows,), of each row. warped: returns warped
        log-probabilities of logits less the largest, both (num_rows, vocab); None: the raw ones.
        normalizers: (num_rows, 1), of an engine that returns them; None: added up when read.
        """
        self._warped = warped
        self._arrays: tuple[NDArray[Any], ...] = logits, largest
        if normalizers is not None:
            self._arrays = logits, largest, normalizers
        self._size = len(logits)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, row: int) -> TokenDistribution:
        if row >= self._size:
            raise IndexError(row)
        return TokenDistribution(*self.candidates(np.array([row])))

    def after_unused_row(self) -> DenseDistributions:
        logits, largest, *given = (np.concatenate([old[:1], old]) for old in self._arrays)
        return DenseDistributions(logits, largest, self._warped, *given)

    def append(self, more: DenseDistributions) -> None:
        size = self._size + len(more)
        if size > len(self._arrays[0]):
            self._arrays = tuple(larger(array, size + size // 4) for array in self._arrays)
        for array, added in zip(self._arrays, more._arrays, strict=True):
            array[self._size : size] = added
        self._size = size

    def keep(self, rows: NDArray[np.int64]) -> None:
        self._size = 1 + len(rows)
        kept = np.concatenate([[0], rows])
        self._arrays = tuple(array[kept] for array in self._arrays)

    def candidates(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], Floats, Floats]:
        """Return tokens, warped and raw log-probabilities of rows, (num_rows * vocab,) each."""
        logits, largest, *given = (array[rows] for array in self._arrays)
        normalizers = given[0] if given else added_up(logits)
        raw = logits.astype(np.float64)
        log_probs = None if self._warped is None else self._warped(raw - largest[:, None])
        raw -= normalizers
        if log_probs is None:
            log_probs = raw
        tokens = _all_tokens(logits.shape[1]) + np.zeros((len(rows), 1), dtype=np.int64)
        return tokens.ravel(), log_probs.ravel(), raw.ravel()

    def log_probs_of(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> Floats:
        log_probs = self.candidates(rows)[1].reshape(len(rows), -1)
        found: Floats = log_probs[np.arange(len(rows)), tokens]
        return found

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays)


class ListedDistributions:
    """Distributions that list the tokens that may be drawn, of any number each, row by row."""

    def __init__(self, entries: Floats, begins: Rows, counts: Rows) -> None:
        """Take entries (3, num_entries); of every row, where they begin and how many they are."""
        self._entries = entries
        self._size = int(entries.shape[1])
        self._begins = begins
        self._counts = counts

    @classmethod
    def of(
        cls, tokens: NDArray[np.int64], log_probs: Floats, raw_log_probs: Floats
    ) -> ListedDistributions:
        """Return distributions, (num_rows, n) each, without tokens of log-probability -inf."""
        is_listed = log_probs > -np.inf
        counts = np.count_nonzero(is_listed, axis=1)
        entries = np.empty((3, int(counts.sum())))
        entries[0], entries[1] = log_probs[is_listed], raw_log_probs[is_listed]
        entries[2].view(np.int64)[:] = tokens[is_listed]
        return cls(entries, counts.cumsum() - counts, counts)

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, row: int) -> TokenDistribution:
        if row >= len(self):
            raise IndexError(row)
        return TokenDistribution(*self.candidates(np.array([row]))[:3])

    def after_unused_row(self) -> ListedDistributions:
        """Return a copy whose row 0 is no distribution: one entry, to be overwritten."""
        entries = np.concatenate([np.zeros((3, 1)), self._entries[:, : self._size]], axis=1)
        return ListedDistributions(
            entries, np.append(0, self._begins + 1), np.append(1, self._counts)
        )

    def replaced(self, rows: Rows, others: ListedDistributions) -> ListedDistributions:
        """Return a copy in which ``others`` stand in these rows."""
        begins, counts = self._begins.copy(), self._counts.copy()
        begins[rows], counts[rows] = others._begins + self._size, others._counts
        parts = [self._entries[:, : self._size], others._entries[:, : others._size]]
        return ListedDistributions(np.concatenate(parts, axis=1), begins, counts)

    def append(self, more: ListedDistributions) -> None:
        size = self._size + more._size
        if size > self._entries.shape[1]:
            entries = np.empty((3, 2 * size))
            entries[:, : self._size] = self._entries[:, : self._size]
            self._entries = entries
        self._entries[:, self._size : size] = more._entries[:, : more._size]
        self._begins = np.append(self._begins, more._begins + self._size)
        self._counts = np.append(self._counts, more._counts)
        self._size = size

    def keep(self, rows: Rows) -> None:
        kept = np.append(0, rows)
        self._entries = self._entries[:, self._places(kept)]
        self._counts = self._counts[kept]
        self._begins = self._counts.cumsum() - self._counts
        self._size = self._entries.shape[1]

    def counts(self, rows: Rows) -> Rows:
        """Return how many tokens these rows list, (num_rows,) int64."""
        counts: Rows = self._counts[rows]
        return counts

    def candidates(self, rows: Rows) -> tuple[NDArray[np.int64], Floats, Floats]:
        """Return tokens, warped and raw log-probabilities of these rows, one after another."""
        found = self._entries[:, self._places(rows)]
        return found[2].view(np.int64), found[0], found[1]

    def _places(self, rows: Rows) -> Rows:
        return joined_ranges(self._begins[rows], self._counts[rows])

    def log_probs_of(self, rows: Rows, tokens: NDArray[np.int64]) -> Floats:
        known, log_probs, _ = self.candidates(rows)
        row_of = np.repeat(np.arange(len(rows)), self._counts[rows])
        found = np.full(len(rows), -np.inf)
        is_token = known == tokens[row_of]
        found[row_of[is_token]] = log_probs[is_token]
        return found

    @property
    def num_bytes(self) -> int:
        return int(self._entries.nbytes)


TokenDistributions = TopDistributions | DenseDistributions | ListedDistributions


def joined_ranges(begins: Rows, counts: Rows) -> Rows:
    """Return the numbers of several ranges: from [5, 9], [2, 1] of them, gives [5, 6, 9]."""
    ends = counts.cumsum()
    size = int(ends[-1]) if len(ends) else 0
    return np.arange(size) + np.repeat(begins - (ends - counts), counts)


def larger(array: NDArray[Any], num_rows: int) -> NDArray[Any]:
    """Return a copy with room for ``num_rows`` rows."""
    copy = np.empty((num_rows, *array.shape[1:]), dtype=array.dtype)
    copy[: len(array)] = array
    return copy


@lru_cache(maxsize=8)
def _all_tokens(vocab_size: int) -> NDArray[np.int64]:
    tokens = np.arange(vocab_size)
    tokens.flags.writeable = False
    return tokens
