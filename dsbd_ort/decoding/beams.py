"""Beams and their hypotheses: what a request has committed to so far."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.distribution import larger

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One entry of ``Hypotheses``: the new tokens of a beam; 0 is the empty one."""

    hypotheses: Hypotheses
    index: int

    @property
    def parent(self) -> Hypothesis | None:
        """The hypothesis without its last token, None for the empty one."""
        parent = int(self.hypotheses.parents[self.index])
        return None if parent < 0 else Hypothesis(self.hypotheses, parent)

    @property
    def token(self) -> int:
        """Last token, -1 of the empty one."""
        return int(self.hypotheses.tokens[self.index])

    @property
    def token_logprob(self) -> float:
        """Its raw (unwarped) log-probability under the target."""
        return float(self.hypotheses.token_logprobs[self.index])

    @property
    def logprob(self) -> float:
        """Sum of ``token_logprob`` from the first token on."""
        return float(self.hypotheses.logprobs[self.index])

    @property
    def num_tokens(self) -> int:
        return int(self.hypotheses.lengths[self.index])

    def chain(self) -> list[Hypothesis]:
        """Return the non-empty hypotheses from the first token to this one."""
        (entries,) = self.hypotheses.paths(np.array([self.index]))
        return [Hypothesis(self.hypotheses, entry) for entry in entries.tolist()]


class Hypotheses:
    """All hypotheses of a request as back-pointers: each is its parent and one more token.

    Entry 0 is the empty one. Read the attributes anew after ``extend``.

    parents, tokens, lengths: (room,) int64.
    token_logprobs, logprobs: (room,) float64. Raw log-probability of the last token under the
        target, and the sum from the first token on.
    """

    def __init__(self) -> None:
        self._size = 1
        self.parents, self.tokens = np.full((2, 64), -1)
        self.lengths = np.zeros(64, dtype=np.int64)
        self.token_logprobs, self.logprobs = np.zeros((2, 64))

    def __len__(self) -> int:
        return self._size

    def extend(self, parents: Ints, tokens: Ints, token_logprobs: Floats) -> Ints:
        """Return the entries of these hypotheses with one more token, (n,) int64 each."""
        first, size = self._size, self._size + len(tokens)
        if size > len(self.parents):
            self._make_room(2 * size)
        self._size = size
        self.parents[first:size] = parents
        self.tokens[first:size] = tokens
        self.lengths[first:size] = self.lengths[parents] + 1
        self.token_logprobs[first:size] = token_logprobs
        self.logprobs[first:size] = self.logprobs[parents] + token_logprobs
        return np.arange(first, size)

    def scores(self, entries: Ints, length_penalty: float) -> Floats:
        """Return logprob / num_tokens ** length_penalty, by which sequences are ranked."""
        lengths = np.maximum(self.lengths[entries], 1).astype(np.float64)
        scores: Floats = self.logprobs[entries] / lengths**length_penalty
        return scores

    def paths(self, entries: Ints) -> list[Ints]:
        """Return for each the non-empty entries from the first token to it, (num_tokens,) int64."""
        lengths = self.lengths[entries]
        table = self._path_table(entries)
        return [table[:length, i] for i, length in enumerate(lengths.tolist())]

    def common(self, entries: Ints) -> Ints:
        """Return the entries that the paths of all begin with, (num_tokens,) int64."""
        if not len(entries):
            return entries
        table = self._path_table(entries)
        differs = (table != table[:, :1]).any(axis=1)
        return table[: int(differs.argmax()) if differs.any() else len(table), 0]

    def _path_table(self, entries: Ints) -> Ints:
        """Return the paths as columns, (most tokens, num_paths) int64, padded with -1."""
        lengths = self.lengths[entries]
        longest = int(lengths.max(initial=0))
        upwards = np.empty((longest, len(entries)), dtype=np.int64)  # from the last token on
        parents = self.parents[: self._size].copy()
        parents[0] = 0
        for row in upwards:
            row[:] = entries
            entries = parents[entries]
        places = lengths - 1 - np.arange(longest)[:, None]
        table = np.take_along_axis(upwards, np.maximum(places, 0), axis=0)
        return np.where(places >= 0, table, -1)

    def _make_room(self, size: int) -> None:
        self.parents, self.tokens = larger(self.parents, size), larger(self.tokens, size)
        self.lengths, self.logprobs = larger(self.lengths, size), larger(self.logprobs, size)
        self.token_logprobs = larger(self.token_logprobs, size)


