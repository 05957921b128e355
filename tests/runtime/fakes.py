"""A Session without an engine: its caches hold token ids, a function makes the logits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dsbd_forward.forward import Forward
from dsbd_runtime.bundle_files.manifest import ModelEntry
from dsbd_runtime.errors import DsbdError
from dsbd_runtime.parts.attention.attention_rows import AttentionEntry, Rows
from dsbd_runtime.parts.head.head import LOGITS, Head, HeadEntry
from dsbd_runtime.parts.host_binder import HeadOutput
from dsbd_runtime.parts.part import Call, Part, TensorSpec, part_of

BYTES_PER_ROW = 100


class RecordingBinder:
    """Keeps copies of the arrays that a call reads, by name."""

    is_cleared = True

    def __init__(self) -> None:
        self.arrays: dict[str, NDArray[Any]] = {}

    def write(self, arrays: Mapping[str, NDArray[Any]], padding: int = 0) -> None:
        self.arrays |= {name: array.copy() for name, array in arrays.items()}

    def room(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        self.arrays[name] = np.empty(shape, dtype)
        return self.arrays[name]

    def returns(self, outputs: tuple[HeadOutput, ...], num_rows: int) -> None:
        pass


def described(specs: Mapping[str, TensorSpec]) -> list[Any]:
    """Return tensors as ONNX Runtime describes those of a graph with this contract."""
    found = []
    for name, spec in specs.items():
        shape = [dim if isinstance(dim, int) else None for dim in spec.shape]
        found.append(SimpleNamespace(name=name, type=spec.type, shape=shape))
    return found


@dataclass
class FakeCall:
    """One call: its forward, its first row, and its masks, (S, C) each."""

    forward: Forward
    first_row: int
    masks: dict[str, NDArray[np.bool_]]


class FakeSession:
    """Records what it is asked; capacities are multiples of 64.

    Attributes:
        token_rows: (capacity,) int64. The token id in each cache row; -1 where none was written.
        calls: every run.
        moves: for each move its source rows and first row.
    """

    grows_at_a_cost = False

    def __init__(
        self,
        entry: ModelEntry,
        answer: Callable[[FakeCall], None] = lambda call: None,
        others: tuple[Part, ...] = (),
    ) -> None:
        """``answer`` sees every call and may raise; ``others``: parts other than rows and head."""
        self._vocab_size = entry.vocab_size
        self._answer = answer
        self.token_rows = np.full(64, -1, np.int64)
        self.calls: list[FakeCall] = []
        self.moves: list[tuple[list[int], int]] = []
        self.is_closed = False
        attention = next(part for part in entry.parts if isinstance(part, AttentionEntry))
        self.rows = Rows(attention, self)
        head = HeadEntry(kind="full", vocab_size=entry.vocab_size)
        self.parts = (self.rows, *others, Head(head, None, []))

    # The caches

    @property
    def capacity(self) -> int:
        return len(self.token_rows)

    @property
    def num_bytes(self) -> int:
        return BYTES_PER_ROW * self.capacity

    def reserve(self, num_rows: int, num_used: int) -> None:
        if self.is_closed:
            raise DsbdError("closed")
        capacity = max(64, -(-num_rows // 64) * 64)
        if num_used > 0 and capacity <= self.capacity:
            return
        used = self.token_rows[:num_used]
        self.token_rows = np.full(capacity, -1, np.int64)
        self.token_rows[:num_used] = used

    def shrink(self, num_used: int) -> None:
        self.token_rows = self.token_rows[: max(64, -(-num_used // 64) * 64)]

    def bind(self, binder: Any) -> None:
        pass

    def move_rows(self, src_rows: NDArray[np.int64], first_row: int) -> None:
        self.moves.append((src_rows.tolist(), first_row))
        self.token_rows[first_row : first_row + len(src_rows)] = self.token_rows[src_rows]

    # The session

    def run(self, call: Call) -> None:
        """Return logits that name the row: logits[r, v] = token id of row r + v / 1000."""
        if self.is_closed:
            raise DsbdError("closed")
        binder = RecordingBinder()
        for part in self.parts:
            part.bind(call, binder)
        masks = {name: array[0, 0] for name, array in binder.arrays.items() if "mask" in name}
        forward = call.forward
        for mask in masks.values():
            assert mask.shape == (forward.num_new, self.capacity)
        self.calls.append(FakeCall(forward, call.first_row, masks))
        self._answer(self.calls[-1])
        self.token_rows[call.first_row : call.stop] = forward.token_ids
        part_of(self.parts, Head).collect(call, {LOGITS: self._logits(call)})

    def _logits(self, call: Call) -> NDArray[np.float32]:
        tokens = call.forward.token_ids[call.forward.logit_rows].astype(np.float32)
        return tokens[:, None] + np.arange(self._vocab_size, dtype=np.float32) / 1000

    def close(self) -> None:
        self.is_closed = True
