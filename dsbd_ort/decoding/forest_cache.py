"""What one engine has computed of the forest: rows, who sees which row, token laws."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import and_, or_

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.cached_prefix import CachedPrefix
from dsbd_ort.decoding.forest import NO_NODE, Forest
from dsbd_ort.decoding.law_source import LawSource
from dsbd_ort.decoding.meter import Meter
from dsbd_ort.decoding.step_model import EngineCall, EngineCalls, Role, RowCache
from dsbd_ort.decoding.warp import AnyLaw, Warp

PREFILL_CHUNK = 256
"""Prompt rows per call: bounds the mask at PREFILL_CHUNK x capacity."""

MOST_TOLD_APART = 64
"""Rows behind the shared ones from which on pruning moves rows; a masked row costs next to nothing,
moving those behind it a copy in every layer of the engine."""


class ForestCache:
    """One engine's side of the forest: no node is computed twice while it is live.

    The cache's first ``num_shared`` rows are seen by every live node (the prompt and the beams'
    common path); only the rows behind them are told apart, so that the work of masks and pruning
    does not grow with the context. Who sees which of those is one integer a node, bit by bit.
    """

    def __init__(
        self,
        role: Role,
        model: RowCache,
        meter: Meter,
        forest: Forest,
        warp: Warp,
        prefix: CachedPrefix,
    ) -> None:
        """Take an engine whose cache begins with the rows of ``prefix``, which is kept true.

        ``role``, "target" or "draft", is what errors call it.
        """
        self._role = role
        self._model = model
        self._meter = meter
        self._prefix = prefix
        self._forest = forest
        self._source = LawSource(role, model, warp)
        self._num_shared = 0
        self._laws: dict[int, AnyLaw] = {}
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
            outputs = yield self._call(chunk, positions, mask, nothing)
            self._source.laws(outputs, 0)
            prefix.tokens = tokens[: start + len(chunk)]
        self._num_shared = len(token_ids)

    def finish(self, agreed_tokens: list[int]) -> None:
        """Note for the next request which tokens the shared rows hold.

        agreed_tokens: the prompt and the new tokens that all live beams share.
        """
        self._drop_unseen_rows()
        self._prefix.tokens = agreed_tokens[: self._num_shared]

    def is_computed(self, node: int) -> bool:
        """Tell whether the engine holds the node's row and law; an absorbing node needs neither."""
        return node in self._laws or node in self._forest.absorbing

    def law(self, node: int) -> AnyLaw | None:
        """Return the law after a computed node, None for an absorbing one."""
        return None if node in self._forest.absorbing else self._laws[node]

    def pending(self, nodes: Iterable[int]) -> list[int]:
        """Return what must be computed before laws of ``nodes`` are known, parents first."""
        parents, need_nothing = self._forest.parents, self._forest.absorbing | {NO_NODE}
        missing: set[int] = set()
        found = set(nodes)
        while found := found.difference(self._laws, need_nothing, missing):
            missing |= found
            found = {parents[node] for node in found}
        return sorted(missing)

    def compute(self, nodes: Iterable[int]) -> EngineCalls[None]:
        """Compute ``nodes`` and their pending ancestors in one engine call, if any."""
        nodes = self.pending(nodes)
        if not nodes:
            return
        forest, seen, num_shared = self._forest, self._seen, self._num_shared
        first_row = self._model.num_rows
        for bit, node in enumerate(nodes, start=first_row - num_shared):
            parent = forest.parents[node]
            seen[node] = (0 if parent == NO_NODE else seen[parent]) | 1 << bit
        mask = np.ones((len(nodes), first_row + len(nodes)), dtype=np.bool_)
        mask[:, num_shared:] = _bits([seen[node] for node in nodes], mask.shape[1] - num_shared)
        outputs = yield self._call(
            np.array([forest.tokens[node] for node in nodes]),
            np.array([forest.positions[node] for node in nodes]),
            mask,
            np.arange(len(nodes)),
        )
        self._laws.update(zip(nodes, self._source.laws(outputs, len(nodes)), strict=True))

    def parents_of_pending(self, nodes: set[int]) -> set[int]:
        """Return the ancestors of ``nodes`` without which these could not be computed later."""
        pending = self.pending(nodes)
        return {self._forest.parents[node] for node in pending}.union(pending) - {NO_NODE}

    def prune(self, renumbered: dict[int, int]) -> None:
        """Forget all but the kept nodes, and now and then the rows that none of them sees.

        renumbered: new number by old of the kept nodes.
        """
        laws, seen = self._laws, self._seen
        self._laws = {new: laws[old] for old, new in renumbered.items() if old in laws}
        kept = {new: seen[old] for old, new in renumbered.items() if old in seen}
        self._seen = kept or seen  # none is kept once all beams have ended: ``finish`` comes next
        if self._model.num_rows - self._num_shared > MOST_TOLD_APART:
            self._drop_unseen_rows()

    def _drop_unseen_rows(self) -> None:
        """Keep the rows that a node sees; the first ones that all see are shared from now on."""
        seen, num_own = self._seen, self._model.num_rows - self._num_shared
        if not seen:  # nothing was computed
            return
        by_any, by_all = reduce(or_, seen.values()), reduce(and_, seen.values())
        by_some = by_any & ~by_all
        num_common = (by_any & (by_some & -by_some) - 1).bit_count()  # below the lowest of by_some
        bits = _bits([by_any, *seen.values()], num_own)
        kept = np.flatnonzero(bits[0])
        if len(kept) < num_own:
            rows_of_all = np.arange(self._num_shared)
            self._keep(np.concatenate([rows_of_all, kept + self._num_shared]))
        self._seen = dict(zip(seen, _integers(bits[1:, kept[num_common:]]), strict=True))
        self._num_shared += num_common

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
        self._model.keep(rows)
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
