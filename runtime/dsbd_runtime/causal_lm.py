"""Language model over a forest of tokens: append rows, return logits, keep rows."""

from __future__ import annotations

from types import TracebackType
from typing import overload

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.errors import InputError
from dsbd_runtime.features import (
    Features,
    ForwardFeatures,
    ParentFeatures,
    check_kept_rows,
    check_parents,
)
from dsbd_runtime.forward_inputs import (
    ForwardInputs,
    ForwardMasks,
    check_forward,
    check_gather,
    check_keep,
)
from dsbd_runtime.full_logits import KeptLogits
from dsbd_runtime.graph import (
    GATHER,
    GATHERED_LOGITS,
    LOGITS,
    LOGSUMEXP,
    TOP_IDS,
    TOP_LOGITS,
    Gather,
    GatheredLogits,
    SummedLogits,
    TopLogits,
    empty_outputs,
    parse_num_top_logits,
    summed_outputs,
)
from dsbd_runtime.manifest import ModelEntry
from dsbd_runtime.session import MAX_FORWARD_ROWS, EngineInputs, EngineOutputs, Session


class CausalLM:
    """One engine as decoding calls it; a context manager that closes its session.

    The cache is a list of rows. ``forward`` appends rows, ``keep`` drops some; either leaves the
    rows valid when it raises, and ``num_rows`` says how many.
    """

    def __init__(self, session: Session, entry: ModelEntry) -> None:
        self._session = session
        self._vocab_size = entry.vocab_size
        self._num_top_logits = parse_num_top_logits(entry.logits)
        self._gathers_logits = entry.logits == GATHER
        # Without a gather the rows of its engine are read whole, call by call.
        self._read_head = summed_outputs(entry.vocab_size) if self._gathers_logits else entry.head
        self._head = entry.head
        self._features = entry.features
        self._keeps_full_logits = self._num_top_logits > 0 and entry.kept_output is not None
        self._full: KeptLogits | None = None
        self._context_length = entry.context_length
        self._masks = ForwardMasks(entry.masks, entry.sliding_window, MAX_FORWARD_ROWS)
        self._num_rows = 0
        self._row_positions = np.empty(0, np.int64)  # (capacity,); the first num_rows are valid
        self._kv_bytes_peak = session.kv_bytes

    @property
    def vocab_size(self) -> int:
        """Number of tokens, and of logits a row."""
        return self._vocab_size

    @property
    def num_top_logits(self) -> int:
        """K of an engine with a top-k head; 0 where ``forward`` returns all logits."""
        return self._num_top_logits

    @property
    def gathers_logits(self) -> bool:
        """Whether ``forward`` takes a ``gather``."""
        return self._gathers_logits

    @property
    def keeps_full_logits(self) -> bool:
        """Whether all logits of a forward of an engine with a top-k head can be read."""
        return self._keeps_full_logits

    @property
    def returns_features(self) -> bool:
        """Whether it has ``forward_with_features``: the engine of a target with features."""
        return self._features is not None and not self.reads_features

    @property
    def reads_features(self) -> bool:
        """Whether it has ``forward_from_features`` alone: the engine of a feature draft."""
        return self._features is not None and self._features.own_width is not None

    @property
    def context_length(self) -> int:
        """Number of positions; the highest position is one less."""
        return self._context_length

    @property
    def num_rows(self) -> int:
        """Rows now in the cache."""
        return self._num_rows

    @property
    def kv_bytes(self) -> int:
        """Bytes that the key/value caches take now."""
        return self._session.kv_bytes

    @property
    def kv_bytes_peak(self) -> int:
        """Highest ``kv_bytes`` since the start or ``reset_peak``."""
        return self._kv_bytes_peak

    def reset_peak(self) -> None:
        """Let ``kv_bytes_peak`` start again at ``kv_bytes``."""
        self._kv_bytes_peak = self._session.kv_bytes

    @overload
    def forward(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        mask: NDArray[np.bool_],
        logit_rows: NDArray[np.int64],
    ) -> NDArray[np.float32] | TopLogits | SummedLogits: ...

    @overload
    def forward(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        mask: NDArray[np.bool_],
        logit_rows: NDArray[np.int64],
        gather: tuple[NDArray[np.int64], NDArray[np.int64]],
    ) -> GatheredLogits: ...

    def forward(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        mask: NDArray[np.bool_],
        logit_rows: NDArray[np.int64],
        gather: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
    ) -> NDArray[np.float32] | TopLogits | GatheredLogits | SummedLogits:
        """Append S rows (parents before children) and return the logits of some of them.

        More than ``MAX_FORWARD_ROWS`` rows go in several calls: no mask of S x capacity is built.

        Args:
            token_ids: (S,) int64, S >= 1.
            positions: (S,) int64. Siblings share a position.
            mask: (S, num_rows + S) bool. Row s sees cache row c; its own column is included.
            logit_rows: (R,) int64. Which of the S rows need logits, in any order; may be empty.
            gather: of an engine with a gather head, the rows and tokens whose logits are returned,
                see ``graph.Gather``; None: all logits of the R rows.

        Returns:
            (R, vocab_size) float32; of R rows the ``TopLogits`` of an engine with a top-k head, or
            the ``SummedLogits`` of one with a gather head; or the ``GatheredLogits`` of a gather.
            The caller's own arrays, but for ``TopLogits.full``.

        Raises InputError for a wrong shape, type or value, CapacityError for a position beyond
        the context or caches beyond the memory.
        """
        if self.reads_features:
            raise InputError(
                "the engine is a feature draft's, and each of its rows needs the feature of its "
                "parent; call forward_from_features"
            )
        pairs = None if gather is None else Gather(*gather)
        features = self._returned_features(_NONE) if self._features else None
        inputs = ForwardInputs(token_ids, positions, mask, logit_rows, pairs, features)
        return self._logits(inputs)

    def forward_with_features(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        mask: NDArray[np.bool_],
        logit_rows: NDArray[np.int64],
        feature_rows: NDArray[np.int64],
        gather: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
    ) -> tuple[NDArray[np.float32] | TopLogits | GatheredLogits | SummedLogits, Features]:
        """Append rows as ``forward`` does; also return the features of some of them.

        feature_rows: (F,) int64 increasing. Which of the S rows they are.
        """
        if not self.returns_features:
            raise InputError(
                "the engine returns no features; export the bundle with dsbd-export --features"
            )
        check_kept_rows(feature_rows, len(token_ids))
        pairs = None if gather is None else Gather(*gather)
        features = self._returned_features(feature_rows)
        inputs = ForwardInputs(token_ids, positions, mask, logit_rows, pairs, features)
        return self._logits(inputs), features.kept

    def forward_from_features(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        mask: NDArray[np.bool_],
        logit_rows: NDArray[np.int64],
        parents: ParentFeatures,
        gather: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
    ) -> tuple[NDArray[np.float32] | TopLogits | GatheredLogits | SummedLogits, Features]:
        """Append rows as ``forward`` does; also return the own features of all of them.

        parents: where the feature of the parent of each row lies. The target's are those of the
            target of the same bundle on the same provider.
        """
        if not self.reads_features:
            raise InputError("the engine is no feature draft's; call forward")
        num_new = len(token_ids)
        check_parents(parents, num_new, self._session.feature_kind)
        pairs = None if gather is None else Gather(*gather)
        kept = self._session.new_features(num_new)
        features = ForwardFeatures(np.arange(num_new), kept, 0, parents)
        inputs = ForwardInputs(token_ids, positions, mask, logit_rows, pairs, features)
        return self._logits(inputs), kept

    def _returned_features(self, feature_rows: NDArray[np.int64]) -> ForwardFeatures:
        return ForwardFeatures(feature_rows, self._session.new_features(len(feature_rows)))

    def _logits(
        self, inputs: ForwardInputs
    ) -> NDArray[np.float32] | TopLogits | GatheredLogits | SummedLogits:
        outputs = self._forward(inputs)
        if inputs.gather is not None:
            return GatheredLogits(outputs[GATHERED_LOGITS], outputs[LOGSUMEXP])
        if self._num_top_logits:
            return TopLogits(outputs[TOP_IDS], outputs[TOP_LOGITS], outputs[LOGSUMEXP], self._full)
        logits: NDArray[np.float32] = outputs[LOGITS]
        return SummedLogits(logits, outputs[LOGSUMEXP]) if self._gathers_logits else logits

    def keep(self, rows: NDArray[np.int64]) -> None:
        """Keep the cache rows ``rows``, (K,) int64 strictly increasing; drop all others.

        Rows before the first gap stay where they are: of the rows [0, 1, 4, 6] the last two move,
        to 2 and 3. Keeping nothing also shrinks the caches to their smallest size.
        """
        check_keep(rows, self._num_rows)
        num_kept = rows.shape[0]
        num_in_place = int(np.count_nonzero(rows == np.arange(num_kept)))
        self._num_rows = num_in_place  # still valid should the move fail
        if num_in_place < num_kept:
            moved = rows[num_in_place:]
            self._session.move_rows(moved, num_in_place)
            self._row_positions[num_in_place:num_kept] = self._row_positions[moved]
            self._num_rows = num_kept
        if num_kept == 0:
            self._reserve(0)

    def shrink(self) -> None:
        """Free the memory that the rows in use do not need."""
        self._session.shrink(self._num_rows)
        self._fit_positions()

    def close(self) -> None:
        """Release the engine and the caches; calling it again does nothing."""
        self._num_rows = 0
        self._expire_full_logits()
        self._session.close()

    def __enter__(self) -> CausalLM:
        """Return the model itself."""
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the model."""
        self.close()

    def _forward(self, inputs: ForwardInputs) -> EngineOutputs:
        check_forward(
            inputs,
            num_rows=self._num_rows,
            vocab_size=self._vocab_size,
            context_length=self._context_length,
        )
        self._check_gather(inputs)
        num_new = inputs.num_new
        self._expire_full_logits()
        self._reserve(self._num_rows + num_new)
        self._row_positions[self._num_rows : self._num_rows + num_new] = inputs.positions
        if num_new <= MAX_FORWARD_ROWS:
            outputs = self._run(self._num_rows, inputs)
        else:
            outputs = self._run_in_chunks(inputs)
        self._num_rows += num_new
        if self._keeps_full_logits:
            last_start = (num_new - 1) // MAX_FORWARD_ROWS * MAX_FORWARD_ROWS
            self._full = KeptLogits(self._session, inputs.logit_rows, last_start)
        return outputs

    def _check_gather(self, inputs: ForwardInputs) -> None:
        if inputs.gather is None:
            return
        if not self._gathers_logits:
            raise InputError(
                "a gather is given, but the engine has no gather head; leave it out, or export the "
                "bundle with --logits gather"
            )
        check_gather(inputs.gather, len(inputs.logit_rows), self._vocab_size)

    def _expire_full_logits(self) -> None:
        if self._full is not None:
            self._full.expire()
            self._full = None

    def _reserve(self, num_rows: int) -> None:
        self._session.reserve(num_rows, self._num_rows)
        self._fit_positions()

    def _fit_positions(self) -> None:
        capacity = self._session.capacity
        if capacity != self._row_positions.shape[0]:
            row_positions = np.zeros(capacity, np.int64)
            row_positions[: self._num_rows] = self._row_positions[: self._num_rows]
            self._row_positions = row_positions
        self._kv_bytes_peak = max(self._kv_bytes_peak, self._session.kv_bytes)

    def _run_in_chunks(self, inputs: ForwardInputs) -> EngineOutputs:
        logit_rows = inputs.logit_rows
        head = self._read_head if inputs.gather is None else self._head
        num_pairs = 0 if inputs.gather is None else len(inputs.gather.rows)
        outputs = empty_outputs(head, logit_rows.shape[0], num_pairs)
        for start in range(0, inputs.num_new, MAX_FORWARD_ROWS):
            stop = min(start + MAX_FORWARD_ROWS, inputs.num_new)
            is_in_chunk = (start <= logit_rows) & (logit_rows < stop)  # (R,)
            chunk = inputs.chunk(start, stop, is_in_chunk)
            for name, array in self._run(self._num_rows + start, chunk).items():
                by_pair = name == GATHERED_LOGITS
                place = inputs.pairs_in_chunk(is_in_chunk) if by_pair else is_in_chunk
                outputs[name][place] = array
        return outputs

    def _run(self, first_row: int, inputs: ForwardInputs) -> EngineOutputs:
        row_positions = self._row_positions[: inputs.mask.shape[1]]
        masks = self._masks.padded(inputs, row_positions, self._session.capacity)
        ids, logit_rows = inputs.token_ids, inputs.logit_rows
        gather = inputs.gather
        if gather is None and self._gathers_logits:
            gather = Gather(_NONE, _NONE)
        outputs = self._session.run(
            EngineInputs(
                ids, inputs.positions, masks, first_row, logit_rows, gather, inputs.features
            )
        )
        if inputs.gather is None and self._gathers_logits:
            whole = self._session.read_full_logits(np.arange(len(logit_rows)))
            return {LOGITS: whole, LOGSUMEXP: outputs[LOGSUMEXP]}
        return outputs


_NONE = np.arange(0)
