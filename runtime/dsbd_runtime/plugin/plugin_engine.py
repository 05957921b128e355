"""Engine of a DeviceSession on a plug-in of ONNX Runtime, its graphs bound by value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from dsbd_runtime.device.bound_calls import MOST_RECORDED, LoadedModel
from dsbd_runtime.device.device_session import DeviceSession
from dsbd_runtime.device.ort_engine import (
    GRAPH_CAPTURE,
    OrtCall,
    OrtEngine,
    open_on_provider,
    reads_sources,
)
from dsbd_runtime.devices import DeviceArray
from dsbd_runtime.engine.providers import check_runnable
from dsbd_runtime.engine.session import EngineOptions
from dsbd_runtime.ort.ort_module import import_ort_for
from dsbd_runtime.parts.attention.attention_rows import MAX_FORWARD_ROWS
from dsbd_runtime.parts.graph_check import check_graph
from dsbd_runtime.plugin.number_check import check_numbers
from dsbd_runtime.plugin.plugin_module import TURNS, plugin_device
from dsbd_runtime.plugin.value_device import ValueDevice, ValueMemory


def open_plugin_session(request: EngineOptions) -> DeviceSession:
    """Open the engine of "target" or "draft" and its prune graph on a device of a plug-in.

    Raises:
        BundleError: a graph is damaged or contradicts the manifest.
        ProviderError: package or device is missing, the device lacks an operator, or it computes
            other numbers than the CPU; the message says which.
        CapacityError: the device has no memory for the smallest caches.
    """
    bundle, role, placement = request.bundle, request.role, request.placement
    provider, entry = placement.provider, bundle.entry(role)
    paths = bundle.model_path(role), bundle.prune_path(role)
    check_runnable(provider, entry, paths[0])
    ort = import_ort_for(provider)
    ort_device = plugin_device(ort, provider, placement.device_id)
    options = dict(provider.options)
    if request.records_calls:
        options[GRAPH_CAPTURE] = "1"
    device = ValueDevice(ort, provider.name, placement.device_id)
    with TURNS:
        sessions = [
            open_on_provider(ort, path, provider, options, plugin_device=ort_device)
            for path in paths
        ]
    check_graph(paths[0], entry.contract, sessions[0])
    engine, prune_engine = (
        ValueEngine(ort, session, path, device)
        for session, path in zip(sessions, paths, strict=True)
    )
    most_recorded = MOST_RECORDED if request.records_calls else 0
    model = LoadedModel(device, engine, prune_engine, entry, MAX_FORWARD_ROWS, most_recorded)
    session = DeviceSession(replace(model, grows_by_moves=reads_sources(sessions[1])))
    try:
        check_numbers(session, request)
    except BaseException:
        session.close()
        raise
    return session


class ValueEngine(OrtEngine):
    """One graph in a session on a device of values."""

    def __init__(self, ort: ModuleType, session: Any, path: Path, device: ValueDevice) -> None:
        super().__init__(ort, session, path, device_type="")
        self._device = device

    def bind(
        self, inputs: Mapping[str, DeviceArray], outputs: Mapping[str, DeviceArray]
    ) -> ValueCall:
        session = self._opened()
        with TURNS:
            binding = session.io_binding()
            for name, array in inputs.items():
                binding.bind_ortvalue_input(name, array.memory.value)
            for name, array in outputs.items():
                binding.bind_ortvalue_output(name, array.memory.value)
        read = [array.memory for array in inputs.values()]
        written = [array.memory for array in outputs.values()]
        return ValueCall(self._path, session, binding, None, self._device, read, written)

    def close(self) -> None:
        with TURNS:
            super().close()


@dataclass(eq=False)
class ValueCall(OrtCall):
    """A graph bound to values; ``read``, ``written``: those of its inputs and outputs."""

    device: ValueDevice
    read: list[ValueMemory]
    written: list[ValueMemory]

    def run(self) -> None:
        with TURNS:
            for memory in self.read:
                if memory.is_host_newer:
                    memory.upload()
            self.options = self.device.run_options()
            super().run()
        for memory in self.written:
            memory.is_device_newer = True

    def release(self) -> None:
        with TURNS:
            super().release()
            self.read, self.written = [], []
