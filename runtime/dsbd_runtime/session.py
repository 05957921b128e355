"""Session: the interface of CausalLM to an inference engine, implemented once per backend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.bundle import Bundle
from dsbd_runtime.features import Features, ForwardFeatures
from dsbd_runtime.graph import Gather
from dsbd_runtime.providers import Placement

MAX_FORWARD_ROWS = 256
"""The most rows of one engine call; longer forwards run in chunks."""


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One engine to open; see ``loading.load_causal_lm`` for the fields."""

    bundle: Bundle
    role: str
    placement: Placement
    num_threads: int | None = None
    spin_us: int | None = None
    engine_cache: Path | None = None
    cuda_graphs: bool = False


@dataclass(frozen=True)
class EngineInputs:
    """The inputs of one engine call besides the caches.

    The masks may be views of a buffer that the next call reuses: a session must not keep them.

    Attributes:
        token_ids: (S,) int64.
        positions: (S,) int64.
        masks: by input name of the graph, (S, C) bool each; C is the capacity of the caches.
        first_row: cache row of the first of the S new rows.
        logit_rows: (R,) int64. Which of the S rows need logits.
        gather: which logits of these a gather head returns; None for an engine without one.
        features: which features the call reads, and which it leaves where; None for an engine
            without features.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    masks: dict[str, NDArray[np.bool_]]
    first_row: int
    logit_rows: NDArray[np.int64]
    gather: Gather | None = None
    features: ForwardFeatures | None = None

    @property
    def num_pairs(self) -> int:
        """N, the logits that a gather head returns."""
        return 0 if self.gather is None else len(self.gather.rows)


EngineOutputs = dict[str, NDArray[Any]]
"""The outputs of one engine call that are copied, by name; ``graph.head_outputs`` lists them."""


class Session(Protocol):
    """One engine together with the key/value caches that it updates in place."""

    @property
    def capacity(self) -> int:
        """Rows that the caches hold now."""

    @property
    def kv_bytes(self) -> int:
        """Bytes that the caches take now."""

    @property
    def feature_kind(self) -> type:
        """The class of the features that a feature draft's engine reads here."""

    def new_features(self, num_rows: int) -> Features:
        """Return room for the features of so many rows, of an engine that returns them."""

    def reserve(self, num_rows: int, num_used: int) -> None:
        """Give the caches room for at least ``num_rows`` rows and keep the first ``num_used``.

        With ``num_used`` 0 they start again: all zero, in the smallest sufficient capacity.
        Otherwise they only grow. When it raises, the used rows are as before.
        """

    def shrink(self, num_used: int) -> None:
        """Give the caches the smallest capacity for their first ``num_used`` rows, which stay."""

    def run(self, inputs: EngineInputs) -> EngineOutputs:
        """Append S rows at ``first_row``; return the outputs of the head for the R logit rows.

        A gather head returns ``gathered_logits`` for the N pairs, all else is by logit row.
        The arrays are the caller's own: the next call does not change them.
        """

    def read_full_logits(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return a copy of all logits of some of the last run's R logit rows, (n, V).

        Only of an engine with a ``kept_output``. Neither ``move_rows`` nor another capacity
        changes them.
        """

    def move_rows(self, src_rows: NDArray[np.int64], first_row: int) -> None:
        """Copy the rows ``src_rows`` (K,) to ``first_row .. first_row + K - 1``, as if at once."""

    def close(self) -> None:
        """Release the engine and the caches; calling it again does nothing."""
