"""Binder of host arrays to an engine's calls: arrays of unchanged size and place are bound once.

Making an OrtValue for each array of each call would be the largest overhead of a small engine.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.ort.ort_module import releasing_options
from dsbd_runtime.parts.part import HeadOutput

_MOST_BYTES = 1 << 16  # of an array that is copied; a larger one is bound where it is
_MOST_KEPT = 256  # arrays; beyond, all are dropped


class _Kept(NamedTuple):
    """Memory of one size, and the OrtValue on it."""

    array: NDArray[Any]
    value: Any


class OrtBinder:
    """Arrays that are bound for the calls of one engine of ONNX Runtime.

    Small inputs are copied into memory of their shape, small outputs out of it. Large arrays, such
    as those of long prompts and full logits, are bound directly, and so are long-lived arrays.
    """

    def __init__(self, ort: ModuleType, binding: Any, name: str) -> None:
        self.name = name
        self.is_cleared = True
        self._ort = ort
        self._binding = binding
        self._options: Any = None  # of the next call
        self._head: tuple[HeadOutput, ...] = ()
        self._kept: dict[tuple[str, tuple[int, ...]], _Kept] = {}
        self._bound: dict[str, Any] = {}  # by name: identifies the bound array

    def clear(self) -> None:
        self._binding.clear_binding_inputs()
        self._binding.clear_binding_outputs()
        self._bound.clear()
        self.is_cleared = True

    def close(self) -> None:
        """Release the engine and all memory."""
        self._binding = None
        self._kept.clear()
        self._bound.clear()

    def release_memory(self) -> None:
        self._options = releasing_options(self._ort)

    def run(self, engine: Any) -> dict[str, NDArray[Any]]:
        """Make the call; return the outputs of the head, which the next call does not change."""
        self.is_cleared = False
        engine.run_with_iobinding(self._binding, self._options)
        self._options = None
        found = {}
        for output in self._head:
            array = self._bound[output.name].array
            is_kept = array.nbytes <= _MOST_BYTES
            found[output.name] = array.copy() if is_kept else self._bound.pop(output.name).array
        return found

    def write(self, arrays: Mapping[str, NDArray[Any]], padding: int = 0) -> None:
        for name, array in arrays.items():
            kept = self._kept.get((name, array.shape))
            if kept is not None:  # usually
                kept.array[...] = array
            elif array.nbytes > _MOST_BYTES:
                kept = self._on(np.ascontiguousarray(array))
            else:
                kept = self._keep(name, array.copy())
            if self._bound.get(name) is not kept:
                self._binding.bind_ortvalue_input(name, kept.value)
                self._bound[name] = kept

    def returns(self, outputs: tuple[HeadOutput, ...], num_logit_rows: int) -> None:
        self._head = outputs
        for output in outputs:
            name, shape = output.name, output.shape(num_logit_rows)
            kept = self._kept.get((name, shape))
            if kept is None:
                array = np.empty(shape, output.dtype)
                kept = self._on(array) if array.nbytes > _MOST_BYTES else self._keep(name, array)
            if self._bound.get(name) is not kept:
                self._binding.bind_ortvalue_output(name, kept.value)
                self._bound[name] = kept

    def update(self, past: str, present: str, array: NDArray[Any]) -> None:
        memory = array.ctypes.data, array.shape  # unique as long as it is bound
        if self._bound.get(past) != memory:
            value = self.value_on(array)
            self._binding.bind_ortvalue_input(past, value)
            self._binding.bind_ortvalue_output(present, value)
            self._bound[past] = memory

    def read(self, name: str, array: NDArray[Any]) -> None:
        memory = array.ctypes.data, array.shape
        if self._bound.get(name) != memory:
            self._binding.bind_ortvalue_input(name, self.value_on(array))
            self._bound[name] = memory

    def read_values(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if self._bound.get(name) is not value:
                self._binding.bind_ortvalue_input(name, value)
                self._bound[name] = value

    def write_to(self, name: str, array: NDArray[Any]) -> None:
        self.write_value(name, self.value_on(array))

    def write_value(self, name: str, value: Any) -> None:
        if self._bound.get(name) is not value:
            self._binding.bind_ortvalue_output(name, value)
            self._bound[name] = value

    def value_on(self, array: NDArray[Any]) -> Any:
        return self._ort.OrtValue.ortvalue_from_numpy(array)

    def _keep(self, name: str, array: NDArray[Any]) -> _Kept:
        """Keep memory for the calls whose array of this name has this shape."""
        if len(self._kept) == _MOST_KEPT:
            self._kept.clear()
        kept = self._kept[name, array.shape] = self._on(array)
        return kept

    def _on(self, array: NDArray[Any]) -> _Kept:
        return _Kept(array, self.value_on(array))
