"""Next-token distributions of many positions in arrays, of the K best tokens or of all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Self

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


class _StoredRows:
    """Distributions of which each has a row in every one of some arrays."""

    def __init__(self, *arrays: NDArray[Any]) -> None:
        self._arrays = arrays
        self._size = len(arrays[0])

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, row: int) -> TokenDistribution:
        if row >= self._size:
            raise IndexError(row)
        return TokenDistribution(*self.candidates(np.array([row])))

    def after_unused_row(self) -> Self:
        """Return a copy whose row 0 is no distribution."""
        shifted = copy.copy(self)
        shifted._arrays = tuple(np.concatenate([array[:1], array]) for array in self._arrays)
        shifted._size += 1
        return shifted

    def append(self, more: Self) -> None:
        size = self._size + len(more)
        if size > len(self._arrays[0]):
            self._arrays = tuple([larger(array, size + size // 4) for array in self._arrays])
        for array, added in zip(self._arrays, more._arrays, strict=True):
            array[self._size : size] = added
        self._size = size

    def keep(self, rows: Rows) -> None:
        """Keep row 0 and ``rows``, which become 1, 2, ...; drop all others."""
        self._size = 1 + len(rows)
        kept = np.zeros(self._size, dtype=np.int64)
        kept[1:] = rows
        self._arrays = tuple([array.take(kept, axis=0) for array in self._arrays])

    def candidates(self, rows: Rows) -> tuple[Rows, Floats, Floats]:
        """Return tokens, warped and raw log-probabilities of rows, (num_rows * n,) each."""
        raise NotImplementedError

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays)


class TopDistributions(_StoredRows):
    """Distributions over K tokens each."""

    def __init__(self, tokens: Rows, log_probs: Floats, raw_log_probs: Floats | None) -> None:
        """Take these, (num_rows, K) each, see TokenDistribution; raw None: they are the others."""
        super().__init__(tokens, log_probs, *(() if raw_log_probs is None else (raw_log_probs,)))

    def candidates(self, rows: Rows) -> tuple[Rows, Floats, Floats]:
        tokens, *log_probs = [array.take(rows, axis=0).ravel() for array in self._arrays]
        return tokens, log_probs[0], log_probs[-1]

    @property
    def num_tokens(self) -> int:
        return int(self._arrays[0].shape[1])

    def least(self, rows: Rows) -> Floats:
        """Return the last log-probability of these rows, (num_rows,)."""
        last: Floats = self._arrays[1][rows, -1]
        return last

    def log_probs_of(self, rows: Rows, tokens: NDArray[np.int64]) -> Floats:
        """Return the warped log-probability of one token of each of these rows, (num_rows,)."""
        listed, log_probs = self._arrays[0][rows], self._arrays[1][rows]
        is_token = listed == tokens[:, None]
        of_tokens: Floats = log_probs[np.arange(len(rows)), is_token.argmax(axis=1)]
        return np.where(is_token.any(axis=1), of_tokens, -np.inf)


class DenseDistributions(_StoredRows):
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
        super().__init__(logits, largest, *(() if normalizers is None else (normalizers,)))
        self._warped = warped

    def candidates(self, rows: Rows) -> tuple[Rows, Floats, Floats]:
        logits, largest, *given = (array[rows] for array in self._arrays)
        normalizers = given[0] if given else added_up(logits)
        raw = logits.astype(np.float64)
        log_probs = None if self._warped is None else self._warped(raw - largest[:, None])
        raw -= normalizers
        if log_probs is None:
            log_probs = raw
        tokens = _all_tokens(logits.shape[1]) + np.zeros((len(rows), 1), dtype=np.int64)
        return tokens.ravel(), log_probs.ravel(), raw.ravel()

    def log_probs_of(self, rows: Rows, tokens: NDArray[np.int64]) -> Floats:
        log_probs = self.candidates(rows)[1].reshape(len(rows), -1)
        of_tokens: Floats = log_probs[np.arange(len(rows)), tokens]
        return of_tokens


class ListedDistributions:
    """Distributions that list the tokens that may be drawn, of any number each, row by row."""

    def __init__(
        self, tokens: Rows, log_probs: Floats, raw_log_probs: Floats, begins: Rows, counts: Rows
    ) -> None:
        """Take entries, (num_entries,) each; of every row, where they begin, how many they are."""
        self._entries = tokens, log_probs, raw_log_probs
        self._begins = begins
        self._counts = counts

    @classmethod
    def of(cls, tokens: Rows, log_probs: Floats, raw_log_probs: Floats) -> ListedDistributions:
        """Return distributions, (num_rows, n) each, without tokens of log-probability -inf."""
        is_listed = log_probs > -np.inf
        counts = np.count_nonzero(is_listed, axis=1)
        begins = counts.cumsum() - counts
        return cls(
            tokens[is_listed], log_probs[is_listed], raw_log_probs[is_listed], begins, counts
        )

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, row: int) -> TokenDistribution:
        if row >= len(self):
            raise IndexError(row)
        return TokenDistribution(*self.candidates(np.array([row])))

    def after_unused_row(self) -> ListedDistributions:
        """Return a copy whose row 0 is no distribution: one entry, to be overwritten."""
        tokens, log_probs, raw = (np.append(0, entries) for entries in self._entries)
        begins, counts = np.append(0, self._begins + 1), np.append(1, self._counts)
        return ListedDistributions(tokens, log_probs, raw, begins, counts)

    def replaced(self, rows: Rows, others: ListedDistributions) -> ListedDistributions:
        """Return a copy in which ``others`` stand in these rows."""
        begins, counts = self._begins.copy(), self._counts.copy()
        begins[rows], counts[rows] = others._begins + len(self._entries[0]), others._counts
        return ListedDistributions(*self._joined(others), begins, counts)

    def append(self, more: ListedDistributions) -> None:
        self._begins = np.append(self._begins, more._begins + len(self._entries[0]))
        self._counts = np.append(self._counts, more._counts)
        self._entries = self._joined(more)

    def _joined(self, more: ListedDistributions) -> tuple[Rows, Floats, Floats]:
        pairs = zip(self._entries, more._entries, strict=True)
        tokens, log_probs, raw = (np.concatenate(pair) for pair in pairs)
        return tokens, log_probs, raw

    def keep(self, rows: Rows) -> None:
        kept = np.append(0, rows)
        self._entries = self.candidates(kept)
        self._counts = self._counts[kept]
        self._begins = self._counts.cumsum() - self._counts

    def counts(self, rows: Rows) -> Rows:
        """Return how many tokens these rows list, (num_rows,) int64."""
        counts: Rows = self._counts[rows]
        return counts

    def candidates(self, rows: Rows) -> tuple[Rows, Floats, Floats]:
        """Return tokens, warped and raw log-probabilities of these rows, one after another."""
        places = joined_ranges(self._begins[rows], self._counts[rows])
        tokens, log_probs, raw = self._entries
        return tokens[places], log_probs[places], raw[places]

    def log_probs_of(self, rows: Rows, tokens: NDArray[np.int64]) -> Floats:
        listed, log_probs, _ = self.candidates(rows)
        row_of = np.repeat(np.arange(len(rows)), self._counts[rows])
        of_tokens = np.full(len(rows), -np.inf)
        is_token = listed == tokens[row_of]
        of_tokens[row_of[is_token]] = log_probs[is_token]
        return of_tokens

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self._entries)


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
