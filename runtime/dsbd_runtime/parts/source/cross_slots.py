"""The cross rows of the sources of a call, side by side: a slot of one buffer for each source.

If a call has only one source, it reads the outputs of the encoder. If a call has several sources,
each source without a slot is copied to one. It keeps the slot while its request runs, and the
encoder's outputs are dropped. A call reads the slots from the first to the last of its sources
without copying them. The length of the slots is that of the longest source, rounded up to a
multiple of ``_ROUNDED``. New buffers are made for more slots, for longer slots, and for fewer slots
once most are unused.
"""

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Source
from dsbd_forward.rows import Ints
from dsbd_runtime.errors import CapacityError
from dsbd_runtime.parts.attention.kv_cache import NUMPY_DTYPES
from dsbd_runtime.parts.source.encoder_entry import EncoderEntry
from dsbd_runtime.parts.source.ort_encoder import MOST_BYTES, MOST_SOURCES, CrossRows, OrtEncoder

_ROUNDED = 16  # tokens: a slightly longer source needs no new buffers, but padding takes time
_WASTEFUL = 2  # slots this many times longer or farther apart than needed are made anew


@dataclass(frozen=True)
class CallSources:
    """Cross rows of the sources that a call of the decoder reads.

    values: an OrtValue (B, H, N, D) by name; the same object while the values are the same.
    lengths: (B,) int64. Number of tokens of each of the B sources.
    items: (n,) int64. For each source of the call, its index among the B.
    """

    values: dict[str, Any]
    lengths: Ints
    items: Ints