class Agreement:
    """``entries`` and ``tokens`` that all live hypotheses share, from iteration to iteration.

    Of every entry of the hypotheses' tree it keeps the number of branches that still live, and
    their exclusive or, which is the branch itself if there is only one. Every entry is added and
    removed once, however long the hypotheses are.
    """

    def __init__(self, hypotheses: Hypotheses) -> None:
        self._hypotheses = hypotheses
        self._num_branches = np.zeros(64, dtype=np.int64)
        self._branches = np.zeros(64, dtype=np.int64)
        self._num_known = 1
        self._live: Ints = np.zeros(1, dtype=np.int64)
        self.entries: list[int] = []
        self.tokens: list[int] = []

    def update(self, live: Ints) -> None:
        """Take the live hypotheses; all of them extend earlier live ones or are among them."""
        live = np.unique(live)
        size = int(live[-1]) + 1
        if size > len(self._num_branches):
            more = np.zeros(2 * size - len(self._num_branches), dtype=np.int64)
            self._num_branches = np.append(self._num_branches, more)
            self._branches = np.append(self._branches, more)
        new = live[live >= self._num_known]
        while len(new):
            parents = self._hypotheses.parents[new]
            has_more = self._num_branches[parents] > 0
            np.add.at(self._num_branches, parents, 1)
            np.bitwise_xor.at(self._branches, parents, new)
            new = np.unique(parents[(parents >= self._num_known) & ~has_more])
        self._num_known = max(self._num_known, size)
        gone = self._live[~np.isin(self._live, live)]
        while len(gone := gone[self._num_branches[gone] == 0]):
            parents = self._hypotheses.parents[gone]
            np.subtract.at(self._num_branches, parents, 1)
            np.bitwise_xor.at(self._branches, parents, gone)
            gone = np.unique(parents)
        self._live = live
        entry = self.entries[-1] if self.entries else 0
        while self._num_branches[entry] == 1 and entry not in live:
            entry = int(self._branches[entry])
            self.entries.append(entry)
            self.tokens.append(int(self._hypotheses.tokens[entry]))


@dataclass(eq=False, slots=True)
class Beams:
    """The beam set between two layers. Draws with replacement make it a multiset.

    nodes: (num_distinct,) int64. Node of the forest of every distinct beam.
    log_weights: (num_distinct,) float64. Log-probability under the warped target distributions.
    hypotheses: (num_distinct,) int64. Entry of ``Hypotheses`` of every beam.
    copies: (num_distinct,) int64. How often the beam was drawn; None: once each.
    """

    nodes: Ints
    log_weights: Floats
    hypotheses: Ints
    copies: Ints | None = None

    @classmethod
    def single(cls, node: int, hypothesis: int) -> Beams:
        """Return the set of one beam of weight 1."""
        return cls(np.array([node]), np.zeros(1), np.array([hypothesis]))

    @classmethod
    def initial(cls) -> Beams:
        """Return the beams of a new request: one, at the last token of the prompt, node 0."""
        return cls.single(0, 0)

    @property
    def width(self) -> int:
        """Beams, copies counted."""
        return len(self.nodes) if self.copies is None else int(self.copies.sum())

    @property
    def repeated(self) -> Ints:
        """Index of the beam of every copy, (width,) int64."""
        return np.repeat(np.arange(len(self.nodes)), 1 if self.copies is None else self.copies)

    def only(self, index: int) -> Beams:
        return Beams.single(int(self.nodes[index]), int(self.hypotheses[index]))
