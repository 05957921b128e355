"""Tables of states: engines that know a path by a state, its recent rows, and nothing else.

Folds and recomputed rows leave no mark in a number: the state is a whole number, made of the tokens
of the path in their order.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding import TableModel
from dsbd_runtime.bundle_files.manifest import ModelEntry
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.parts.attention.cache_entries import ConvolutionRows, RecurrentRows
from dsbd_runtime.parts.part import Call
from dsbd_runtime.parts.recent.recent_paths import NewRows
from dsbd_runtime.parts.recent.recent_rows import RecentEntry, RecentRows
from tests.runtime.fakes import FakeSession
from tests.runtime.tiny_graph import TinyModel

_FACTOR, _MODULUS = 1_000_003, (1 << 61) - 1
_LOST = -1  # instead of a token or state that was dropped, or never there


def after(state: int, token: int) -> int:
    """Return the state after a token."""
    assert token != _LOST and state != _LOST
    return (state * _FACTOR + token + 1) % _MODULUS


@lru_cache(maxsize=1 << 16)
def logits_after(seed: int, state: int, vocab_size: int) -> NDArray[np.float64]:
    """Return the logits of a state, at random, with a part that another seed has in common."""
    own, common = (np.random.default_rng([state, part]) for part in (seed, 0))
    return 1.5 * common.normal(size=vocab_size) + own.normal(size=vocab_size)


class StateMemory:
    """The recent rows are tokens, the states numbers."""

    def __init__(self) -> None:
        self.rows = np.full(1 << 14, _LOST)
        self.states = [0]
        self.folds: list[int] = []  # rows of each

    def reserve(self, num_rows: int, num_used: int) -> None:
        self.rows[num_used:] = _LOST

    num_bytes = 0
    bound: NewRows

    def bind(self, call: NewRows, binder: Any) -> None:
        self.bound = call

    def close(self) -> None:
        """See RecentMemory."""

    def shrink(self, num_used: int) -> None:
        self.rows[num_used:] = _LOST

    def move_rows(self, src_rows: NDArray[np.int64], first_row: int) -> None:
        self.rows[first_row : first_row + len(src_rows)] = self.rows[src_rows]
        self.rows[first_row + len(src_rows) :] = _LOST

    def reserve_checkpoints(self, number: int) -> None:
        self.states = [*self.states[:number], *[_LOST] * (number - len(self.states))]

    def fold(self, rows: NDArray[np.int64], source: int, target: int) -> None:
        state = self.states[source]
        for token in self.rows[rows].tolist():
            state = after(state, token)
        self.states[target] = state
        self.folds.append(len(rows))


class StateSession(FakeSession):
    """Logits are those of the state of each path."""

    def __init__(self, seed: int, entry: ModelEntry) -> None:
        self._seed = seed
        self.memory = StateMemory()
        caches = RecentEntry(caches=entry.caches)
        super().__init__(entry, others=(RecentRows(caches, self.memory),))

    def _logits(self, engine_call: Call) -> NDArray[np.float32]:
        """Return the logits of the states, and write the rows of the call."""
        call, forward, memory = self.memory.bound, engine_call.forward, self.memory
        memory.rows[call.first_row : call.first_row + forward.num_new] = forward.token_ids
        numbers = call.row_places // call.checkpoint_rows.shape[1] + call.first_checkpoint
        logits = []
        for row in forward.logit_rows.tolist():
            state = memory.states[numbers[row]]
            for token in memory.rows[call.mask[row].nonzero()[0]].tolist():
                state = after(state, token)
            logits.append(logits_after(self._seed, state, self._vocab_size))
        shape = len(logits), self._vocab_size
        return np.array(logits, np.float32).reshape(shape)


def state_engine(seed: int, vocab_size: int) -> CausalLM:
    """Return an engine of states."""
    recurrent = RecurrentRows(
        layer=0,
        num_heads=1,
        value_width=1,
        num_key_heads=1,
        key_width=1,
        most_new_rows=64,
        dtype="fp32",
    )
    convolution = ConvolutionRows(layer=1, width=1, num_ancestors=3, dtype="fp32")
    model = TinyModel(vocab_size=vocab_size, context_length=4096)
    entry: Any = model.entry()
    entry.caches[:] = [recurrent, convolution]
    return CausalLM(StateSession(seed, entry), entry)


def plain_table(seed: int, vocab_size: int) -> TableModel:
    """Return the same model as a table of paths."""

    def logits_of(path: tuple[int, ...]) -> NDArray[np.float64]:
        state = 0
        for token in path:
            state = after(state, token)
        return logits_after(seed, state, vocab_size)

    return TableModel(vocab_size, logits_of)
