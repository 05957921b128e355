"""Language model over a forest of tokens: append rows, return logits, keep rows."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Forward, ForwardResult, Source
from dsbd_runtime.bundle_files.manifest import ModelEntry
from dsbd_runtime.engine.session import Session
from dsbd_runtime.errors import CapacityError, InputError
from dsbd_runtime.parts.attention.attention_rows import MAX_FORWARD_ROWS, num_in_place
from dsbd_runtime.parts.given.given_rows import GivenRows
from dsbd_runtime.parts.head.forward_checks import check_forward, check_keep
from dsbd_runtime.parts.part import Call, Part, PartT, part_of
from dsbd_runtime.parts.source.cross_slots import CrossSlots
from dsbd_runtime.parts.source.sources import Sources


class CausalLM:
    """One engine as decoding calls it; a context manager that closes its session.

    The cache is a list of ``num_rows`` rows. ``forward`` appends rows, ``keep`` drops some. If
    either raises an error, the remaining rows are valid.

    kv_bytes_peak: highest ``kv_bytes`` since the start or ``reset_peak``.
    """

    def __init__(self, session: Session, entry: ModelEntry) -> None:
        self._session = session
        self._parts = session.parts
        self._rows = session.rows
        spec = entry.spec
        memory = dataclasses.replace(spec.memory, grows_at_a_cost=session.grows_at_a_cost)
        self.spec = dataclasses.replace(spec, memory=memory)
        self.context_length = entry.context_length
        self._splitting = [part for part in self._parts if part.splits]
        self._keeping = [part for part in self._parts if type(part).keep is not Part.keep]
        self._grows_in_calls = any(part.grows_in_calls for part in self._parts)
        read = {name for part in self._parts for name in part.reads}
        self._unread = {
            name: sentence for name, sentence in Part.sentences.items() if name not in read
        }
        self.num_rows = 0
        self.kv_bytes_peak = self.kv_bytes

    @property
    def num_free_rows(self) -> int:
        return self._rows.capacity - self.num_rows

    @property
    def kv_bytes(self) -> int:
        """Bytes of the key/value caches and of all other rows of the parts."""
        return sum(part.num_bytes for part in self._parts)

    def reset_peak(self) -> None:
        self.kv_bytes_peak = self.kv_bytes

    def part(self, kind: type[PartT]) -> PartT:
        return part_of(self._parts, kind)

    def parts_of(self, kind: type[PartT]) -> list[PartT]:
        return [part for part in self._parts if isinstance(part, kind)]

    def forward(self, forward: Forward) -> ForwardResult:
        """Append the rows of a forward; return the logits of some of them, and its other results.

        More than ``MAX_FORWARD_ROWS`` rows, or more than the engine supports, need several calls,
        so that no mask of S x capacity is built. The caller owns the arrays of the result, except
        ``Logits.full``.

        InputError: a shape, type or value is wrong, or the engine lacks something that the forward
        needs. CapacityError: a position is beyond the context, or there is no memory for the
        caches.
        """
        num_before = self.num_rows
        check_forward(
            forward,
            num_rows=num_before,
            vocab_size=self.spec.vocab_size,
            context_length=self.context_length,
        )
        for name, sentence in self._unread.items():
            if getattr(forward, name) is not None:
                raise InputError(sentence)
        whole = Call(forward, num_before)
        if not num_before or whole.stop > self._rows.capacity:
            self._reserve(whole.stop, num_before)
        if whole.num_new <= MAX_FORWARD_ROWS and not self._splitting:  # usually
            self._session.run(whole)
            if self._grows_in_calls:
                self._note_bytes()
        else:
            self._run_in_calls(whole)
        self.num_rows = whole.stop
        return ForwardResult(**whole.returned)

    def _run_in_calls(self, whole: Call) -> None:
        calls: Iterator[Call] = whole.chunks(MAX_FORWARD_ROWS)
        for part in self._splitting:
            calls = chain.from_iterable(map(part.calls, calls))
        for call in calls:
            if call.stop > self._rows.capacity:  # rows that are computed again
                self._reserve(call.stop, call.first_row)
            self._session.run(call)
            if self._grows_in_calls:
                self._note_bytes()

    def expect(self, num_rows: int) -> None:
        """See GrowingEngine: the caches of an engine with recorded calls grow now."""
        if num_rows <= self._rows.capacity:
            return
        try:
            self._reserve(num_rows, self.num_rows)
        except CapacityError:  # the request may need fewer rows; the caches grow later
            _log.debug("no memory for the %d rows that are expected", num_rows)

    def keep(self, rows: NDArray[np.int64]) -> None:
        """Keep the cache rows ``rows``, (K,) int64 strictly increasing; drop all others.

        Rows before the first gap stay in place: with rows [0, 1, 4, 6] only the last two move, to 2
        and 3. Keeping no rows also shrinks the caches to their smallest size.
        """
        check_keep(rows, self.num_rows)
        try:
            for part in self._keeping:
                part.keep(rows)
        except BaseException:
            self.num_rows = num_in_place(rows)  # these are still valid
            raise
        self.num_rows = len(rows)
        if not self.num_rows:
            self._reserve(0, 0)

    def shrink(self) -> None:
        self._rows.shrink(self.num_rows)
        self._note_bytes()

    def close(self) -> None:
        """Release the engine and the caches; calling it again does nothing."""
        self._session.close()

    def __enter__(self) -> CausalLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reserve(self, num_rows: int, num_used: int) -> None:
        for part in self._parts:
            part.reserve(num_rows, num_used)
        self._note_bytes()

    def _note_bytes(self) -> None:
        self.kv_bytes_peak = max(self.kv_bytes_peak, self.kv_bytes)


class SourceReadingLM(CausalLM):
    """An engine whose forwards may have rows of several sources: a ``SourceReader``."""

    def read_source(self, source: Source) -> None:
        """See SourceReader; raises the errors of ``forward``."""
        for memory in self._memories:
            memory.read(source)

    def release_source(self, source: Source) -> None:
        for memory in self._memories:
            memory.release(source)

    @property
    def _memories(self) -> list[CrossSlots | GivenRows]:
        return [*(part.slots for part in self.parts_of(Sources)), *self.parts_of(GivenRows)]


def language_model(session: Session, entry: ModelEntry) -> CausalLM:
    """Return the language model of an open engine."""
    return (SourceReadingLM if entry.spec.joins_sources else CausalLM)(session, entry)


_log = logging.getLogger(__name__)
