"""Device of a plug-in of ONNX Runtime: its memory is values, which have no addresses.

Each array is a value. If the host reads or writes it, its numbers are on the host as well. They are
copied when the other side is newer, before a call reads the value or when the host reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.devices import DeviceArray, PackedPart
from dsbd_runtime.errors import CapacityError, EngineError
from dsbd_runtime.plugin.plugin_module import TURNS

_NUMPY_DTYPES: dict[str, type[np.generic]] = {
    "fp32": np.float32,
    "fp16": np.float16,
    "int64": np.int64,
    "bool": np.bool_,
}
_UNWRITTEN = np.float32(-1.5e38)  # in outputs before a call, and no model's number
_NOT_RECORDED = "-1"
_GRAPH = "gpu_graph_id"
_MOST_RECORDED = 32  # a recorded call keeps its memory as long as its session lives


class ValueMemory:
    """A value on the device and, once the host has used it, its numbers on the host."""

    def __init__(self, ort: ModuleType, value: Any, dtype: type[np.generic]) -> None:
        self.value = value
        self.is_host_newer = self.is_device_newer = False
        self._ort = ort
        self._dtype = dtype
        self._host: NDArray[Any] | None = None
        self._host_value: Any = None  # on the memory of ``_host``

    @property
    def numbers(self) -> NDArray[Any]:
        """The numbers on the host, for reading; copied if the device's are newer."""
        if self._host is None:
            self._host = np.zeros(self.value.shape(), self._dtype)
            self._host_value = self._ort.OrtValue.ortvalue_from_numpy(self._host)
        if self.is_device_newer:
            with TURNS:
                self._ort.copy_tensors([self.value], [self._host_value])
            self.is_device_newer = False
        return self._host

    def put(self, numbers: NDArray[Any]) -> None:
        """Write numbers to the device alone."""
        with TURNS:
            self.value.update_inplace(numbers)

    def set_zero(self) -> None:
        self.put(np.zeros(self.value.shape(), self._dtype))
        if self._host is not None:
            self._host[...] = 0
        self.is_host_newer = self.is_device_newer = False

    def upload(self) -> None:
        self.put(self.numbers)
        self.is_host_newer = False


