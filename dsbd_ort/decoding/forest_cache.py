"""What one engine has computed of the forest: rows, who sees which row, token laws."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.errors import ModelError
from dsbd_ort.decoding.forest import NO_NODE, Forest
from dsbd_ort.decoding.step_model import StepModel
from dsbd_ort.decoding.warp import TokenLaw, Warp

PREFILL_CHUNK = 256
"""Prompt rows per call: bounds the mask at PREFILL_CHUNK x capacity."""


class ForestCache:
    """One engine's side of the forest: no node is computed twice while it is live.

    The cache's first ``num_shared`` rows are seen by every live node (the prompt and the beams'
    common path); only the rows behind them are told apart, so that the work of masks and pruning
    does not grow with the context.
    """

    def __init__(self, model: StepModel, forest: Forest, warp: Warp) -> None:
        self._model = model
        self._forest = forest
        self._warp = warp
        self._num_shared = 0
        self._laws: dict[int, TokenLaw] = {}
        self._seen: dict[int, NDArray[np.int64]] = {}  # unshared rows a node sees, its own last

    def prefill(self, token_ids: NDArray[np.int64]) -> None:
        """Compute the prompt but for its last token, which is the forest's root. No logits."""
        self._model.keep(np.arange(0))
        nothing = np.arange(0)
        for start in range(0, len(token_ids), PREFILL_CHUNK):
            chunk = token_ids[start : start + PREFILL_CHUNK]
            positions = np.arange(start, start + len(chunk))
            mask = np.tri(len(chunk), start + len(chunk), start, dtype=np.bool_)
            self._model.step(chunk, positions, mask, nothing)
        self._num_shared = len(token_ids)

    def is_computed(self, node: int) -> bool:
        """Tell whether the engine holds the node's row and law; an absorbing node needs neither."""
        return node in self._laws or self._forest.is_absorbing[node]

    def law(self, node: int) -> TokenLaw | None:
        """Return the law after a computed node, None for an absorbing one."""
        return None if self._forest.is_absorbing[node] else self._laws[node]

    def pending(self, nodes: list[int]) -> list[int]:
        """Return what must be computed before laws of ``nodes`` are known, parents first."""
        missing: set[int] = set()
        for start in nodes:
            node = start
            while node != NO_NODE and node not in missing and not self.is_computed(node):
                missing.add(node)
                node = self._forest.parents[node]
        return sorted(missing)

    def compute(self, nodes: list[int]) -> None:
        """Compute ``nodes`` and their pending ancestors in one engine call, if any."""
        nodes = self.pending(nodes)
        if not nodes:
            return
        forest, first_row = self._forest, self._model.num_rows
        mask = np.zeros((len(nodes), first_row + len(nodes)), dtype=np.bool_)
        mask[:, : self._num_shared] = True
        nothing = np.arange(0)
        for s, node in enumerate(nodes):
            parent = forest.parents[node]
            above = nothing if parent == NO_NODE else self._seen[parent]
            self._seen[node] = seen = np.append(above, first_row + s)
            mask[s, seen] = True
        logits = self._model.step(
            np.array([forest.tokens[node] for node in nodes]),
            np.array([forest.positions[node] for node in nodes]),
            mask,
            np.arange(len(nodes)),
        )
        if logits.shape != (len(nodes), self._model.vocab_size):
            raise ModelError(
                f"the model returned logits of shape {logits.shape}, expected "
                f"{(len(nodes), self._model.vocab_size)}: one row per entry of logit_rows"
            )
        self._laws.update(zip(nodes, self._warp.laws(logits), strict=True))

    def parents_of_pending(self, nodes: set[int]) -> set[int]:
        """Return the ancestors of ``nodes`` without which these could not be computed later."""
        needed: set[int] = set()
        for node in self.pending(sorted(nodes)):
            needed.add(node)
            needed.add(self._forest.parents[node])
        return needed - {NO_NODE}

    def prune(self, renumbered: dict[int, int]) -> None:
        """Drop all rows that no kept node sees; ``renumbered`` gives new number by old."""
        laws = {new: self._laws[old] for old, new in renumbered.items() if old in self._laws}
        seen = {new: self._seen[old] for old, new in renumbered.items() if old in self._seen}
        self._laws, self._seen = laws, seen
        if not seen:  # every beam is absorbing
            return
        num_rows = self._model.num_rows
        num_viewers = np.zeros(num_rows - self._num_shared, dtype=np.int64)
        for rows in seen.values():
            num_viewers[rows - self._num_shared] += 1
        kept = np.flatnonzero(num_viewers)
        if len(kept) < len(num_viewers):
            self._model.keep(np.concatenate([np.arange(self._num_shared), kept + self._num_shared]))
        new_row = np.cumsum(num_viewers > 0) - 1 + self._num_shared
        is_common = num_viewers[kept] == len(seen)
        num_common = len(kept) if is_common.all() else int(np.argmin(is_common))
        for node, rows in seen.items():
            seen[node] = new_row[rows - self._num_shared][num_common:]
        self._num_shared += num_common
