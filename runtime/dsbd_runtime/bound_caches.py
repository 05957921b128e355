"""Caches of one capacity on a device, and the graphs bound to them, one call for every size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsbd_runtime.bound_calls import BoundMove, BoundStep
from dsbd_runtime.device import Device, DeviceEngine
from dsbd_runtime.device_caches import DeviceCaches
from dsbd_runtime.head import head_outputs
from dsbd_runtime.manifest import ModelEntry
from dsbd_runtime.packed_buffer import PackedBuffer, Part, packed_bytes
from dsbd_runtime.step_staging import move_parts, step_parts

_ELEMENT_BY_NUMPY: dict[type[np.generic], str] = {np.float32: "fp32", np.int64: "int64"}


@dataclass(frozen=True)
class LoadedModel:
    """A model and its prune graph on a device.

    Attributes:
        entry: what the manifest says of the model.
        max_step_rows: the most rows of one step.
    """

    device: Device
    engine: DeviceEngine
    prune_engine: DeviceEngine
    entry: ModelEntry
    max_step_rows: int


class BoundCaches:
    """Everything whose addresses last as long as the capacity.

    Memory is taken at the start for the caches and the inputs of the largest step, and at the
    first step of R logit rows for their outputs; a call is bound at the first use of its size.
    """

    def __init__(self, model: LoadedModel, capacity: int) -> None:
        """Take the memory; raise MemoryError, with nothing taken, when there is no room."""
        self._model = model
        self._head = head_outputs(model.entry.logits, model.entry.vocab_size)
        self._steps: dict[tuple[int, int], BoundStep] = {}
        self._moves: dict[int, BoundMove] = {}
        self._output_buffers: dict[int, PackedBuffer] = {}
        self._input_buffers: list[PackedBuffer] = []
        self.caches = DeviceCaches(model.device, model.entry.kv, capacity)
        largest = self._step_parts(model.max_step_rows, model.max_step_rows)
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

    def step(self, num_rows: int, num_logit_rows: int) -> BoundStep:
        """Return the model bound for S rows and R logit rows; raise MemoryError without room."""
        step = self._steps.get((num_rows, num_logit_rows))
        if step is None:
            step = self._bind_step(num_rows, num_logit_rows)
            self._steps[num_rows, num_logit_rows] = step
        return step

    def move(self, num_rows: int) -> BoundMove:
        """Return the prune graph bound for K rows, up to the capacity."""
        move = self._moves.get(num_rows)
        if move is None:
            move = self._bind_move(num_rows)
            try:
                move.warm_up()
            except BaseException:
                move.call.release()
                raise
            self._moves[num_rows] = move
        return move

    def free(self) -> None:
        """Release the calls, then the memory that they are bound to."""
        calls = [step.call for step in self._steps.values()]
        calls += [move.call for move in self._moves.values()]
        for call in calls:
            call.release()
        self._steps.clear()
        self._moves.clear()
        for buffer in (*self._input_buffers, *self._output_buffers.values()):
            buffer.free()
        self._input_buffers.clear()
        self._output_buffers.clear()
        self.caches.free()

    def _bind_step(self, num_rows: int, num_logit_rows: int) -> BoundStep:
        input_buffer, output_buffer = self._input_buffers[0], self._output_buffer(num_logit_rows)
        inputs = input_buffer.lay_out(self._step_parts(num_rows, num_logit_rows))
        outputs = output_buffer.lay_out(self._output_parts(num_logit_rows))
        call = self._model.engine.bind(
            {**inputs.on_device, **self.caches.inputs},
            {**outputs.on_device, **self.caches.outputs},
        )
        return BoundStep(self._model.device, call, input_buffer, inputs, output_buffer, outputs)

    def _bind_move(self, num_rows: int) -> BoundMove:
        buffer = self._input_buffers[1]
        inputs = buffer.lay_out(move_parts(num_rows))
        call = self._model.prune_engine.bind(
            {**inputs.on_device, **self.caches.inputs}, self.caches.outputs
        )
        return BoundMove(self._model.device, call, buffer, inputs)

    def _output_buffer(self, num_logit_rows: int) -> PackedBuffer:
        buffer = self._output_buffers.get(num_logit_rows)
        if buffer is None:
            num_bytes = packed_bytes(self._output_parts(num_logit_rows))
            buffer = self._output_buffers[num_logit_rows] = PackedBuffer(
                self._model.device, num_bytes
            )
        return buffer

    def _step_parts(self, num_rows: int, num_logit_rows: int) -> list[Part]:
        return step_parts(num_rows, num_logit_rows, self.capacity, self._model.entry.masks)

    def _output_parts(self, num_logit_rows: int) -> list[Part]:
        return [
            (output.name, (num_logit_rows, *output.row_shape), _ELEMENT_BY_NUMPY[output.dtype])
            for output in self._head
        ]