class ValueDevice:
    """One device of a plug-in, for the graphs of one engine: a ``Device``.

    Attributes:
        num_waits: copies to the host, each of which waits for the device.
    """

    def __init__(self, ort: ModuleType, provider: str, device_id: int) -> None:
        self.name = f"{provider}:{device_id}"
        self.num_waits = 0
        self._ort = ort
        self._place = provider, device_id
        self._graph_id = _NOT_RECORDED
        self._num_recorded = 0

    def allocate(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """See Device; a value without memory is only found when it is read, so it is read once."""
        kind = _NUMPY_DTYPES[dtype]
        with TURNS:
            value = self._ort.OrtValue.ortvalue_from_shape_and_type(list(shape), kind, *self._place)
        array = DeviceArray(ValueMemory(self._ort, value, kind), shape, dtype)
        array.memory.set_zero()
        try:
            with TURNS:
                value.numpy()
        except Exception as error:  # ONNX Runtime's exceptions have no other common base
            raise MemoryError(f"{self.name}: {array.num_bytes:,} bytes: {error}") from error
        return array

    def free(self, array: DeviceArray) -> None:
        with TURNS:
            array.memory.value = None

    def staging(self, parts: Sequence[PackedPart]) -> ValueStaging:
        """See Device; a value has one shape, so layouts share only arrays of the same shape."""
        return ValueStaging(self)

    def copy_rows(
        self,
        source: DeviceArray,
        target: DeviceArray,
        num_rows: int,
        source_row: int = 0,
        target_row: int = 0,
    ) -> None:
        """See Device; the copy goes through the host."""
        rows = source.memory.numbers[..., source_row : source_row + num_rows, :]
        target.memory.numbers[..., target_row : target_row + num_rows, :] = rows
        target.memory.is_host_newer = True

    def fill_zero(self, array: DeviceArray) -> None:
        array.memory.set_zero()

    def record(self, work: Callable[[], None]) -> RecordedValues:
        """See Device: the work is run, twice. MemoryError: enough memory is in recorded work."""
        if self._num_recorded == _MOST_RECORDED:
            raise MemoryError(f"{self.name}: {_MOST_RECORDED} calls are recorded")
        self._num_recorded += 1
        recorded = RecordedValues(self, work, str(self._num_recorded))
        recorded.run()
        return recorded

    def run_recorded(self, work: Callable[[], None], graph_id: str) -> None:
        self._graph_id = graph_id
        try:
            work()
        finally:
            self._graph_id = _NOT_RECORDED

    def run_options(self) -> Any:
        """Return the options of a call, which name the recorded work that it belongs to."""
        options = self._ort.RunOptions()
        options.add_run_config_entry(_GRAPH, self._graph_id)
        return options

    def synchronize(self) -> None:
        """See Device; copies to the host have waited."""

    def close(self) -> None:
        """See Device; this device has no separate queue."""


@dataclass(frozen=True)
class RecordedValues:
    """Work whose call ONNX Runtime records when it first runs, and replays afterwards."""

    device: ValueDevice
    work: Callable[[], None]
    graph_id: str

    def run(self) -> None:
        self.device.run_recorded(self.work, self.graph_id)

    def free(self) -> None:
        """See RecordedWork; the session keeps the memory."""


class ValueStaging:
    """The small inputs or outputs of calls, an array for each name and shape: a ``Staging``."""

    def __init__(self, device: ValueDevice) -> None:
        self._device = device
        self._arrays: dict[PackedPart, DeviceArray] = {}

    def lay_out(self, parts: Sequence[PackedPart]) -> ValueArrays:
        for part in parts:
            if part not in self._arrays:
                _, shape, dtype = part
                self._arrays[part] = self._device.allocate(shape, dtype)
        return ValueArrays(self._device, {part[0]: self._arrays[part] for part in parts})

    def begin_write(self) -> None:
        """See Staging; an upload has copied the numbers."""

    def free(self) -> None:
        for array in self._arrays.values():
            self._device.free(array)
        self._arrays.clear()


class ValueArrays:
    """Arrays of a call: ``StagedArrays``.

    If the device has no memory for a call, or is lost, ONNX Runtime (0.4.0 of the WebGPU plug-in)
    drops the work and says so only in its log. So outputs hold ``_UNWRITTEN`` before each call.
    """

    def __init__(self, device: ValueDevice, on_device: dict[str, DeviceArray]) -> None:
        self.on_device = on_device
        self.on_host = {name: array.memory.numbers for name, array in on_device.items()}
        self._device = device
        floats = [array for array in on_device.values() if array.dtype == "fp32"]
        self._checked = min(floats, key=lambda array: array.num_bytes, default=None)
        if self._checked is not None:
            self._mark = np.full(self._checked.shape, _UNWRITTEN)
            self._checked.memory.put(self._mark)

    def upload(self) -> None:
        for array in self.on_device.values():
            array.memory.upload()

    def download(self, num_rows: int) -> None:
        """See StagedArrays; raise CapacityError if the call has not written the outputs."""
        for array in self.on_device.values():
            self._device.num_waits += array.memory.is_device_newer
            try:
                array.memory.numbers  # noqa: B018 (copies them)
            except Exception as error:  # ONNX Runtime's exceptions have no other common base
                raise EngineError(
                    f"{self._device.name} has failed: {' '.join(str(error).split())}; open the "
                    "bundle again"
                ) from error
        if self._checked is not None:
            self._checked.memory.put(self._mark)
            if (self._checked.memory.numbers[:num_rows] == _UNWRITTEN).all():
                raise CapacityError(
                    f"{self._device.name} dropped a call, ONNX Runtime's lines on stderr say why; "
                    "without memory for it: ask for fewer beams, a shorter prompt or fewer "
                    "requests; if the device is lost: open the bundle again"
                )
