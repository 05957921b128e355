"""One engine's side of the forest: the cache rows and distributions of its nodes.

Three verbs change an engine's cache: a forward appends rows, ``keep`` drops some, and dropping the
rows that no live node sees waits until there are ``MOST_UNSHARED_ROWS`` behind the shared prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import and_, or_

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.distribution import TokenDistribution, Warp, check_logits
from dsbd_ort.decoding.errors import ModelError
from dsbd_ort.decoding.forest import NO_NODE, Forest
from dsbd_ort.decoding.step_model import EngineCall, EngineCalls, Logits, Meter, Role, RowCache

PREFILL_CHUNK = 256
"""Prompt rows per call: bounds the mask at PREFILL_CHUNK x capacity."""

MOST_UNSHARED_ROWS = 64
"""Rows behind the shared ones from which on pruning drops the unseen among them: until then they
are masked, which costs next to nothing, while dropping moves the rows behind them in every
transformer layer."""


@dataclass
class PrefixCache:
    """The tokens whose rows begin an engine's cache, reused by the next request that begins alike.

    Valid at any time between two requests, also after one that was given up half-way: the rows of
    a prompt stay in place while the forest behind them changes.
    """

    tokens: list[int] = field(default_factory=list)

    def num_common(self, token_ids: Sequence[int]) -> int:
        """Return how many first tokens of ``token_ids`` the cache holds."""
        num_common = 0
        for ours, theirs in zip(self.tokens, token_ids, strict=False):
            if ours != theirs:
                break
            num_common += 1
        return num_common


class ForestCache:
    """Rows, visibility and distributions of the nodes that one engine has computed.

    No node is computed twice while it is live. The first ``num_shared`` rows are seen by every live
    node (the prompt and the beams' common path); only the rows behind them have visibility of their
    own, so that the work of masks and pruning does not grow with the context. Which of those rows a
    node sees is one integer, bit by bit: with 10 shared rows, 0b101 sees the rows 10 and 12.
    """

    def __init__(
        self,
        role: Role,
        rows: RowCache,
        meter: Meter,
        forest: Forest,
        warp: Warp,
        prefix: PrefixCache,
    ) -> None:
        """Take an engine's cache, which begins with the rows of ``prefix``; that is kept valid."""
        self._role = role
        self._rows = rows
        self._meter = meter
        self._prefix = prefix
        self._forest = forest
        self._warp = warp
        self._num_calls = 0
        self._num_shared = 0
        self._distributions: dict[int, TokenDistribution] = {}
        self._seen: dict[int, int] = {}  # bit r: the node sees row num_shared + r

    def prefill(self, token_ids: NDArray[np.int64]) -> EngineCalls[None]:
        """Compute the prompt but for its last token, which is the forest's root. No logits."""
        tokens, prefix = token_ids.tolist(), self._prefix
        num_cached = prefix.num_common(tokens)
        prefix.tokens = tokens[:num_cached]
        self._keep(np.arange(num_cached))
        nothing = np.arange(0)
        for start in range(num_cached, len(token_ids), PREFILL_CHUNK):
            chunk = token_ids[start : start + PREFILL_CHUNK]
            positions = np.arange(start, start + len(chunk))
            mask = np.tri(len(chunk), start + len(chunk), start, dtype=np.bool_)
            logits = yield self._call(chunk, positions, mask, nothing)
            self._read(logits, 0)
            prefix.tokens = tokens[: start + len(chunk)]
        self._num_shared = len(token_ids)

    def finish(self, agreed_tokens: list[int]) -> None:
        """Note for the next request which tokens the shared rows hold.

        agreed_tokens: the prompt and the new tokens that all live beams share.
        """
        self._drop_unseen_rows()
        self._prefix.tokens = agreed_tokens[: self._num_shared]

    def is_computed(self, node: int) -> bool:
        """Return whether the node's row and distribution are known; an absorbing one needs none."""
        return node in self._distributions or node in self._forest.absorbing

    def distribution(self, node: int) -> TokenDistribution | None:
        """Return the distribution after a computed node, None for an absorbing one."""
        return None if node in self._forest.absorbing else self._distributions[node]

    def pending(self, nodes: Iterable[int]) -> list[int]:
        """Return what must be computed before the distributions after ``nodes``, parents first."""
        parents, need_nothing = self._forest.parents, self._forest.absorbing | {NO_NODE}
        missing: set[int] = set()
        found = set(nodes)
        while found := found.difference(self._distributions, need_nothing, missing):
            missing |= found
            found = {parents[node] for node in found}
        return sorted(missing)

    def compute(self, nodes: Iterable[int]) -> EngineCalls[None]:
        """Compute ``nodes`` and their pending ancestors in one engine call, if any."""
        nodes = self.pending(nodes)
        if not nodes:
            return
        forest, seen, num_shared = self._forest, self._seen, self._num_shared
        first_row = self._rows.num_rows
        for bit, node in enumerate(nodes, start=first_row - num_shared):
            parent = forest.parents[node]
            seen[node] = (0 if parent == NO_NODE else seen[parent]) | 1 << bit
        mask = np.ones((len(nodes), first_row + len(nodes)), dtype=np.bool_)
        mask[:, num_shared:] = _bits([seen[node] for node in nodes], mask.shape[1] - num_shared)
        logits = yield self._call(
            np.array([forest.tokens[node] for node in nodes]),
            np.array([forest.positions[node] for node in nodes]),
            mask,
            np.arange(len(nodes)),
        )
        self._distributions.update(zip(nodes, self._read(logits, len(nodes)), strict=True))

    def parents_of_pending(self, nodes: set[int]) -> set[int]:
        """Return the ancestors of ``nodes`` without which these could not be computed later."""
        pending = self.pending(nodes)
        return {self._forest.parents[node] for node in pending}.union(pending) - {NO_NODE}

    def prune(self, renumbered: dict[int, int]) -> None:
        """Forget all but the kept nodes, and drop unseen rows once there are many.

        renumbered: new number by old of the kept nodes.
        """
        distributions, seen = self._distributions, self._seen
        self._distributions = {
            new: distributions[old] for old, new in renumbered.items() if old in distributions
        }
        kept = {new: seen[old] for old, new in renumbered.items() if old in seen}
        self._seen = kept or seen  # none is kept once all beams have ended, before ``finish``
        if self._rows.num_rows - self._num_shared > MOST_UNSHARED_ROWS:
            self._drop_unseen_rows()

    def _drop_unseen_rows(self) -> None:
        """Keep the rows that a node sees; the first of them that all nodes see become shared.

        With 10 shared rows, two nodes and six rows behind, lowest bit (row 10) to the right:

            node 7 sees       0b010111      any: 0b110111, row 13 is unseen and dropped
            node 8 sees       0b100111      all: 0b000111, the rows 10 to 12 become shared

        What is left to tell apart are the old rows 14 and 15, now 13 and 14: 0b01 and 0b10.
        """
        seen, num_own = self._seen, self._rows.num_rows - self._num_shared
        if not seen:  # nothing was computed
            return
        by_any, by_all = reduce(or_, seen.values()), reduce(and_, seen.values())
        bits = _bits([by_any, by_all, *seen.values()], num_own)
        kept = np.flatnonzero(bits[0])
        is_shared = bits[1, kept]
        num_common = len(kept) if is_shared.all() else int(is_shared.argmin())
        if len(kept) < num_own:
            rows_of_all = np.arange(self._num_shared)
            self._keep(np.concatenate([rows_of_all, kept + self._num_shared]))
        self._seen = dict(zip(seen, _integers(bits[2:, kept[num_common:]]), strict=True))
        self._num_shared += num_common

    def _read(self, logits: Logits, num_rows: int) -> Sequence[TokenDistribution]:
        """Return the distributions of a call's rows; an error says which call of which engine."""
        self._num_calls += 1
        try:
            check_logits(logits, self._rows, num_rows)
            return self._warp.distributions(logits)
        except ModelError as error:
            raise ModelError(f"call {self._num_calls} of the {self._role}: {error}") from error

    def _call(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        mask: NDArray[np.bool_],
        logit_rows: NDArray[np.int64],
    ) -> EngineCall:
        return EngineCall(self._role, self._meter, token_ids, positions, mask, logit_rows)

    def _keep(self, rows: NDArray[np.int64]) -> None:
        meter = self._meter
        began = meter.clock()
        self._rows.keep(rows)
        meter.seconds += meter.clock() - began


def _bits(integers: list[int], num_bits: int) -> NDArray[np.bool_]:
    """Return the lowest bits of each integer, lowest first: (num_integers, num_bits) bool."""
    num_bytes = (num_bits + 7) // 8
    joined = b"".join([integer.to_bytes(num_bytes, "little") for integer in integers])
    rows = np.frombuffer(joined, np.uint8).reshape(len(integers), num_bytes)
    return np.unpackbits(rows, axis=1, count=num_bits, bitorder="little").view(np.bool_)


def _integers(bits: NDArray[np.bool_]) -> list[int]:
    """Return the integers of which ``_bits`` gives ``bits``, (num_integers, num_bits) bool."""
    rows = np.packbits(bits, axis=1, bitorder="little")
    return [int.from_bytes(row.tobytes(), "little") for row in rows]