class CrossSlots:
    """The cross rows of the sources that calls read, in slots or as the encoder's outputs.

    A source is *live* from the first call that has it with other sources until it is released. Live
    sources keep their slots, unless the slots of one call take all the memory that is allowed. A
    *held* source is kept even if it is released, as between two requests of its holder.
    """

    def __init__(
        self,
        ort: ModuleType,
        encoder: OrtEncoder,
        entry: EncoderEntry,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """most_bytes: limit for all sources; the sources of one call are kept in any case."""
        self._ort = ort
        self._encoder = encoder
        self._entry = entry
        self._most_bytes = most_bytes
        self._clear()

    def _clear(self) -> None:
        self._buffers: dict[str, NDArray[Any]] = {}  # (slots, H, N, D) by name
        self._lengths: Ints = np.ones(0, np.int64)  # (slots,)
        self._slots: OrderedDict[Source, int] = OrderedDict()  # the last used is last
        self._released: set[Source] = set()
        self._was_released = False  # since slots were arranged
        self._range = 0, 0
        self._values: dict[str, Any] = {}  # values of the slots in this range

    @property
    def num_bytes(self) -> int:
        return self._encoder.num_bytes + self._slot_bytes

    @property
    def capacity(self) -> tuple[int, int]:
        """Slots, and tokens of each."""
        shape = next(iter(self._buffers.values())).shape if self._buffers else (0, 0, 0)
        return shape[0], shape[2]

    def most_together(self, sources: Sequence[Source]) -> int:
        """Return how many of these sources one call may have; with more, some are read again."""
        fixed, limit = self._entry.fixed, self._entry.context_length
        limit = limit if fixed is None else fixed.num_positions  # of a window's frames
        lengths = (len(source) if isinstance(source, tuple) else limit for source in sources)
        size = self._bytes_of_slot(_rounded(min(max(lengths), limit)))
        return max(1, min(MOST_SOURCES, self._most_bytes // size))

    def of_call(self, sources: Sequence[Source]) -> CallSources:
        """Return what a call of these distinct sources reads; raises as ``encoder_input``."""
        if len(sources) == 1 and sources[0] not in self._slots:
            return self.alone(sources[0])
        missing = [source for source in sources if source not in self._slots]
        self._released.difference_update(sources)
        if missing or self._was_released:
            self._arrange(sources, missing)
        for source in sources:
            self._slots.move_to_end(source)
        slots = np.array([self._slots[source] for source in sources])
        first, stop = int(slots.min()), int(slots.max()) + 1
        values = self._values_of(first, stop)
        return CallSources(values, self._lengths[first:stop], slots - first)

    def alone(self, source: Source) -> CallSources:
        """Return the same as ``of_call`` for a single source; valid until the next call."""
        item = np.zeros(1, np.int64)
        if source not in self._slots:
            rows = self._encoder.cross_rows(source)
            return CallSources(rows.values, np.array([rows.num_tokens]), item)
        slot, new_value = self._slots[source], self._ort.OrtValue.ortvalue_from_numpy
        values = {name: new_value(each[slot : slot + 1]) for name, each in self._buffers.items()}
        return CallSources(values, self._lengths[slot : slot + 1], item)

    def read(self, source: Source) -> None:
        """Read a source, unless it is kept; raises as ``of_call``."""
        if source not in self._slots:
            self._encoder.cross_rows(source)

    def release(self, source: Source) -> None:
        """Let the slot of a source be used for others; if held, the encoder may keep its rows."""
        if source in self._slots:
            self._released.add(source)
            self._was_released = True

    def held(self, source: Source) -> AbstractContextManager[None]:
        """Keep the rows of a source between requests, if the memory suffices; for any thread."""
        return self._encoder.held.held(source)

    def forget(self) -> None:
        """Drop the rows of all sources except held ones, both in slots and in the encoder."""
        held = [source for source in self._slots if source in self._encoder.held]
        if held:
            self._slots = OrderedDict((source, self._slots[source]) for source in held)
            self._released.intersection_update(held)
        else:
            self._clear()
        self._encoder.forget()
        self._encoder.limit(self._most_bytes - self._slot_bytes)

    def _arrange(self, sources: Sequence[Source], missing: Sequence[Source]) -> None:
        """Give slots to the sources of a call that have none, in buffers that fit all live ones."""
        new = {source: self._encoder.take(source) for source in missing}
        staying = [source for source in self._slots if source not in self._released]
        lengths = {source: int(self._lengths[self._slots[source]]) for source in staying}
        lengths |= {source: rows.num_tokens for source, rows in new.items()}
        others = iter([source for source in staying if source not in sources])
        while self._needed_bytes(lengths) > self._most_bytes or len(lengths) > MOST_SOURCES:
            if (oldest := next(others, None)) is None:
                break
            staying.remove(oldest)
            del lengths[oldest]
        for source in [source for source in self._slots if source not in lengths]:
            slot = self._slots.pop(source)
            if source in self._released and source in self._encoder.held:
                self._encoder.put_back(source, self._copy_of(slot))
        self._released.clear()
        self._was_released = False
        if not self._fits(lengths):
            self._move(staying, lengths)
        taken = set(self._slots.values())
        free = [slot for slot in range(len(self._lengths)) if slot not in taken]
        for (source, rows), slot in zip(new.items(), free, strict=False):
            self._slots[source] = slot
            self._lengths[slot] = rows.num_tokens
            for name, value in rows.values.items():
                buffer = self._buffers[name][slot]
                buffer[:, : rows.num_tokens] = value.numpy()[0]
                buffer[:, rows.num_tokens :] = 0
        self._encoder.limit(self._most_bytes - self._slot_bytes)

    def _fits(self, lengths: dict[Source, int]) -> bool:
        """Return whether sources of these lengths fit the slots, which are not far too many."""
        num_slots, length = self.capacity
        longest, last = max(lengths.values()), max(self._slots.values(), default=0)
        max_slots = _WASTEFUL * len(lengths)
        return (
            len(lengths) <= num_slots <= _WASTEFUL * max_slots
            and last < max_slots
            and longest <= length <= _WASTEFUL * _rounded(longest)
        )

    def _move(self, staying: Sequence[Source], lengths: dict[Source, int]) -> None:
        """Make new buffers for sources of these lengths; copy the ``staying`` ones in order."""
        length, number = _rounded(max(lengths.values())), len(lengths)
        max_slots = self._most_bytes // self._bytes_of_slot(length)
        num_slots = max(number, min(1 << (number - 1).bit_length(), max_slots))
        old_slots = [self._slots[source] for source in staying]
        new_lengths = np.ones(num_slots, np.int64)
        new_lengths[: len(staying)] = [lengths[source] for source in staying]
        try:
            for name, (dtype, num_heads, width) in self._entry.cross_shapes.items():
                shape = num_slots, num_heads, length, width
                buffer = np.zeros(shape, NUMPY_DTYPES[dtype])  # padding must be finite too
                for slot, old in enumerate(old_slots):
                    num_tokens = new_lengths[slot]
                    buffer[slot, :, :num_tokens] = self._buffers[name][old, :, :num_tokens]
                self._buffers[name] = buffer
        except MemoryError as error:  # some are new, some old: all are read again
            self._clear()
            raise CapacityError(
                f"no memory for the rows of {number} sources of up to {length} tokens: {error}; "
                "run fewer requests at a time"
            ) from error
        self._lengths = new_lengths
        self._slots = OrderedDict((source, slot) for slot, source in enumerate(staying))
        self._range = 0, 0

    def _copy_of(self, slot: int) -> CrossRows:
        """Return a copy of the rows of a slot in the form of the encoder's outputs."""
        length, new_value = self._lengths[slot], self._ort.OrtValue.ortvalue_from_numpy
        copies = {name: each[slot, None, :, :length].copy() for name, each in self._buffers.items()}
        values = {name: new_value(copy) for name, copy in copies.items()}
        return CrossRows(values, sum(copy.nbytes for copy in copies.values()))

    def _values_of(self, first: int, stop: int) -> dict[str, Any]:
        if self._range != (first, stop):
            new_value = self._ort.OrtValue.ortvalue_from_numpy
            self._values = {
                name: new_value(buffer[first:stop]) for name, buffer in self._buffers.items()
            }
            self._range = first, stop
        return self._values

    @property
    def _slot_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def _needed_bytes(self, lengths: dict[Source, int]) -> int:
        return len(lengths) * self._bytes_of_slot(_rounded(max(lengths.values())))

    def _bytes_of_slot(self, length: int) -> int:
        return length * sum(
            np.dtype(NUMPY_DTYPES[dtype]).itemsize * num_heads * width
            for dtype, num_heads, width in self._entry.cross_shapes.values()
        )


def _rounded(length: int) -> int:
    return -(-length // _ROUNDED) * _ROUNDED
