"""The tokens that a constraint allows after the nodes of a forest, and what it leaves out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.logits import Logits
from dsbd_ort.decoding.distribution import joined_ranges
from dsbd_ort.decoding.logits_processing.constraint import TokenLists, TokenMasks
from dsbd_ort.decoding.logits_processing.path_states import (
    ConstraintStates,
    Nodes,
    PathTokens,
    Tokens,
)

Rows = NDArray[np.int64]

MOST_FORBIDDEN = 3
"""Tokens that are noted for a node."""
_LOOKED_AT = 32  # most probable tokens of a position: a forbidden one beyond them hardly counts

Forbidden = tuple[tuple[int, float], ...]
"""Token ids and their probabilities under the raw target, most probable first."""


class AllowedAfter:
    """The tokens that a constraint allows after some nodes, end-of-sequence ids included."""

    def __init__(
        self, allowed: TokenLists | TokenMasks | None, accepts: NDArray[np.bool_], eos: Tokens
    ) -> None:
        self._allowed, self._accepts, self._eos = allowed, accepts, eos

    @classmethod
    def after(cls, nodes: Nodes, states: ConstraintStates | None) -> AllowedAfter:
        """Return those of a constraint's states at ``nodes``, all tokens without a constraint."""
        if states is None:
            return cls(None, np.zeros(len(nodes), dtype=np.bool_), np.arange(0))
        at_nodes, constraint = states.states[nodes], states.constraint
        return cls(constraint.allowed(at_nodes), constraint.accepts(at_nodes), states.eos)

    def part(self, rows: Rows) -> AllowedAfter:
        allowed = self._allowed
        if isinstance(allowed, TokenMasks):
            allowed = TokenMasks(allowed.bits[rows])
        elif isinstance(allowed, TokenLists):
            begins = allowed.counts.cumsum() - allowed.counts
            counts = allowed.counts[rows]
            allowed = TokenLists(allowed.tokens[joined_ranges(begins[rows], counts)], counts)
        return AllowedAfter(allowed, self._accepts[rows], self._eos)

    @property
    def num_listed(self) -> Rows:
        """Tokens that the constraint lists in each row, the end aside; -1: it lists none."""
        if isinstance(self._allowed, TokenLists):
            return self._allowed.counts
        return np.full(len(self._accepts), -1)

    @property
    def listed_tokens(self) -> Tokens:
        """The tokens of all rows that the constraint lists, (num_tokens,) int64."""
        return self._allowed.tokens if isinstance(self._allowed, TokenLists) else np.arange(0)

    def listed(self) -> Tokens | None:
        """Return the tokens as a table, (num_rows, n) by id, padded with -1; None: not listed."""
        if not isinstance(self._allowed, TokenLists):
            return None
        counts = self._allowed.counts
        num_columns = int(counts.max(initial=1))
        table = np.full((len(counts), num_columns + len(self._eos)), -1, dtype=np.int64)
        table[:, :num_columns][np.arange(num_columns) < counts[:, None]] = self._allowed.tokens
        table[self._accepts, num_columns:] = self._eos
        table.view(np.uint64).sort(axis=1)  # -1 is the largest
        return table

    def tokens_by_row(self, vocab_size: int) -> tuple[Rows, Tokens]:
        """Return the row and the id of every token allowed, (n,) int64 each; of a constraint."""
        if isinstance(self._allowed, TokenMasks):
            rows, tokens = self.mask(vocab_size).nonzero()
            return rows, tokens
        table = self.listed()
        assert table is not None  # it lists the tokens
        is_token = table >= 0
        return is_token.nonzero()[0], table[is_token]

    def mask(self, vocab_size: int) -> NDArray[np.bool_]:
        """Return which tokens are allowed, (num_rows, vocab_size) bool; of a constraint by bits."""
        assert isinstance(self._allowed, TokenMasks)  # others are listed
        bits = np.unpackbits(
            self._allowed.bits.view(np.uint8), axis=1, count=vocab_size, bitorder="little"
        ).view(np.bool_)
        bits[:, self._eos] |= self._accepts[:, None]
        return bits

    def are_allowed(self, tokens: Tokens) -> NDArray[np.bool_]:
        """Return which of these are allowed, (num_rows, n) both; -1 is no token."""
        is_token = tokens >= 0
        if self._allowed is None:
            return is_token
        if isinstance(self._allowed, TokenMasks):
            words = np.take_along_axis(self._allowed.bits, np.maximum(tokens, 0) >> 5, axis=1)
            is_listed = (words >> (tokens & 31).astype(np.int32) & 1).astype(np.bool_)
        else:
            counts = self._allowed.counts
            stride = max(int(tokens.max(initial=0)), int(self._allowed.tokens.max(initial=0))) + 1
            row_of = np.repeat(np.arange(len(counts)), counts)
            first = np.arange(len(counts))[:, None] * stride
            is_listed = np.isin(first + tokens, row_of * stride + self._allowed.tokens)
        return (is_listed | (np.isin(tokens, self._eos) & self._accepts[:, None])) & is_token

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Tokens allowed in each row, with a constraint."""
        assert self._allowed is not None
        if isinstance(self._allowed, TokenMasks):
            counts = np.bitwise_count(self._allowed.bits.view(np.uint32)).sum(axis=1)
        else:
            counts = self._allowed.counts
        return np.asarray(counts + self._accepts * len(self._eos))

    def num_of(self, vocab_size: int) -> NDArray[np.int64]:
        """Tokens allowed in each row, ``vocab_size`` without a constraint."""
        is_free = self._allowed is None
        return np.full(len(self._accepts), vocab_size) if is_free else self.num_tokens


class ForbiddenTokens:
    """Notes what a constraint forbids, node by node, until it is taken."""

    def __init__(self) -> None:
        self._noted: dict[int, Forbidden] = {}

    def note(self, logits: Logits, nodes: Nodes, allowed: AllowedAfter) -> None:
        """Note the forbidden ones of the likeliest tokens after nodes, of the target."""
        normalizers = logits.log_normalizers
        tokens, scores = logits.most_probable(_LOOKED_AT)
        probabilities = np.exp(scores - normalizers)
        is_forbidden = ~allowed.are_allowed(tokens)
        for row, node in enumerate(nodes.tolist()):
            columns = np.flatnonzero(is_forbidden[row])[:MOST_FORBIDDEN]
            forbidden = tokens[row, columns].tolist(), probabilities[row, columns].tolist()
            self._noted[node] = tuple(zip(*forbidden, strict=True))

    def taken(self) -> dict[int, Forbidden]:
        """Return what was noted, by node, and forget it: pruning gives nodes other numbers."""
        noted, self._noted = self._noted, {}
        return noted


class AllowedMass:
    """Stores the share of the target's distribution that processors leave after each path.

    Divided by it, log-probabilities of an output are those among the tokens that could follow, as
    transformers' ``average log-probability`` of a transcript.
    """

    def __init__(self) -> None:
        self._by_path: dict[bytes, float] = {}

    def note(self, paths: PathTokens, nodes: Nodes, log_probs: NDArray[np.float64]) -> None:
        """Note the sum of what ``log_probs``, (num_nodes, n) float64, leave after nodes."""
        largest = log_probs.max(axis=1, initial=-np.inf, keepdims=True)
        shift = np.where(np.isfinite(largest), largest, 0.0)
        with np.errstate(divide="ignore"):  # nothing is left: that is an error elsewhere
            masses = np.log(np.exp(log_probs - shift).sum(axis=1)) + shift[:, 0]
        for node, mass in zip(nodes.tolist(), masses.tolist(), strict=True):
            self._by_path[paths.path(node)[paths.num_prompt :].tobytes()] = mass

    def before(self, token_ids: Sequence[int]) -> NDArray[np.float64]:
        """Return the log of what was left at each new token's place, (n,); 0 without processors."""
        if not self._by_path:
            return np.zeros(len(token_ids))
        tokens = np.array(token_ids, dtype=np.int64)
        return np.array([self._by_path[tokens[:n].tobytes()] for n in range(len(tokens))])
