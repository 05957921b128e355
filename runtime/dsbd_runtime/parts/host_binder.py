"""Binder of host arrays to an engine's calls: arrays of unchanged size and place are bound once.

Making an OrtValue for each array of each call would be the largest overhead of a small engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

_MOST_BYTES = 1 << 16  # of an array that is copied; larger ones are bound
_MOST_KEPT = 256  # arrays; with more, all are dropped


@dataclass(frozen=True)
class HeadOutput:
    """One output of the head, of shape [R, *row_shape]."""

    name: str
    dtype: type[np.generic]
    row_shape: tuple[int, ...]

    def shape(self, num_logit_rows: int) -> tuple[int, ...]:
        return (num_logit_rows, *self.row_shape)


class _Kept(NamedTuple):
    """An array, and the OrtValue on its memory."""

    array: NDArray[Any]
    value: Any


def releasing_options(ort: ModuleType) -> Any:
    """Return the options of a call that releases memory which it does not need itself.

    Otherwise ONNX Runtime keeps the memory for intermediate results of the largest call, such as
    attention over all caches.
    """
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


class HostBinder:
    """Arrays that are bound for the calls of one engine of ONNX Runtime.

    Small inputs are copied into memory of their shape, small outputs out of it. Large arrays, such
    as those of long prompts and full logits, are bound directly, and so are long-lived arrays.
    """

    def __init__(self, ort: ModuleType, binding: Any, name: str) -> None:
        """name: the engine's name in errors."""
        self.name = name
        self.is_cleared = True  # no long-lived array is bound: caches have to be bound again
        self._ort = ort
        self._binding = binding
        self._options: Any = None  # options of the next call
        self._head: tuple[HeadOutput, ...] = ()
        self._kept: dict[tuple[str, tuple[int, ...]], _Kept] = {}
        self._bound: dict[str, Any] = {}  # by name: identifies the bound array

    def clear(self) -> None:
        """Unbind everything, so that memory that was bound can be freed."""
        self._binding.clear_binding_inputs()
        self._binding.clear_binding_outputs()
        self._bound.clear()
        self.is_cleared = True

    def close(self) -> None:
        self._binding = None
        self._kept.clear()
        self._bound.clear()

    def release_memory(self) -> None:
        """Let the next call release the memory that it does not need itself."""
        self._options = releasing_options(self._ort)

    def run(self, engine: Any) -> dict[str, NDArray[Any]]:
        """Make the call; return the outputs of the head, which the next call does not change."""
        self.is_cleared = False
        engine.run_with_iobinding(self._binding, self._options)
        self._options = None
        outputs = {}
        for output in self._head:
            array = self._bound[output.name].array
            is_kept = array.nbytes <= _MOST_BYTES
            outputs[output.name] = array.copy() if is_kept else self._bound.pop(output.name).array
        return outputs

    def write(self, arrays: Mapping[str, NDArray[Any]], padding: int = 0) -> None:
        """Let the call read host arrays by name; the caller leaves them unchanged until then."""
        for name, array in arrays.items():
            if array.nbytes > _MOST_BYTES:
                self._bind(name, self.value_on(np.ascontiguousarray(array)))
            else:
                self.room(name, array.shape, array.dtype)[...] = array

    def room(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an array that the call reads by name, for the caller to fill."""
        kept = self._kept.get((name, shape)) or self._new(name, np.empty(shape, dtype))
        if self._bound.get(name) is not kept.value:
            self._bind(name, kept.value)
        return kept.array

    def returns(self, outputs: tuple[HeadOutput, ...], num_logit_rows: int) -> None:
        """Have outputs copied to the host, for R logit rows."""
        self._head = outputs
        for output in outputs:
            name, shape = output.name, output.shape(num_logit_rows)
            kept = self._kept.get((name, shape)) or self._new(name, np.empty(shape, output.dtype))
            if self._bound.get(name) is not kept:
                self._binding.bind_ortvalue_output(name, kept.value)
                self._bound[name] = kept

    def update(self, past: str, present: str, array: NDArray[Any]) -> None:
        """Let calls read an array and write it in place."""
        memory = array.ctypes.data, array.shape  # unique as long as it is bound
        if self._bound.get(past) != memory:
            value = self.value_on(array)
            self._binding.bind_ortvalue_input(past, value)
            self._binding.bind_ortvalue_output(present, value)
            self._bound[past] = memory

    def read(self, name: str, array: NDArray[Any]) -> None:
        """Let calls read an array without a copy."""
        memory = array.ctypes.data, array.shape
        if self._bound.get(name) != memory:
            self._binding.bind_ortvalue_input(name, self.value_on(array))
            self._bound[name] = memory

    def read_values(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if self._bound.get(name) is not value:
                self._bind(name, value)

    def write_to(self, name: str, array: NDArray[Any]) -> None:
        self.write_value(name, self.value_on(array))

    def write_value(self, name: str, value: Any) -> None:
        if self._bound.get(name) is not value:
            self._binding.bind_ortvalue_output(name, value)
            self._bound[name] = value

    def value_on(self, array: NDArray[Any]) -> Any:
        return self._ort.OrtValue.ortvalue_from_numpy(array)

    def _bind(self, name: str, value: Any) -> None:
        self._binding.bind_ortvalue_input(name, value)
        self._bound[name] = value

    def _new(self, name: str, array: NDArray[Any]) -> _Kept:
        """Return memory for a call; small memory is kept for later calls with this shape."""
        kept = _Kept(array, self.value_on(array))
        if array.nbytes <= _MOST_BYTES:
            if len(self._kept) == _MOST_KEPT:
                self._kept.clear()
            self._kept[name, array.shape] = kept
        return kept
