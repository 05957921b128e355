"""Encoder on ONNX Runtime, and the cross rows of the sources that it has read."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from dsbd_forward.forward import Source, SourceReading
from dsbd_runtime.parts.graph_check import call_error, check_graph
from dsbd_runtime.parts.source.encoder_entry import (
    HIDDEN_STATES,
    EncoderEntry,
    encoder_contract,
    encoder_input,
)

MOST_SOURCES = 256
MOST_BYTES = 2**30
"""Most sources whose cross rows are kept, and their most bytes, except for the last one.

The source that was read longest ago is dropped first. If it is needed again, it is read again.
"""


@dataclass(eq=False)
class CrossRows:
    """The cross rows of one source as the decoder's graph reads them: never written, never moved.

    values: an OrtValue (1, H, N, D) by name. num_bytes: bytes, including the hidden states.
    hidden: an OrtValue (1, N, W), the encoder's hidden states; None if no draft reads them.
    was_held: whether the source was held when the rows were kept. Once it is no longer held, it is
        not needed again.
    """

    values: dict[str, Any]
    num_bytes: int
    hidden: Any = None
    was_held: bool = False

    @property
    def num_tokens(self) -> int:
        return int(next(iter(self.values.values())).shape()[2])


class HeldSources:
    """The sources that a caller works on between its requests too; safe to use from any thread.

    A window of sound is decoded several times: first for its language, later at higher temperatures
    and for the times of its words. Between two of these requests no request has it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_holders: Counter[Source] = Counter()

    def __contains__(self, source: Source) -> bool:
        return source in self._num_holders

    @contextlib.contextmanager
    def held(self, source: Source) -> Iterator[None]:
        """Hold a source; several callers may hold it."""
        with self._lock:
            self._num_holders[source] += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_holders[source] -= 1
                if not self._num_holders[source]:
                    del self._num_holders[source]


