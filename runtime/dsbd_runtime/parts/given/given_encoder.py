"""Encoder on ONNX Runtime whose outputs are rows of prompts, and the cache of these rows."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import SourceReading
from dsbd_runtime.errors import EngineError, InputError
from dsbd_runtime.parts.given.given_medium import CTC_LOGITS
from dsbd_runtime.parts.given.given_prompt import GivenPiece
from dsbd_runtime.parts.graph_check import call_error, check_graph
from dsbd_runtime.parts.part import BOOL, FLOAT32, INT64, GraphContract, TensorSpec

GIVEN_EMBEDDINGS = "given_embeddings"
MOST_BYTES = 2**28
"""Most bytes of the kept rows. The least recently used pieces are dropped, the last piece never."""

_DTYPES = {FLOAT32: np.float32, INT64: np.int64, BOOL: np.bool_}


class GivenEncoder:
    """One encoder. It reads a piece again only if its rows are no longer kept.

    num_read: number of pieces that it has read. num_bytes: bytes of the rows that it keeps.
    """

    def __init__(
        self,
        ort: ModuleType,
        path: Path,
        contract: GraphContract,
        engine: Any,
        most_bytes: int = MOST_BYTES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take an open graph; BundleError: it contradicts ``contract``."""
        check_graph(path, contract, engine)
        self._ort, self._path, self._contract, self._engine = ort, path, contract, engine
        self._most_bytes, self._clock = most_bytes, clock
        self._kept: OrderedDict[bytes, _Outputs] = OrderedDict()
        self._reading: SourceReading | None = None
        self.num_read = self.num_bytes = 0

    def rows(self, piece: GivenPiece) -> NDArray[np.float32]:
        """Return the rows of a piece, (num_rows, (1 + K) W), which nobody may change.

        Sets ``piece.labels`` as well.
        InputError: the inputs are another encoder's. CapacityError: no memory. EngineError: the
        encoder failed.
        """
        if (encoded := self._kept.get(piece.digest)) is None:
            self.check(piece)
            encoded = self._kept[piece.digest] = self._read(piece)
            self.num_bytes += encoded.rows.nbytes
        self._kept.move_to_end(piece.digest)
        while self.num_bytes > self._most_bytes and len(self._kept) > 1:
            self.num_bytes -= self._kept.popitem(last=False)[1].rows.nbytes
        piece.labels = encoded.labels
        return encoded.rows

    def recall(self, piece: GivenPiece) -> None:
        """Set ``piece.labels`` if its outputs are kept.

        Its rows may be in the cache already, so that no call reads them.
        """
        if piece.labels is None and (kept := self._kept.get(piece.digest)) is not None:
            piece.labels = kept.labels

    def check(self, piece: GivenPiece) -> None:
        """Raise InputError for a piece that is not of this encoder."""
        expected = self._contract.inputs
        for name in sorted({*expected, *piece.inputs}):
            array, spec = piece.inputs.get(name), expected.get(name)
            if array is not None and spec is not None and _fits(array, spec):
                continue
            given = "missing" if array is None else f"{array.dtype} {list(array.shape)}"
            wanted = "no such input" if spec is None else f"{spec.type} {list(spec.shape)}"
            raise InputError(
                f"a given prompt has a piece whose {name} is {given}, the encoder in "
                f"{self._path.parent} expects {wanted}; make it with this bundle's front end"
            )

    def take_reading(self) -> SourceReading | None:
        """Return rows and time of the pieces read since the last call; None if none was read."""
        reading, self._reading = self._reading, None
        return reading

    def forget(self) -> None:
        self._kept.clear()
        self.num_bytes = 0

    def close(self) -> None:
        self._engine = None
        self.forget()

    def _read(self, piece: GivenPiece) -> _Outputs:
        began = self._clock()
        new_value = self._ort.OrtValue.ortvalue_from_numpy
        inputs = {name: new_value(array) for name, array in piece.inputs.items()}
        try:
            values = self._engine.run_with_ort_values([*self._contract.outputs], inputs)
        except Exception as error:  # ONNX Runtime's exceptions have no other common base
            sizes = f"a piece of {piece.num_rows} rows"
            raise call_error(self._path, sizes, error, "run fewer requests") from error
        outputs = dict(zip(self._contract.outputs, (each.numpy() for each in values), strict=True))
        rows = outputs[GIVEN_EMBEDDINGS]
        if len(rows) != piece.num_rows:
            raise EngineError(
                f"{self._path} returned {len(rows)} rows of a piece that has {piece.num_rows}; "
                "export the bundle again"
            )
        self.num_read += 1
        before = self._reading or SourceReading(0, 0.0, 0.0)
        seconds = self._clock() - began
        self._reading = SourceReading(
            before.num_tokens + len(rows), before.seconds + seconds, before.own_seconds + seconds
        )
        logits = outputs.get(CTC_LOGITS)
        return _Outputs(rows, None if logits is None else logits.argmax(axis=1))


@dataclass(frozen=True)
class _Outputs:
    """Outputs of an encoder for a piece; ``labels``: see GivenPiece."""

    rows: NDArray[np.float32]
    labels: NDArray[np.int64] | None


def _fits(array: NDArray[Any], spec: TensorSpec) -> bool:
    return (
        array.dtype == _DTYPES[spec.type]
        and array.ndim == len(spec.shape)
        and all(
            not isinstance(n, int) or n == m for n, m in zip(spec.shape, array.shape, strict=True)
        )
    )
