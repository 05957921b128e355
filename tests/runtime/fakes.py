"""A Session without an engine: its caches hold token ids, a function makes the logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.engine.graph import LOGITS
from dsbd_runtime.engine.session import EngineInputs, EngineOutputs
from dsbd_runtime.errors import DsbdError

BYTES_PER_ROW = 100


class FakeSession:
    """Records what it is asked; capacities are multiples of 64.

    Attributes:
        rows: (capacity,) int64. The token id in each cache row; -1 where nothing was written.
        calls: for each run a copy of its inputs.
        moves: for each move its source rows and first row.
    """

    def __init__(
        self, vocab_size: int, answer: Callable[[EngineInputs], None] = lambda inputs: None
    ) -> None:
        """``answer`` sees every call's inputs and may raise."""
        self._vocab_size = vocab_size
        self._answer = answer
        self.rows = np.full(64, -1, np.int64)
        self.calls: list[EngineInputs] = []
        self.moves: list[tuple[list[int], int]] = []
        self.is_closed = False

    @property
    def capacity(self) -> int:
        return len(self.rows)

    @property
    def kv_bytes(self) -> int:
        return BYTES_PER_ROW * len(self.rows)

    def reserve(self, num_rows: int, num_used: int) -> None:
        if self.is_closed:
            raise DsbdError("closed")
        capacity = max(64, -(-num_rows // 64) * 64)
        if num_used > 0 and capacity <= self.capacity:
            return
        used = self.rows[:num_used]
        self.rows = np.full(capacity, -1, np.int64)
        self.rows[:num_used] = used

    grows_at_a_cost = False
    recent = None
    sources = None
    aligner = None

    def shrink(self, num_used: int) -> None:
        self.rows = self.rows[: max(64, -(-num_used // 64) * 64)]

    def run(self, inputs: EngineInputs) -> EngineOutputs:
        """Return logits that name the row: logits[r, v] = token id of row r + v / 1000."""
        masks = {name: mask.copy() for name, mask in inputs.masks.items()}
        for mask in masks.values():
            assert mask.shape == (inputs.forward.num_new, self.capacity)
        self.calls.append(dataclasses.replace(inputs, masks=masks))
        self._answer(inputs)
        forward = inputs.forward
        self.rows[inputs.first_row : inputs.first_row + forward.num_new] = forward.token_ids
        tokens = forward.token_ids[forward.logit_rows].astype(np.float32)
        logits = tokens[:, None] + np.arange(self._vocab_size, dtype=np.float32) / 1000
        return {LOGITS: logits}

    def read_full_logits(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        raise AssertionError("an engine that returns all logits keeps none")

    def move_rows(self, src_rows: NDArray[np.int64], first_row: int) -> None:
        self.moves.append((src_rows.tolist(), first_row))
        self.rows[first_row : first_row + len(src_rows)] = self.rows[src_rows]

    def close(self) -> None:
        self.is_closed = True
