"""The small arrays of a call in memory that stays bound: calls of a size that returns bind nothing.

An OrtValue for each array of each call takes longer than all else around a call of a small engine.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.engine.graph import HeadOutput

_MOST_BYTES = 1 << 16  # of an array that is copied; a larger one has its own memory bound
_MOST_KEPT = 256  # arrays; of more sizes all are made again


class _Kept(NamedTuple):
    """Memory of one size, and the value that the engine reads or writes there."""

    array: NDArray[Any]
    value: Any


class HostValues:
    """What is bound for the inputs and outputs of calls that have other sizes from time to time.

    Inputs are copied into memory of their shape, outputs out of it. Large arrays, those of long
    prompts and of logits of whole vocabularies, are bound as they are.
    """

    def __init__(self, ort: ModuleType, binding: Any) -> None:
        """Take the module onnxruntime and the binding of an engine."""
        self._ort = ort
        self._binding = binding
        self._kept: dict[tuple[str, tuple[int, ...]], _Kept] = {}
        self._bound: dict[str, _Kept] = {}

    def forget_bound(self) -> None:
        """Note that the binding has been cleared."""
        self._bound.clear()

    def bind_inputs(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Let the next call read arrays by name, which stay as they are until then."""
        for name, array in arrays.items():
            kept = self._kept.get((name, array.shape))
            if kept is not None:  # as a rule
                kept.array[...] = array
            elif array.nbytes > _MOST_BYTES:
                kept = self._on(np.ascontiguousarray(array))
            else:
                kept = self._keep(name, array.copy())
            if self._bound.get(name) is not kept:
                self._binding.bind_ortvalue_input(name, kept.value)
                self._bound[name] = kept

    def bind_outputs(
        self, head: tuple[HeadOutput, ...], num_logit_rows: int, num_pairs: int
    ) -> None:
        """Let the next call write the outputs of R logit rows and N pairs."""
        for output in head:
            name, shape = output.name, output.shape(num_logit_rows, num_pairs)
            kept = self._kept.get((name, shape))
            if kept is None:
                array = np.empty(shape, output.dtype)
                kept = self._on(array) if array.nbytes > _MOST_BYTES else self._keep(name, array)
            if self._bound.get(name) is not kept:
                self._binding.bind_ortvalue_output(name, kept.value)
                self._bound[name] = kept

    def take_outputs(self, head: tuple[HeadOutput, ...]) -> dict[str, NDArray[Any]]:
        """Return what the call has written, arrays that the next one leaves as they are."""
        found = {}
        for output in head:
            array = self._bound[output.name].array
            is_kept = array.nbytes <= _MOST_BYTES
            found[output.name] = array.copy() if is_kept else self._bound.pop(output.name).array
        return found

    def _keep(self, name: str, array: NDArray[Any]) -> _Kept:
        """Keep memory for the calls whose array of this name has this shape."""
        if len(self._kept) == _MOST_KEPT:
            self._kept.clear()
        kept = self._kept[name, array.shape] = self._on(array)
        return kept

    def _on(self, array: NDArray[Any]) -> _Kept:
        """Return an array with an OrtValue on its memory, which the value keeps alive."""
        return _Kept(array, self._ort.OrtValue.ortvalue_from_numpy(array))
