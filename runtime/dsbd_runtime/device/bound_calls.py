"""Calls bound to device memory: caches of one capacity, and one bound call for each size.

Work of one size is queued the first two times, then replayed as one recorded unit. A forward of a
small model is hundreds of kernels, and launching them takes longer than running them; a recorded
unit (a CUDA graph) is one launch. Recording does not run the work, so no work is done twice. A
recorded unit can be replayed from any thread. In the first run the engine allocates all memory of
the call, because nothing can be allocated while work is recorded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_errors import DsbdError
from dsbd_runtime.bundle_files.manifest import ModelEntry
from dsbd_runtime.devices import (
    BoundCall,
    Device,
    DeviceEngine,
    PackedPart,
    RecordedWork,
    StagedArrays,
    Staging,
)
from dsbd_runtime.parts.attention.attention_rows import SRC_ROWS, WRITE_INDICES
from dsbd_runtime.parts.attention.kv_cache import DeviceCaches
from dsbd_runtime.parts.device_binder import StagedCall, row_bucket
from dsbd_runtime.parts.part import BOOL, INT64

_ELEMENTS = {INT64: "int64", BOOL: "bool"}
_ELEMENT_BY_NUMPY: dict[type[np.generic], str] = {np.float32: "fp32", np.int64: "int64"}
_INPUTS, _MOVES = "inputs", "moves"  # keys of buffers; buffers of outputs have their parts as key


@dataclass(frozen=True)
class LoadedModel:
    """A model and its prune graph on a device, for forwards of at most ``max_forward_rows``."""

    device: Device
    engine: DeviceEngine
    prune_engine: DeviceEngine
    entry: ModelEntry
    max_forward_rows: int
    most_recorded: int = 0  # maximum number of recorded calls
    grows_by_moves: bool = False  # whether the prune graph copies rows from other caches


class BoundCaches:
    """Caches of one capacity, and all calls that are bound to their addresses.

    Memory for the caches and the inputs of the largest forward is allocated at the start, memory
    for outputs at the first call of a size. A call is bound at the first use of its size.
    """

    def __init__(self, model: LoadedModel, capacity: int, recorded: list[RecordedWork]) -> None:
        """Allocate the memory; without room raise MemoryError, with nothing left allocated."""
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
        self._buffers: dict[Hashable, Staging] = {}
        self.caches = DeviceCaches(model.device, model.entry.caches, capacity)
        dims = {dim for spec in self._packed.values() for dim in spec.shape}
        max_sizes = {dim: model.max_forward_rows for dim in dims if isinstance(dim, str)}
        largest = self._input_parts({**max_sizes, "C": capacity})
        try:
            self._buffer(_INPUTS, largest)
            self._buffer(_MOVES, move_parts(capacity))
        except MemoryError:
            self.free()
            raise

    @property
    def capacity(self) -> int:
        return self.caches.capacity

    def forward(self, call: StagedCall) -> BoundForward:
        """Return the model bound for calls of a size; MemoryError: the device has no room."""
        size = tuple(call.sizes.values())
        if size not in self._forwards:
            self._forwards[size] = self._bind_forward(call)
            call.sets_up = True
        return self._forwards[size]

    def move(self, num_rows: int) -> BoundMove:
        """Return the prune graph bound for ``num_rows`` rows (K), at most the capacity."""
        if num_rows not in self._moves:
            self._moves[num_rows] = self._bind_move(num_rows, self.caches)
        return self._moves[num_rows]

    def take_rows(self, other: BoundCaches, num_rows: int) -> None:
        """Queue the copy of the first rows of ``other``, caches of another capacity."""
        if not self._model.grows_by_moves:
            self.caches.copy_from(other.caches, num_rows)
            return
        padded = row_bucket(num_rows, min(self.capacity, other.capacity))
        move = self._bind_move(padded, other.caches)
        move.run(np.arange(num_rows), 0)
        move.call.release()

    def free(self) -> None:
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
        outputs = self._buffer(output_parts, output_parts).lay_out(output_parts)
        contract = self._model.entry.contract
        read = {name: array for name, array in call.used.items() if name in contract.inputs}
        written = {name: array for name, array in call.used.items() if name in contract.outputs}
        bound = self._model.engine.bind(
            {**inputs.on_device, **read, **self.caches.inputs},
            {**outputs.on_device, **written, **self.caches.outputs},
        )

        def queue() -> None:
            inputs.upload()
            bound.run()

        device = self._model.device
        queue_forward = self._repeated(queue, lambda: None)  # a second run computes the same
        return BoundForward(device, bound, queue_forward, input_buffer, inputs, outputs)

    def _repeated(self, work: Callable[[], None], prepare: Callable[[], None]) -> RepeatedWork:
        model = self._model
        return RepeatedWork(model.device, self._recorded, model.most_recorded, work, prepare)

    def _input_parts(self, sizes: Mapping[str, int]) -> list[PackedPart]:
        return [
            (
                name,
                tuple(sizes[dim] if isinstance(dim, str) else int(dim or 0) for dim in spec.shape),
                _ELEMENTS[spec.type],
            )
            for name, spec in self._packed.items()
        ]

    def _buffer(self, use: Hashable, parts: Sequence[PackedPart]) -> Staging:
        """Return the buffer of a use, as large as its first parts; raise MemoryError."""
        if use not in self._buffers:
            self._buffers[use] = self._model.device.staging(parts)
        return self._buffers[use]

    def _bind_move(self, num_rows: int, source: DeviceCaches) -> BoundMove:
        buffer = self._buffers[_MOVES]
        inputs = buffer.lay_out(move_parts(num_rows))
        read = {**inputs.on_device, **self.caches.inputs}
        if self._model.grows_by_moves:
            read |= source.sources
        call = self._model.prune_engine.bind(read, self.caches.outputs)

        def queue() -> None:
            inputs.upload()
            call.run()

        def move_nothing() -> None:
            buffer.begin_write()
            fill_move(inputs, np.arange(num_rows), 0)

        return BoundMove(call, self._repeated(queue, move_nothing), buffer, inputs)


@dataclass(frozen=True)
class BoundForward:
    """The model bound for calls of one size. Other sizes share the input and output buffers."""

    device: Device
    call: BoundCall
    queue: RepeatedWork
    input_buffer: Staging
    inputs: StagedArrays
    outputs: StagedArrays

    def run(self, call: StagedCall) -> dict[str, NDArray[Any]]:
        """Make the call; return the outputs of its logit rows."""
        self.input_buffer.begin_write()
        for name, target in self.inputs.on_host.items():
            array, padding = call.written[name]
            if array.dtype == np.bool_:
                fill_mask(target, array, call.first_row)
            else:
                fill_padded(target, array, padding)
        began = time.perf_counter()
        for work in call.befores:
            work()
        num_tries = self.queue.num_tries
        self.queue.run()
        call.sets_up |= self.queue.num_tries > num_tries
        for work in call.afters:
            work()
        num_returned = call.num_logit_rows
        if num_returned:
            self.outputs.download(num_returned)
        self.device.synchronize()
        call.run_s = time.perf_counter() - began
        return {
            output.name: self.outputs.on_host[output.name][:num_returned].copy()
            for output in call.outputs
        }


@dataclass(frozen=True)
class BoundMove:
    """The prune graph bound for K rows; the next forward waits for it."""

    call: BoundCall
    queue: RepeatedWork
    input_buffer: Staging
    inputs: StagedArrays

    def run(self, src_rows: NDArray[np.int64], first_row: int) -> None:
        """Copy at most K rows to ``first_row`` and the rows after it."""
        self.input_buffer.begin_write()
        fill_move(self.inputs, src_rows, first_row)
        self.queue.run()


def move_parts(num_rows: int) -> list[PackedPart]:
    """Return the parts of the inputs of the prune graph, without caches."""
    return [(WRITE_INDICES, (1,), "int64"), (SRC_ROWS, (num_rows,), "int64")]


def fill_move(staged: StagedArrays, src_rows: NDArray[np.int64], first_row: int) -> None:
    """Write the inputs of a move; the padding copies the last source row again."""
    staged.on_host[WRITE_INDICES][0] = first_row
    fill_padded(staged.on_host[SRC_ROWS], src_rows, int(src_rows[-1]))


def fill_padded(target: NDArray[Any], array: NDArray[Any], padding: int) -> None:
    """Write an array to the beginning of a larger one, and ``padding`` to the rest."""
    target[tuple(map(slice, array.shape))] = array
    if target.shape != array.shape:
        axis = next(n for n, size in enumerate(array.shape) if size < target.shape[n])
        target[(*[slice(None)] * axis, slice(array.shape[axis], None))] = padding


def fill_mask(target: NDArray[np.bool_], mask: NDArray[np.bool_], first_row: int) -> None:
    """Write a mask (1, 1, S, C) to a larger one (1, 1, padded S, C).

    Padding rows are written to the cache after the call's own rows. They are masked there, and the
    next call overwrites them. Each padding row attends to itself: a row without visible columns may
    become NaN, and a NaN in the cache reaches every row, because masked rows are multiplied by 0,
    not skipped. Each also attends to column 0, which is in use, because ONNX Runtime on CUDA
    searches each row of a mask sequentially for the first visible column.
    """
    num_new, padded = mask.shape[2], target[0, 0]
    padding = np.arange(num_new, len(padded))
    padded[:num_new] = mask[0, 0]
    padded[num_new:] = False
    padded[num_new:, 0] = True
    padded[padding, first_row + padding] = True


MOST_RECORDED = 64
"""Maximum number of recorded units of a session; each uses kilobytes of memory per kernel."""

_MOST_TRIES = 3
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class RepeatedWork:
    """The copies and the call of one size. The arrays are the same in every run.

    prepare: writes inputs with which another run of the work changes nothing.
    """

    device: Device
    all_recorded: list[RecordedWork]  # of a session, at most ``most_recorded``
    most_recorded: int
    work: Callable[[], None]
    prepare: Callable[[], None]
    recorded: RecordedWork | None = None
    num_runs: int = 0
    num_tries: int = 0

    def run(self) -> None:
        """Queue the work once; raises the errors of its copies and its call."""
        if self.recorded is not None:
            self.recorded.run()
            return
        self.work()
        self.num_runs += 1
        has_room = len(self.all_recorded) < self.most_recorded
        if self.num_runs > 1 and self.num_tries < _MOST_TRIES and has_room:
            self._record()

    def free(self) -> None:
        if self.recorded is not None:
            self.recorded.free()
            self.all_recorded.remove(self.recorded)
            self.recorded = None

    def _record(self) -> None:
        self.num_tries += 1
        try:
            self.prepare()
            self.recorded = self.device.record(self.work)
        except (MemoryError, DsbdError) as error:  # the call goes on without a recording
            _log.debug("a call is not recorded, try %d: %s", self.num_tries, error)
        else:
            self.all_recorded.append(self.recorded)
