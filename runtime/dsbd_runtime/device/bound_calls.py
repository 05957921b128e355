"""Calls bound to device memory: caches of one capacity, and one call of the graphs per size."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.bundle_files.manifest import ModelEntry
from dsbd_runtime.device.device_binder import StagedCall
from dsbd_runtime.device.packed_buffer import (
    PackedArrays,
    PackedBuffer,
    PackedPart,
    fill_mask,
    fill_move,
    fill_padded,
    move_parts,
    packed_bytes,
)
from dsbd_runtime.device.recorded_calls import RepeatedWork
from dsbd_runtime.devices import BoundCall, Device, DeviceEngine, RecordedWork
from dsbd_runtime.parts.kv_cache import DeviceCaches
from dsbd_runtime.parts.part import BOOL, INT64

_ELEMENTS = {INT64: "int64", BOOL: "bool"}
_ELEMENT_BY_NUMPY: dict[type[np.generic], str] = {np.float32: "fp32", np.int64: "int64"}
_INPUTS, _MOVES = "inputs", "moves"  # uses of a buffer; others are by size


@dataclass(frozen=True)
class LoadedModel:
    """A model and its prune graph on a device, for forwards of at most ``max_forward_rows``.

    most_recorded: maximum number of recorded calls; 0: calls are never recorded.
    """

    device: Device
    engine: DeviceEngine
    prune_engine: DeviceEngine
    entry: ModelEntry
    max_forward_rows: int
    most_recorded: int = 0


class BoundCaches:
    """Caches of one capacity, and all calls whose addresses last as long as they do.

    Memory for the caches and the inputs of the largest forward is allocated at the start, memory
    for outputs at the first call of a size. A call is bound at the first use of its size.
    """

    def __init__(self, model: LoadedModel, capacity: int, recorded: list[RecordedWork]) -> None:
        """Allocate the memory; raise MemoryError, with nothing allocated, without room.

        recorded: the recorded calls of the session.
        """
        self._model = model
        self._recorded = recorded
        # Host arrays are integers and masks; floats are in device memory.
        self._packed = {
            name: spec
            for name, spec in model.entry.contract.inputs.items()
            if spec.type in _ELEMENTS
        }
        self._forwards: dict[tuple[int, ...], BoundForward] = {}
        self._moves: dict[int, BoundMove] = {}
        self._buffers: dict[Hashable, PackedBuffer] = {}
        self.caches = DeviceCaches(model.device, model.entry.caches, capacity)
        dims = {dim for spec in self._packed.values() for dim in spec.shape}
        most = {dim: model.max_forward_rows for dim in dims if isinstance(dim, str)}
        largest = self._input_parts({**most, "C": capacity})
        try:
            self._buffer(_INPUTS, largest)
            self._buffer(_MOVES, move_parts(capacity))
        except MemoryError:
            self.free()
            raise

    @property
    def capacity(self) -> int:
        """Rows of the caches."""
        return self.caches.capacity

    def forward(self, call: StagedCall) -> BoundForward:
        """Return the model bound for calls of a size; raise MemoryError without room."""
        size = tuple(call.sizes.values())
        if size not in self._forwards:
            self._forwards[size] = self._bind_forward(call)
        return self._forwards[size]

    def move(self, num_rows: int) -> BoundMove:
        """Return the prune graph bound for K rows, up to the capacity."""
        if num_rows not in self._moves:
            self._moves[num_rows] = self._bind_move(num_rows)
        return self._moves[num_rows]

    def free(self) -> None:
        """Release the calls, then the memory that they are bound to."""
        bound: list[BoundForward | BoundMove] = [*self._forwards.values(), *self._moves.values()]
        for each in bound:
            each.queue.free()
            each.call.release()
        self._forwards.clear()
        self._moves.clear()
        for buffer in self._buffers.values():
            buffer.free()
        self._buffers.clear()
        self.caches.free()

    def _bind_forward(self, call: StagedCall) -> BoundForward:
        input_buffer = self._buffers[_INPUTS]
        inputs = input_buffer.lay_out(self._input_parts(call.sizes))
        output_parts = tuple(
            (output.name, output.shape(call.sizes["R"]), _ELEMENT_BY_NUMPY[output.dtype])
            for output in call.outputs
        )
        output_buffer = self._buffer(output_parts, output_parts)
        outputs = output_buffer.lay_out(output_parts)
        contract = self._model.entry.contract
        read = {name: array for name, array in call.used.items() if name in contract.inputs}
        written = {name: array for name, array in call.used.items() if name in contract.outputs}
        bound = self._model.engine.bind(
            {**inputs.on_device, **read, **self.caches.inputs},
            {**outputs.on_device, **written, **self.caches.outputs},
        )

        def queue() -> None:
            input_buffer.upload(inputs.num_bytes)
            bound.run()

        return BoundForward(
            self._model.device,
            bound,
            self._repeated(queue),
            input_buffer,
            inputs,
            output_buffer,
            outputs,
        )

    def _repeated(self, work: Callable[[], None]) -> RepeatedWork:
        model = self._model
        return RepeatedWork(model.device, self._recorded, model.most_recorded, work)

    def _input_parts(self, sizes: Mapping[str, int]) -> list[PackedPart]:
        return [
            (
                name,
                tuple(sizes[dim] if isinstance(dim, str) else int(dim or 0) for dim in spec.shape),
                _ELEMENTS[spec.type],
            )
            for name, spec in self._packed.items()
        ]

    def _buffer(self, use: Hashable, parts: Sequence[PackedPart]) -> PackedBuffer:
        """Return the buffer of a use, as large as its first parts; raise MemoryError."""
        if use not in self._buffers:
            self._buffers[use] = PackedBuffer(self._model.device, packed_bytes(parts))
        return self._buffers[use]

    def _bind_move(self, num_rows: int) -> BoundMove:
        buffer = self._buffers[_MOVES]
        inputs = buffer.lay_out(move_parts(num_rows))
        call = self._model.prune_engine.bind(
            {**inputs.on_device, **self.caches.inputs}, self.caches.outputs
        )

        def queue() -> None:
            buffer.upload(inputs.num_bytes)
            call.run()

        return BoundMove(call, self._repeated(queue), buffer, inputs)


@dataclass(frozen=True)
class BoundForward:
    """The model bound for calls of one size; ``queue`` is the copies in and the call.

    Calls of other sizes share the buffers of ``inputs`` and ``outputs``.
    """

    device: Device
    call: BoundCall
    queue: RepeatedWork
    input_buffer: PackedBuffer
    inputs: PackedArrays
    output_buffer: PackedBuffer
    outputs: PackedArrays

    def run(self, call: StagedCall) -> dict[str, NDArray[Any]]:
        """Make the call; return the outputs of its logit rows."""
        self.input_buffer.begin_write()
        for name, target in self.inputs.on_host.items():
            array, padding = call.written[name]
            if array.dtype == np.bool_:
                fill_mask(target, array, call.first_row)
            else:
                fill_padded(target, array, padding)
        for work in call.befores:
            work()
        self.queue.run()
        for work in call.afters:
            work()
        num_returned = call.num_logit_rows
        if num_returned:
            last = next(reversed(self.outputs.on_host.values()))
            self.output_buffer.download(self.outputs.num_bytes - last[num_returned:].nbytes)
        self.device.synchronize()
        return {
            output.name: self.outputs.on_host[output.name][:num_returned].copy()
            for output in call.outputs
        }


@dataclass(frozen=True)
class BoundMove:
    """The prune graph bound for K rows; the next forward waits for it."""

    call: BoundCall
    queue: RepeatedWork
    input_buffer: PackedBuffer
    inputs: PackedArrays

    def run(self, src_rows: NDArray[np.int64], first_row: int) -> None:
        """Copy at most K rows to ``first_row`` and the rows after it."""
        self.input_buffer.begin_write()
        fill_move(self.inputs, src_rows, first_row)
        self.queue.run()
