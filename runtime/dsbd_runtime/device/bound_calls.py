"""Calls bound to device memory: caches of one capacity, and one call of the graphs per size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Forward
from dsbd_runtime.bundle_files.manifest import ModelEntry
from dsbd_runtime.device.device import BoundCall, Device, DeviceArray, DeviceEngine
from dsbd_runtime.device.packed_buffer import (
    PackedArrays,
    PackedBuffer,
    Part,
    fill_features,
    fill_forward,
    fill_move,
    fill_pairs,
    forward_parts,
    move_parts,
    packed_bytes,
    pair_parts,
)
from dsbd_runtime.device.recorded_calls import Recorder, RepeatedWork
from dsbd_runtime.engine import graph
from dsbd_runtime.engine.session import EngineInputs, EngineOutputs
from dsbd_runtime.parts.device_features import (
    FeatureArrays,
    FeatureSizes,
    gather_rows,
    keep_returned,
    padded_index,
)
from dsbd_runtime.parts.features import ReadFeatures
from dsbd_runtime.parts.full_logits import DeviceLogits
from dsbd_runtime.parts.kv_cache import DeviceCaches

CallSize = tuple[int, int, int, FeatureSizes | None]
"""S rows, R logit rows, N pairs (0 without a gather head), and those of features."""

_ELEMENT_BY_NUMPY: dict[type[np.generic], str] = {np.float32: "fp32", np.int64: "int64"}


@dataclass(frozen=True)
class LoadedModel:
    """A model and its prune graph on a device.

    Attributes:
        entry: manifest entry of the model.
        max_forward_rows: the most rows of one forward.
        most_recorded: of the device, recorded units of work; 0: every call is queued piece by
            piece.
    """

    device: Device
    engine: DeviceEngine
    prune_engine: DeviceEngine
    entry: ModelEntry
    max_forward_rows: int
    most_recorded: int = 0


class BoundCaches:
    """Caches of one capacity, and all calls whose addresses last as long as they do.

    Memory is taken at the start for the caches and the inputs of the largest forward, and at the
    first forward of R logit rows and N pairs for their outputs; a call is bound at the first use of
    its size.
    """

    def __init__(
        self,
        model: LoadedModel,
        capacity: int,
        full: DeviceLogits | None,
        features: FeatureArrays | None,
        recorder: Recorder,
    ) -> None:
        """Take the memory; raise MemoryError, with nothing taken, when there is no room.

        Args:
            model: with its engines.
            capacity: rows of the caches.
            full: where the engine writes the logits that it keeps, None if it keeps none.
            features: where it reads and writes features, None without.
            recorder: of the calls.
        """
        self._model = model
        self._full = full
        self._features = features
        self._recorder = recorder
        self._head = model.entry.head
        self._forwards: dict[CallSize, BoundForward] = {}
        self._moves: dict[int, BoundMove] = {}
        self._output_buffers: dict[tuple[int, int], PackedBuffer] = {}
        self._pair_buffers: dict[int, PackedBuffer] = {}
        self._input_buffers: list[PackedBuffer] = []
        self.caches = DeviceCaches(model.device, model.entry.caches, capacity)
        most = model.max_forward_rows
        sizes = None if features is None else FeatureSizes(most, most, most)
        largest = self._forward_parts(most, most, sizes)
        try:
            for parts in (largest, move_parts(capacity)):
                self._input_buffers.append(PackedBuffer(model.device, packed_bytes(parts)))
        except MemoryError:
            self.free()
            raise

    @property
    def capacity(self) -> int:
        """Rows of the caches."""
        return self.caches.capacity

    def forward(self, size: CallSize) -> BoundForward:
        """Return the model bound for calls of a size; raise MemoryError without room."""
        forward = self._forwards.get(size)
        if forward is None:
            forward = self._forwards[size] = self._bind_forward(size)
        return forward

    def move(self, num_rows: int) -> BoundMove:
        """Return the prune graph bound for K rows, up to the capacity."""
        move = self._moves.get(num_rows)
        if move is None:
            move = self._moves[num_rows] = self._bind_move(num_rows)
        return move

    def free(self) -> None:
        """Release the calls, then the memory that they are bound to."""
        bound: list[BoundForward | BoundMove] = [*self._forwards.values(), *self._moves.values()]
        for each in bound:
            each.queue.free()
            each.call.release()
        self._forwards.clear()
        self._moves.clear()
        by_size = (self._output_buffers, self._pair_buffers)
        for buffer in (*self._input_buffers, *(b for each in by_size for b in each.values())):
            buffer.free()
        self._input_buffers.clear()
        self._output_buffers.clear()
        self._pair_buffers.clear()
        self.caches.free()

    def _bind_forward(self, size: CallSize) -> BoundForward:
        num_rows, num_logit_rows, num_pairs, sizes = size
        input_buffer = self._input_buffers[0]
        output_buffer = self._output_buffer(num_logit_rows, num_pairs)
        inputs = input_buffer.lay_out(self._forward_parts(num_rows, num_logit_rows, sizes))
        outputs = output_buffer.lay_out(self._output_parts(num_logit_rows, num_pairs))
        pairs = self._pairs(num_pairs) if num_pairs else None
        full = None if self._full is None else self._full.room_for(num_logit_rows)
        kept = {} if full is None else {graph.LOGITS: full}
        of_pairs = {} if pairs is None else pairs[1].on_device
        features: dict[str, DeviceArray] = {}
        if self._features is not None and sizes is not None:
            features = self._features.of(sizes)
            kept[graph.FEATURES] = features[graph.FEATURES]
        read = {name: array for name, array in features.items() if name != graph.FEATURES}
        call = self._model.engine.bind(
            {**inputs.on_device, **of_pairs, **read, **self.caches.inputs},
            {**outputs.on_device, **kept, **self.caches.outputs},
        )

        def queue() -> None:
            input_buffer.upload(inputs.num_bytes)
            if pairs is not None:
                pairs[0].upload(pairs[1].num_bytes)
            call.run()

        return BoundForward(
            self._model.device,
            call,
            RepeatedWork(self._recorder, queue),
            input_buffer,
            inputs,
            output_buffer,
            outputs,
            full,
            pairs,
            features,
        )

    def _pairs(self, num_pairs: int) -> tuple[PackedBuffer, PackedArrays]:
        """Return the memory of the inputs of a gather head."""
        parts = pair_parts(num_pairs)
        buffer = self._pair_buffers.get(num_pairs)
        if buffer is None:
            buffer = PackedBuffer(self._model.device, packed_bytes(parts))
            self._pair_buffers[num_pairs] = buffer
        return buffer, buffer.lay_out(parts)

    def _bind_move(self, num_rows: int) -> BoundMove:
        buffer = self._input_buffers[1]
        inputs = buffer.lay_out(move_parts(num_rows))
        call = self._model.prune_engine.bind(
            {**inputs.on_device, **self.caches.inputs}, self.caches.outputs
        )

        def queue() -> None:
            buffer.upload(inputs.num_bytes)
            call.run()

        return BoundMove(call, RepeatedWork(self._recorder, queue), buffer, inputs)

    def _output_buffer(self, num_logit_rows: int, num_pairs: int) -> PackedBuffer:
        size = num_logit_rows, num_pairs
        buffer = self._output_buffers.get(size)
        if buffer is None:
            num_bytes = packed_bytes(self._output_parts(*size))
            buffer = self._output_buffers[size] = PackedBuffer(self._model.device, num_bytes)
        return buffer

    def _forward_parts(
        self, num_rows: int, num_logit_rows: int, sizes: FeatureSizes | None
    ) -> list[Part]:
        features = None
        if sizes is not None:
            features = graph.FEATURE_ROWS, sizes.returned
            if self._model.entry.is_feature_draft:
                features = graph.FEATURE_INDEX, num_rows
        entry = self._model.entry
        return forward_parts(num_rows, num_logit_rows, self.capacity, entry.masks, features)

    def _output_parts(self, num_logit_rows: int, num_pairs: int) -> list[Part]:
        return [
            (
                output.name,
                (num_pairs if output.by_pair else num_logit_rows, *output.row_shape),
                _ELEMENT_BY_NUMPY[output.dtype],
            )
            for output in self._head
        ]


@dataclass(frozen=True)
class BoundForward:
    """The model bound for S rows, R of them with logits.

    Attributes:
        queue: the copies in and the call.
        input_buffer, output_buffer: memory of ``inputs`` and ``outputs``; other sizes share the
            input buffer.
        full: the full logits, which ``run`` leaves on the device; None if none are kept.
        pairs: memory and inputs of a gather head, which other sizes share; None without one.
        features: that it reads and returns, by tensor; empty without.
    """

    device: Device
    call: BoundCall
    queue: RepeatedWork
    input_buffer: PackedBuffer
    inputs: PackedArrays
    output_buffer: PackedBuffer
    outputs: PackedArrays
    full: DeviceArray | None
    pairs: tuple[PackedBuffer, PackedArrays] | None
    features: dict[str, DeviceArray]

    def run(self, inputs: EngineInputs) -> EngineOutputs:
        """Append at most S rows; return the outputs of its logit rows, at most R."""
        forward = inputs.forward
        num_returned = len(forward.logit_rows)
        self.input_buffer.begin_write()
        fill_forward(self.inputs, inputs)
        if inputs.features is not None:
            self._fill_features(forward)
        if self.pairs is not None and forward.gather is not None:
            fill_pairs(self.pairs[1], forward.gather)
        self.queue.run()
        if inputs.features is not None:
            keep_returned(self.device, inputs, self.features[graph.FEATURES])
        if num_returned:
            self.output_buffer.download(self._returned_bytes(num_returned))
        self.device.synchronize()
        return {
            name: array[
                : forward.num_pairs if name == graph.GATHERED_LOGITS else num_returned
            ].copy()
            for name, array in self.outputs.on_host.items()
        }

    def _fill_features(self, forward: Forward) -> None:
        """Write which features the call returns or reads, and queue the copies of the latter."""
        if forward.parent_features is None:
            assert forward.feature_rows is not None
            fill_features(self.inputs, forward.feature_rows, 0)
            return
        read = ReadFeatures.of(forward.parent_features)
        target, own = self.features[graph.TARGET_FEATURES], self.features[graph.OWN_FEATURES]
        gather_rows(self.device, read.target, target)
        gather_rows(self.device, read.own, own)
        fill_features(self.inputs, padded_index(read, target.shape[0]), -1)

    def _returned_bytes(self, num_returned: int) -> int:
        """Return the bytes up to the end of the returned rows of the last output."""
        last = next(reversed(self.outputs.on_host.values()))
        return self.outputs.num_bytes - last[num_returned:].nbytes


@dataclass(frozen=True)
class BoundMove:
    """The prune graph bound for K rows; ``input_buffer`` holds ``inputs``.

    The next forward waits for it.
    """

    call: BoundCall
    queue: RepeatedWork
    input_buffer: PackedBuffer
    inputs: PackedArrays

    def run(self, src_rows: NDArray[np.int64], first_row: int) -> None:
        """Copy at most K rows to ``first_row`` and behind."""
        self.input_buffer.begin_write()
        fill_move(self.inputs, src_rows, first_row)
        self.queue.run()
