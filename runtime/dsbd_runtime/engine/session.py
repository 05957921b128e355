"""Session: the interface of CausalLM to an inference engine, implemented once per backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.features import Features
from dsbd_forward.forward import Forward, Source, SourceReading
from dsbd_forward.rows import Ints
from dsbd_runtime.bundle_files.bundle import Bundle
from dsbd_runtime.engine.providers import Placement
from dsbd_runtime.parts.kv_cache import NewRows
from dsbd_runtime.parts.recent_rows import RecentInputs, RecentMemory

MAX_FORWARD_ROWS = 256
"""The most rows of one engine call; longer forwards run in chunks."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """One engine to open; see ``loading.load_causal_lm`` for the other fields.

    Attributes:
        target: of a draft that is opened beside its target, the target's session, whose encoder it
            may share; None: it is opened alone.
        new_rows: of caches on the host: zeros, or noise for an engine that is judged, which must
            not read rows that its masks hide.
        adapt: changes options of ONNX Runtime for an engine that is judged; None: they stay.
    """

    bundle: Bundle
    role: str
    placement: Placement
    num_threads: int | None = None
    spin_us: int | None = None
    engine_cache: Path | None = None
    cuda_graphs: bool | None = None
    unfused_attention: bool = False
    target: Session | None = None
    new_rows: NewRows = np.zeros
    adapt: Callable[[Any], None] | None = None

    @property
    def records_calls(self) -> bool:
        """Whether calls of a size are recorded and replayed."""
        provider = self.placement.provider
        if self.cuda_graphs is None:
            return provider.uses_cuda_graphs
        return self.cuda_graphs and provider.has_cuda_graphs


@dataclass(slots=True)
class EngineInputs:
    """One engine call: a forward of at most ``MAX_FORWARD_ROWS`` rows, and where its results go.

    Not frozen, see ``Forward``.

    The masks may be views of a buffer that the next call reuses: a session must not keep them.

    Attributes:
        forward: the rows; its mask is in ``masks`` as the engine reads it.
        masks: by input name of the graph, (S, C) bool each; C is the capacity of the caches.
        first_row: cache row of the first of the S new rows.
        features: where the features of its F rows are put, from row ``first_feature`` on; None for
            an engine without features.
        recent: what it is told of recent rows, of an engine with some; None of any other.
        row_positions: (C,) int64, positions of all rows of the cache, for an engine that reads
            them; None for any other.
    """

    forward: Forward
    masks: dict[str, NDArray[np.bool_]]
    first_row: int
    features: Any = None
    first_feature: int = 0
    recent: RecentInputs | None = None
    row_positions: Ints | None = None


EngineOutputs = dict[str, NDArray[Any]]
"""The outputs of one engine call that are copied, by name; ``graph.head_outputs`` lists them."""


class SourceMemory(Protocol):
    """What an encoder has left of the sources that calls read."""

    def most_together(self, sources: Sequence[Source]) -> int:
        """Return how many of these sources one call may have."""

    def read(self, source: Source) -> None:
        """Read a source, unless it is kept.

        Raises:
            InputError: it is none of the encoder's.
            CapacityError: it is too long, for the encoder or for the memory.
        """

    def release(self, source: Source) -> None:
        """Let what is kept of a source go when it is in the way: no request reads it any more.

        What is kept of one that is held goes only where the memory is short.
        """

    def held(self, source: Source) -> AbstractContextManager[None]:
        """Hold a source between requests too; may be entered and left in any thread."""


@dataclass(frozen=True)
class AlignedTokens:
    """How a speech model attends to the sound as it reads a text, and what it predicts.

    With 4 prompt tokens and 3 new ones, the last of which ends the text: weights of the first 2,
    logits of all 3.

    Attributes:
        weights: (A, n - 1, N) float32. What each of the A alignment heads weighs the N positions of
            the sound, for the n new tokens but the last.
        logits: (n, V) float32. Of each new token, behind those before it.
    """

    weights: NDArray[np.float32]
    logits: NDArray[np.float32]


class Aligner(Protocol):
    """A graph that says how an engine attends to a source."""

    def align(
        self, source: Source, prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> AlignedTokens:
        """Return how the engine attends to a source as it reads new tokens behind a prompt.

        Raises:
            CapacityError: no memory, or too long a text.
            BundleError, EngineError: the graph cannot be opened, or fails.
        """


class Session(Protocol):
    """One engine together with the key/value caches that it updates in place."""

    @property
    def capacity(self) -> int:
        """Rows that the caches hold now."""

    @property
    def kv_bytes(self) -> int:
        """Bytes that the caches take now, recent rows and states of checkpoints included."""

    @property
    def recent(self) -> RecentMemory | None:
        """The recent rows of convolutions and recurrences; None without such layers."""

    @property
    def sources(self) -> SourceMemory | None:
        """What is kept of sources; None of an engine that reads none."""

    @property
    def aligner(self) -> Aligner | None:
        """What says how the engine attends to a source; None of a bundle without such a graph."""

    @property
    def feature_kind(self) -> type:
        """The class of the features that a feature draft's engine reads here."""

    def new_features(self, num_rows: int) -> Features:
        """Return room for the features of so many rows, of an engine that returns them."""

    @property
    def grows_at_a_cost(self) -> bool:
        """Whether growing the caches also gives up what was recorded for their addresses."""

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

    def take_reading(self) -> SourceReading | None:
        """Return what the last calls took to read a source, once; None where none was read."""

    def read_full_logits(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return a copy of all logits of some of the last run's R logit rows, (n, V).

        Only of an engine with a ``kept_output``. Neither ``move_rows`` nor another capacity
        changes them.
        """

    def move_rows(self, src_rows: NDArray[np.int64], first_row: int) -> None:
        """Copy the rows ``src_rows`` (K,) to ``first_row .. first_row + K - 1``, as if at once."""

    def close(self) -> None:
        """Release the engine and the caches; calling it again does nothing."""
