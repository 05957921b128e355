"""Encoder on ONNX Runtime, and the cross rows of the sources that it has read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from numpy.typing import NDArray

from dsbd_forward.forward import Source
from dsbd_runtime.encoder_entry import EncoderEntry, encoder_input
from dsbd_runtime.errors import CapacityError, EngineError
from dsbd_runtime.graph import EncoderContract, check_graph

MOST_SOURCES = 256
MOST_BYTES = 2**30
"""Most sources whose cross rows are kept, and most bytes of all but the last: the one that was read
longest ago goes, and is computed again where it is needed after all."""

_NO_MEMORY = ("Failed to allocate memory", "bad allocation", "bad_alloc")


class CrossRows:
    """The cross rows of one source as the decoder's graph takes them: never written, never moved.

    Attributes:
        values: an OrtValue (1, H, N, D) by name.
        num_bytes: that they take.
    """

    def __init__(self, values: dict[str, Any], num_bytes: int) -> None:
        self.values = values
        self.num_bytes = num_bytes


class OrtEncoder:
    """One encoder, which reads every source once as long as its cross rows are kept."""

    def __init__(
        self,
        ort: ModuleType,
        path: Path,
        entry: EncoderEntry,
        open_engine: Callable[[Path], Any],
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """Open the graph at ``path``; a contradiction to its entry is a BundleError."""
        self._ort = ort
        self._path = path
        self._entry = entry
        self._most_bytes = most_bytes
        self._engine: Any = open_engine(path)
        check_graph(
            path, EncoderContract(entry), self._engine.get_inputs(), self._engine.get_outputs()
        )
        self._kept: OrderedDict[Source, CrossRows] = OrderedDict()
        self.num_bytes = 0

    def cross_rows(self, source: Source) -> CrossRows:
        """Return the cross rows of a source.

        Raises:
            InputError: it is none, or has tokens that the encoder does not know.
            CapacityError: it is too long, for the encoder or for the memory.
        """
        rows = self._kept.pop(source, None)
        if rows is None:
            rows = self._read(*encoder_input(self._entry, source))
            self.num_bytes += rows.num_bytes
        self._kept[source] = rows
        while len(self._kept) > MOST_SOURCES or (
            len(self._kept) > 1 and self.num_bytes > self._most_bytes
        ):
            self._drop_oldest()
        return rows

    def forget(self) -> None:
        """Drop the cross rows of all sources; of a speech model but for the last.

        A window of sound takes its time, and is decoded several times: first for its language, at
        last at higher temperatures. Requests for it need not share a row of the decoder.
        """
        num_last = 0 if self._entry.speech is None else 1
        while len(self._kept) > num_last:
            self._drop_oldest()

    def close(self) -> None:
        """Release the engine and all rows."""
        self._engine = None
        self._kept.clear()
        self.num_bytes = 0

    def _drop_oldest(self) -> None:
        _, rows = self._kept.popitem(last=False)
        self.num_bytes -= rows.num_bytes

    def _read(self, name: str, source: NDArray[Any]) -> CrossRows:
        """Return the cross rows of a source as the graph takes it, (1, N) or (1, M, F)."""
        names = list(self._entry.cross_shapes)
        feeds = {name: self._ort.OrtValue.ortvalue_from_numpy(source)}
        unit = "tokens" if self._entry.speech is None else "frames"
        try:
            values = self._engine.run_with_ort_values(names, feeds)
        except Exception as error:  # ONNX Runtime's exceptions share no base but this one
            reason = " ".join(str(error).split())
            if any(sign in reason for sign in _NO_MEMORY):
                raise CapacityError(
                    f"no memory for the {source.shape[-1]} {unit} of a source in {self._path}: "
                    f"{reason}; split the source"
                ) from error
            raise EngineError(
                f"ONNX Runtime failed in a call of {self._path} ({source.shape[-1]} {unit} of a "
                f"source): {reason}; copy the bundle or export again"
            ) from error
        num_bytes = sum(value.tensor_size_in_bytes() for value in values)
        return CrossRows(dict(zip(names, values, strict=True)), num_bytes)
