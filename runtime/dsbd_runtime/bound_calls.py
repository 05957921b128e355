"""A step and a move as a device runs them: fill, copy in, call, copy out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.device import BoundCall, Device
from dsbd_runtime.packed_buffer import PackedArrays, PackedBuffer
from dsbd_runtime.session import StepInputs, StepOutputs
from dsbd_runtime.step_staging import fill_idle_move, fill_move, fill_step


@dataclass(frozen=True)
class BoundStep:
    """The model bound for S rows of which R give logits.

    Attributes:
        input_buffer, output_buffer: what holds ``inputs`` and ``outputs``; other sizes share the
            input buffer.
    """

    device: Device
    call: BoundCall
    input_buffer: PackedBuffer
    inputs: PackedArrays
    output_buffer: PackedBuffer
    outputs: PackedArrays

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Append at most S rows; return the outputs of the asked ones, at most R."""
        num_asked = inputs.logit_rows.shape[0]
        fill_step(self.inputs, inputs)
        self.input_buffer.upload(self.inputs.num_bytes)
        self.call.run()
        if num_asked:
            self.output_buffer.download(self._num_asked_bytes(num_asked))
        self.device.synchronize()
        return {name: array[:num_asked].copy() for name, array in self.outputs.on_host.items()}

    def _num_asked_bytes(self, num_asked: int) -> int:
        """Return the bytes up to the end of the asked rows of the last output."""
        last = next(reversed(self.outputs.on_host.values()))
        return self.outputs.num_bytes - last[num_asked:].nbytes


@dataclass(frozen=True)
class BoundMove:
    """The prune graph bound for K rows; ``input_buffer`` holds ``inputs``."""

    device: Device
    call: BoundCall
    input_buffer: PackedBuffer
    inputs: PackedArrays

    def warm_up(self) -> None:
        """Move every row to its own place.

        To capture a CUDA graph the first call runs more than once. A step may (it writes the same
        rows again), a move may not: the second time it would read what the first has written.
        """
        fill_idle_move(self.inputs)
        self._run()

    def run(self, src_rows: NDArray[np.int64], first_row: int) -> None:
        """Copy at most K rows to ``first_row`` and behind."""
        fill_move(self.inputs, src_rows, first_row)
        self._run()

    def _run(self) -> None:
        self.input_buffer.upload(self.inputs.num_bytes)
        self.call.run()
        self.device.synchronize()
