"""The model as the algorithm sees it: append rows to a cache, get logits, keep some rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray


class FullLogits(Protocol):
    """All logits of the R rows of a forward, which stay with the engine until they are read."""

    @property
    def first_row(self) -> int:
        """First of the R rows that can be read, R if none can."""

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return a copy of the logits of some rows, (n, vocab_size) float32.

        rows: (n,) int64, ``first_row`` to R - 1, in any order, also repeated.

        Valid until the model's next forward or its end; raises after that.
        """


TopLogits = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32], FullLogits | None]
"""What an engine with a top-k head returns of R rows: (top_ids, top_logits, logsumexp, full).

top_ids, top_logits: (R, K), the K largest logits of each row by decreasing logit, ties by
increasing id. logsumexp: (R,), the log of the sum of exp(logit) over the whole vocabulary. full:
all logits of the rows, None where the engine does not keep them.
"""

Logits = NDArray[np.float32] | TopLogits
"""The result of a forward: all logits of R rows, (R, vocab_size), or the largest of each."""

Role = Literal["target", "draft"]


class RowCache(Protocol):
    """A key/value cache of rows, as the forest keeps book of it."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""

    @property
    def num_rows(self) -> int:
        """Rows now in the cache."""

    def keep(self, rows: NDArray[np.int64]) -> None:
        """Keep these cache rows, (K,) int64 increasing, in this order; drop all others."""


class StepModel(RowCache, Protocol):
    """A language model with a key/value cache of rows.

    A model whose ``forward`` returns ``TopLogits`` has a further attribute, ``num_top_logits``: K.
    """

    def forward(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        mask: NDArray[np.bool_],
        logit_rows: NDArray[np.int64],
    ) -> Logits:
        """Append S rows (parents before children) and return the logits of some of them.

        Args:
            token_ids: (S,) int64.
            positions: (S,) int64. Siblings share a position.
            mask: (S, num_rows + S) bool. Row s sees cache row c; its own column is included.
            logit_rows: (R,) int64. Which of the S rows need logits; may be empty.

        Returns:
            (R, vocab_size) float32, or ``TopLogits`` of R rows.
        """


def num_top_logits(model: RowCache) -> int:
    """Return K of a model that returns the K largest logits of a row, 0 of one that returns all."""
    number: int = getattr(model, "num_top_logits", 0)
    return number


Clock = Callable[[], float]


class Meter:
    """Counts the engine calls and rows of a request and their time, that of cache moves included.

    Attributes:
        clock: seconds.
        calls: engine calls that the request took part in.
        rows: its own rows in them.
        seconds: of the calls; a call that several requests share counts whole for each.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self.calls = 0
        self.rows = 0
        self.seconds = 0.0

    def count(self, num_rows: int, seconds: float) -> None:
        """Count a call with ``num_rows`` rows of this request."""
        self.calls += 1
        self.rows += num_rows
        self.seconds += seconds


@dataclass(eq=False, slots=True)
class EngineCall:
    """One forward that a request needs before it can go on.

    The loop yields it and never makes it: a request alone has its calls made at once, several
    requests share theirs.

    Attributes:
        role: the engine.
        meter: of the request, for this engine.
        token_ids, positions, mask, logit_rows: the arguments of ``StepModel.forward``.
    """

    role: Role
    meter: Meter
    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    mask: NDArray[np.bool_]
    logit_rows: NDArray[np.int64]

    @property
    def is_prefill(self) -> bool:
        """Whether it computes a part of the prompt: none of its rows needs logits."""
        return not len(self.logit_rows)

    def run(self, model: StepModel) -> Logits:
        """Make the call, for this request alone."""
        meter = self.meter
        began = meter.clock()
        logits = model.forward(self.token_ids, self.positions, self.mask, self.logit_rows)
        meter.count(len(self.token_ids), meter.clock() - began)
        return logits


Result = TypeVar("Result")
EngineCalls = Generator[EngineCall, Logits, Result]
"""A computation that needs engine calls on its way to a result: each is answered by its logits."""
