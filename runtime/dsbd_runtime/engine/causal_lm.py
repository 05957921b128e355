"""Language model over a forest of tokens: append rows, return logits, keep rows."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.features import Features
from dsbd_forward.forward import Forward, ForwardResult, Source
from dsbd_forward.logits import DenseLogits, Gather, GatheredLogits, Logits, TopLogits
from dsbd_forward.rows import NO_INTS
from dsbd_forward.spec import EngineSpec, HeadSpec, MemorySpec
from dsbd_runtime.bundle_files.manifest import ModelEntry
from dsbd_runtime.engine.forward_inputs import ForwardMasks, check_forward, check_gather, check_keep
from dsbd_runtime.engine.graph import (
    GATHER,
    GATHERED_LOGITS,
    LOGITS,
    LOGSUMEXP,
    TOP_IDS,
    TOP_LOGITS,
    empty_outputs,
    parse_num_top_logits,
    summed_outputs,
)
from dsbd_runtime.engine.session import (
    MAX_FORWARD_ROWS,
    AlignedTokens,
    EngineInputs,
    EngineOutputs,
    Session,
)
from dsbd_runtime.errors import CapacityError, InputError
from dsbd_runtime.parts.cache_entries import most_new_rows, num_ancestors
from dsbd_runtime.parts.features import check_kept_rows, check_parents
from dsbd_runtime.parts.full_logits import KeptLogits
from dsbd_runtime.parts.recent_rows import NewRows, RecentRows


def engine_spec(entry: ModelEntry) -> EngineSpec:
    """Return what a manifest says of an engine."""
    num_top_logits = parse_num_top_logits(entry.logits)
    return EngineSpec(
        vocab_size=entry.vocab_size,
        head=HeadSpec(
            num_top_logits=num_top_logits,
            keeps_full_logits=num_top_logits > 0 and entry.kept_output is not None,
            gathers_logits=entry.logits == GATHER,
        ),
        returns_features=entry.features is not None and not entry.is_feature_draft,
        reads_features=entry.is_feature_draft,
        reads_source=entry.encoder is not None,
        joins_sources=entry.encoder is not None,
        memory=MemorySpec(
            kept=frozenset(cache.kind for cache in entry.caches), grows_in_steps=True
        ),
    )


class CausalLM:
    """One engine as decoding calls it; a context manager that closes its session.

    The cache is a list of rows. ``forward`` appends rows, ``keep`` drops some; either leaves the
    rows valid when it raises.

    Attributes:
        spec: what the engine is.
        num_rows: rows now in the cache.
    """

    def __init__(self, session: Session, entry: ModelEntry) -> None:
        self._session = session
        spec = engine_spec(entry)
        known = dataclasses.replace(spec.memory, grows_at_a_cost=session.grows_at_a_cost)
        self.spec = dataclasses.replace(spec, memory=known)
        # Without a gather the rows of its engine are read whole, call by call.
        gathers = self.spec.head.gathers_logits
        self._read_head = summed_outputs(entry.vocab_size) if gathers else entry.head
        self._head = entry.head
        self._full: KeptLogits | None = None
        self._context_length = entry.context_length
        self._masks = ForwardMasks(entry.masks, entry.sliding_window, MAX_FORWARD_ROWS)
        memory = session.recent
        self._recent = None if memory is None else RecentRows(memory, num_ancestors(entry.caches))
        self._reads_positions = entry.encoder is not None and entry.encoder.reads_positions
        self._most_new_rows = most_new_rows(entry.caches, MAX_FORWARD_ROWS)
        self.num_rows = 0
        # (capacity,); the first num_rows are valid
        self._row_positions = np.zeros(session.capacity, np.int64)
        self._kv_bytes_peak = session.kv_bytes
        self._grows_in_calls = memory is not None or self.spec.reads_source

    @property
    def context_length(self) -> int:
        """Number of positions; the highest position is one less."""
        return self._context_length

    @property
    def num_free_rows(self) -> int:
        """See SteppedEngine."""
        return len(self._row_positions) - self.num_rows

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

    def forward(self, forward: Forward) -> ForwardResult:
        """Append the rows of a forward; return the logits of some of them, and features.

        More than ``MAX_FORWARD_ROWS`` rows, or than the engine takes, go in several calls: no mask
        of S x capacity is built. So do rows of more sources than fit the memory at a time.
        The arrays of the result are the caller's own, but for ``Logits.full``.

        Raises InputError for a wrong shape, type or value, or where the engine has not what is
        wanted; CapacityError for a position beyond the context or caches beyond the memory.
        """
        check_forward(
            forward,
            num_rows=self.num_rows,
            vocab_size=self.spec.vocab_size,
            context_length=self._context_length,
        )
        if forward.gather is not None:
            self._check_gather(forward, forward.gather)
        forward = self._with_features(forward)
        features = None
        if forward.feature_rows is not None:
            features = self._session.new_features(len(forward.feature_rows))
        logits = self._logits(forward, self._run_all(forward, features))
        reading = self._session.take_reading() if self.spec.reads_source else None
        return ForwardResult(logits, features, reading=reading)

    def _with_features(self, forward: Forward) -> Forward:
        """Return a forward whose ``feature_rows`` say what the engine returns, None without any."""
        parents, rows = forward.parent_features, forward.feature_rows
        if self.spec.reads_features:
            if parents is None:
                raise InputError(
                    "the engine is a feature draft's, and each of its rows needs the feature of "
                    "its parent; give the forward parent_features"
                )
            if rows is not None:
                raise InputError(
                    "feature_rows are given, but a feature draft's engine returns the features of "
                    "all rows; leave them out"
                )
            check_parents(parents, forward.num_new, self._session.feature_kind)
            return dataclasses.replace(forward, feature_rows=np.arange(forward.num_new))
        if parents is not None:
            raise InputError(
                "parent_features are given, but the engine is no feature draft's; leave them out"
            )
        if self.spec.returns_features:
            if rows is None:
                return dataclasses.replace(forward, feature_rows=NO_INTS)
            check_kept_rows(rows, forward.num_new)
        elif rows is not None:
            raise InputError(
                "feature_rows are given, but the engine returns no features; export the bundle "
                "with dsbd-export --features"
            )
        return forward

    def _logits(self, forward: Forward, outputs: EngineOutputs) -> Logits:
        if forward.gather is not None:
            return GatheredLogits(outputs[GATHERED_LOGITS], outputs[LOGSUMEXP])
        if self.spec.head.num_top_logits:
            return TopLogits(outputs[TOP_IDS], outputs[TOP_LOGITS], outputs[LOGSUMEXP], self._full)
        return DenseLogits(outputs[LOGITS], outputs.get(LOGSUMEXP))

    def expect(self, num_rows: int) -> None:
        """See GrowingEngine: of an engine whose calls are recorded, the caches grow now."""
        if num_rows <= self._session.capacity:
            return
        try:
            self._reserve(num_rows, self.num_rows)
        except CapacityError:  # the request may need less, and grows as it goes
            _log.debug("no memory for the %d rows that are expected", num_rows)

    def read_source(self, source: Source) -> None:
        """See SourceReader; raises as ``forward``."""
        if self._session.sources is not None:
            self._session.sources.read(source)

    def most_sources(self, sources: Sequence[Source]) -> int:
        """Return how many of these sources are kept at a time; beyond, some are read again."""
        memory = self._session.sources
        return len(sources) if memory is None else memory.most_together(sources)

    def release_source(self, source: Source) -> None:
        """See SourceReader."""
        if self._session.sources is not None:
            self._session.sources.release(source)

    def held_source(self, source: Source) -> AbstractContextManager[None]:
        """Keep what was read of a source while requests for it come and go, one after another.

        It may be entered and left in any thread. Where the memory is short, the source is read
        again all the same.
        """
        memory = self._session.sources
        return contextlib.nullcontext() if memory is None else memory.held(source)

    def align(
        self, source: Source, prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> AlignedTokens:
        """Return how a speech model attends to a sound as it reads new tokens behind a prompt.

        The cache stays as it is. Raises as ``Aligner.align``, and InputError for an engine that has
        no graph for it.
        """
        if self._session.aligner is None:
            raise InputError(
                "the engine has no alignment graph, which tells how it attends to a sound; export "
                "a speech model's bundle again, of a checkpoint that names alignment_heads"
            )
        found = self._session.aligner.align(source, prompt_ids, token_ids)
        self._session.take_reading()  # where the source was read again: it is of no forward
        return found

    def keep(self, rows: NDArray[np.int64]) -> None:
        """Keep the cache rows ``rows``, (K,) int64 strictly increasing; drop all others.

        Rows before the first gap stay where they are: of the rows [0, 1, 4, 6] the last two move,
        to 2 and 3. Keeping nothing also shrinks the caches to their smallest size.
        """
        check_keep(rows, self.num_rows)
        num_kept = rows.shape[0]
        num_in_place = int(np.count_nonzero(rows == np.arange(num_kept)))
        self.num_rows = num_in_place  # still valid should the move fail
        if num_in_place < num_kept:
            moved = rows[num_in_place:]
            self._session.move_rows(moved, num_in_place)
            self._row_positions[num_in_place:num_kept] = self._row_positions[moved]
            self.num_rows = num_kept
        if self._recent is not None:
            self._recent.keep(rows)
        if num_kept == 0:
            self._reserve(0, 0)

    def shrink(self) -> None:
        """Free the memory that the rows in use do not need."""
        self._session.shrink(self.num_rows)
        self._fit_positions(self.num_rows)

    def close(self) -> None:
        """Release the engine and the caches; calling it again does nothing."""
        self.num_rows = 0
        if self._full is not None:
            self._full.expire()
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

    def _run_all(self, forward: Forward, features: Features | None) -> EngineOutputs:
        """Make the calls of a forward; return the outputs of its logit rows."""
        num_before, num_new = self.num_rows, len(forward.token_ids)
        if self._full is not None:
            self._full.expire()
        if not num_before or num_before + num_new > len(self._row_positions):
            self._reserve(num_before + num_new, num_before)
        if self._recent is not None:
            self._recent.truncate(num_before)
        last_start = 0
        if num_new <= self._most_new_rows and forward.sources is None:  # as a rule
            outputs = self._run(num_before, forward, features, 0)
        else:
            starts = self._call_starts(forward)
            last_start = starts[-1]
            outputs = self._run_in_chunks(forward, features, starts)
        self.num_rows = num_before + num_new
        if self.spec.head.keeps_full_logits:
            self._full = KeptLogits(self._session, forward.logit_rows, last_start)
        return outputs

    def _call_starts(self, forward: Forward) -> list[int]:
        """Return the rows of a forward with which its calls begin."""
        memory, sources = self._session.sources, forward.sources
        if memory is None or sources is None:
            return list(range(0, forward.num_new, self._most_new_rows))
        most = memory.most_together(sources.distinct)
        starts, together = [0], set[int]()
        for row, source in enumerate(sources.index.tolist()):
            is_full = row - starts[-1] == self._most_new_rows
            if is_full or (source not in together and len(together) == most):
                starts.append(row)
                together.clear()
            together.add(source)
        return starts

    def _check_gather(self, forward: Forward, gather: Gather) -> None:
        if not self.spec.head.gathers_logits:
            raise InputError(
                "a gather is given, but the engine has no gather head; leave it out, or export the "
                "bundle with --logits gather"
            )
        check_gather(gather, len(forward.logit_rows), self.spec.vocab_size)

    def _reserve(self, num_rows: int, num_used: int) -> None:
        self._session.reserve(num_rows, num_used)
        self._fit_positions(num_used)

    def _fit_positions(self, num_used: int) -> None:
        capacity = self._session.capacity
        if capacity != self._row_positions.shape[0]:
            row_positions = np.zeros(capacity, np.int64)
            row_positions[:num_used] = self._row_positions[:num_used]
            self._row_positions = row_positions
        self._kv_bytes_peak = max(self._kv_bytes_peak, self._session.kv_bytes)

    def _run_in_chunks(
        self, forward: Forward, features: Features | None, starts: list[int]
    ) -> EngineOutputs:
        head = self._read_head if forward.gather is None else self._head
        outputs = empty_outputs(head, len(forward.logit_rows), forward.num_pairs)
        first_feature = 0
        for start, stop in zip(starts, [*starts[1:], forward.num_new], strict=True):
            is_in_chunk = forward.logit_rows_in(start, stop)  # (R,)
            chunk = forward.part(start, stop)
            found = self._run(self.num_rows + start, chunk, features, first_feature)
            for name, array in found.items():
                place = is_in_chunk
                if forward.gather is not None and name == GATHERED_LOGITS:
                    place = is_in_chunk[forward.gather.rows]
                outputs[name][place] = array
            first_feature += 0 if chunk.feature_rows is None else len(chunk.feature_rows)
        return outputs

    def _run(
        self, first_row: int, forward: Forward, features: Features | None, first_feature: int
    ) -> EngineOutputs:
        if self._recent is None:
            return self._call(first_row, forward, features, first_feature, None)
        self._recent.prepare(forward)
        for again, rows in self._recent.again(forward, self._most_new_rows):
            self._reserve(first_row + again.num_new, first_row)  # behind those in use
            new = self._recent.new_rows(again, rows)
            self._call(first_row, self._without_results(again), self._no_features(), 0, new)
            self._recent.append(new)
            self._recent.prepare(forward)
        new = self._recent.new_rows(forward)
        outputs = self._call(first_row, forward, features, first_feature, new)
        self._recent.append(new)
        self._kv_bytes_peak = max(self._kv_bytes_peak, self._session.kv_bytes)
        return outputs

    def _without_results(self, forward: Forward) -> Forward:
        """Return a forward that asks for nothing, as the engine takes it."""
        return dataclasses.replace(
            forward,
            gather=Gather(NO_INTS, NO_INTS) if self.spec.head.gathers_logits else None,
            feature_rows=NO_INTS if self.spec.returns_features else None,
        )

    def _no_features(self) -> Features | None:
        return self._session.new_features(0) if self.spec.returns_features else None

    def _call(
        self,
        first_row: int,
        forward: Forward,
        features: Features | None,
        first_feature: int,
        new: NewRows | None,
    ) -> EngineOutputs:
        stop, capacity = first_row + len(forward.token_ids), len(self._row_positions)
        self._row_positions[first_row:stop] = forward.positions
        masks = self._masks.padded(forward, self._row_positions[:stop], capacity)
        reads_whole = forward.gather is None and self.spec.head.gathers_logits
        if reads_whole:
            forward = dataclasses.replace(forward, gather=Gather(NO_INTS, NO_INTS))
        recent = None if new is None else new.inputs
        positions = self._row_positions if self._reads_positions else None
        outputs = self._session.run(
            EngineInputs(forward, masks, first_row, features, first_feature, recent, positions)
        )
        if self._grows_in_calls:
            self._kv_bytes_peak = max(self._kv_bytes_peak, self._session.kv_bytes)
        if reads_whole:
            rows = np.arange(len(forward.logit_rows))
            whole = self._session.read_full_logits(rows)
            return {LOGITS: whole, LOGSUMEXP: outputs[LOGSUMEXP]}
        return outputs


_log = logging.getLogger(__name__)