class OrtEncoder:
    """One encoder. It reads a source again only if its cross rows are no longer kept.

    A draft may share the encoder of its target. Its graph then reads the target's hidden states.
    """

    def __init__(
        self,
        ort: ModuleType,
        path: Path,
        entry: EncoderEntry,
        open_engine: Callable[[Path], Any],
        most_bytes: int = MOST_BYTES,
        shared: OrtEncoder | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Open the graph; BundleError: it contradicts ``entry``. shared: the target's encoder."""
        self._clock = clock
        self._reading: SourceReading | None = None
        self._ort = ort
        self._path = path
        self._entry = entry
        self._most_bytes = most_bytes
        self._keeps_hidden = False
        self._shared = shared
        if shared is not None:
            shared.keep_hidden()
        self._engine: Any = open_engine(path)
        check_graph(path, encoder_contract(entry), self._engine)
        self._kept: OrderedDict[Source, CrossRows] = OrderedDict()
        self._hidden_of_taken: OrderedDict[Source, Any] = OrderedDict()
        self.held = HeldSources()
        self.num_bytes = 0

    def cross_rows(self, source: Source) -> CrossRows:
        """Return the cross rows of a source; raises as ``encoder_input``."""
        rows = self._kept.pop(source, None)
        if rows is None:
            kept = list(self._kept.items())
            self._drop(each for each, rows in kept if rows.was_held and each not in self.held)
            rows = self._read(source)
            self.num_bytes += rows.num_bytes
        self._keep(source, rows)
        return rows

    def keep_hidden(self) -> None:
        """Keep the hidden states of every source with its cross rows, for a draft."""
        self._keeps_hidden = True
        self.forget()

    def hidden_states(self, source: Source) -> Any:
        """Return a source's hidden states, an OrtValue (1, N, W), after ``keep_hidden``."""
        if source in self._hidden_of_taken:
            return self._hidden_of_taken[source]
        hidden = self.cross_rows(source).hidden
        self._reading = None  # the draft counts it as its own reading
        return hidden

    def take_reading(self) -> SourceReading | None:
        """Return the last reading of a source; None if no source was read since the last call."""
        reading, self._reading = self._reading, None
        return reading

    def take(self, source: Source) -> CrossRows:
        """Hand a source's cross rows over to the caller; its hidden states stay here."""
        rows = self.cross_rows(source)
        del self._kept[source]
        self.num_bytes -= rows.num_bytes
        if rows.hidden is not None:
            self._hidden_of_taken[source] = rows.hidden
            self.num_bytes += rows.hidden.tensor_size_in_bytes()
            self._drop_oldest()
        return rows

    def put_back(self, source: Source, rows: CrossRows) -> None:
        """Keep taken rows again: the source is held, but no request has it now."""
        if self._keeps_hidden:
            if source not in self._hidden_of_taken:
                return  # a draft would not find them
            hidden = self._hidden_of_taken.pop(source)
            self.num_bytes -= hidden.tensor_size_in_bytes()
            rows = CrossRows(rows.values, rows.num_bytes + hidden.tensor_size_in_bytes(), hidden)
        self.num_bytes += rows.num_bytes
        self._keep(source, rows)

    def limit(self, most_bytes: int) -> None:
        """Keep at most ``most_bytes`` of cross rows from now on; the last rows stay in any case."""
        self._most_bytes = most_bytes
        self._drop_oldest()

    def forget(self) -> None:
        """Drop all sources except those that are held."""
        sources = {*self._kept, *self._hidden_of_taken}
        self._drop(source for source in sources if source not in self.held)

    def close(self) -> None:
        self._engine = self._shared = None
        self._kept.clear()
        self._hidden_of_taken.clear()
        self.num_bytes = 0

    def _keep(self, source: Source, rows: CrossRows) -> None:
        rows.was_held = source in self.held
        self._kept[source] = rows
        self._drop_oldest()

    def _drop(self, sources: Iterable[Source]) -> None:
        for source in sources:
            if source in self._kept:
                self.num_bytes -= self._kept.pop(source).num_bytes
            if source in self._hidden_of_taken:
                self.num_bytes -= self._hidden_of_taken.pop(source).tensor_size_in_bytes()

    def _drop_oldest(self) -> None:
        """Drop the sources that were read longest ago until the others may be kept."""
        while len(self._hidden_of_taken) > MOST_SOURCES or (
            len(self._hidden_of_taken) > 1 and self.num_bytes > self._most_bytes
        ):
            _, hidden = self._hidden_of_taken.popitem(last=False)
            self.num_bytes -= hidden.tensor_size_in_bytes()
        while len(self._kept) > MOST_SOURCES or (
            len(self._kept) > 1 and self.num_bytes > self._most_bytes
        ):
            _, rows = self._kept.popitem(last=False)
            self.num_bytes -= rows.num_bytes

    def _read(self, source: Source) -> CrossRows:
        (name, values), began = encoder_input(self._entry, source), self._clock()
        names = [*self._entry.cross_shapes, *([HIDDEN_STATES] if self._keeps_hidden else [])]
        if self._shared is not None:
            feeds = {HIDDEN_STATES: self._shared.hidden_states(source)}
        else:
            feeds = {name: self._ort.OrtValue.ortvalue_from_numpy(values)}
        num_tokens, fixed = values.shape[-1], self._entry.fixed
        own_began = self._clock()
        try:
            values = self._engine.run_with_ort_values(names, feeds)
        except Exception as error:  # ONNX Runtime's exceptions have no other common base
            remedy = "split the source"
            unit = "tokens" if fixed is None else fixed.source_type.axes[-1]
            sizes = f"{num_tokens} {unit} of a source"
            raise call_error(self._path, sizes, error, remedy) from error
        now = self._clock()
        self._reading = SourceReading(num_tokens, now - began, now - own_began)
        num_bytes = sum(value.tensor_size_in_bytes() for value in values)
        rows = dict(zip(names, values, strict=True))
        return CrossRows(rows, num_bytes, rows.pop(HIDDEN_STATES, None))
