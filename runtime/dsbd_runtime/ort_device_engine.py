"""A DeviceEngine over ONNX Runtime: a graph bound by address to memory of its provider's device."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dsbd_runtime.device import DeviceArray
from dsbd_runtime.errors import CapacityError, EngineError
from dsbd_runtime.kv_cache import bucket_capacity

_ONNX_BFLOAT16 = 16  # TensorProto.BFLOAT16, a type that numpy has no name for
_ELEMENT_TYPES: dict[str, Any] = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": _ONNX_BFLOAT16,
    "int64": np.int64,
    "bool": np.bool_,
}
_NO_MEMORY = ("Failed to allocate memory", "out of memory", "smaller than requested bytes")
_NO_CAPTURE = -1


class OrtDeviceEngine:
    """One graph in an ONNX Runtime session whose provider works on ``device_type``.

    With ``captures_graphs`` the provider was opened with ``enable_cuda_graph``: every bound call
    has a ``gpu_graph_id`` of its own, the first run captures it and later ones replay it with the
    addresses it was captured with. So capacities only grow, and an id is never used again.
    """

    def __init__(
        self,
        ort: ModuleType,
        session: Any,
        path: Path,
        *,
        device_type: str,
        device_id: int = 0,
        captures_graphs: bool = False,
    ) -> None:
        """Take over an InferenceSession; ``path`` is what messages call its graph."""
        self._ort = ort
        self._session = session
        self._path = path
        self._place = (device_type, device_id)
        self._graph_ids = itertools.count(1) if captures_graphs else None

    def capacity_for(self, num_rows: int, current: int) -> int:
        """Return the bucket for ``num_rows``; where graphs are captured, never less than now."""
        capacity = bucket_capacity(num_rows)
        return capacity if self._graph_ids is None else max(capacity, current)

    def bind(
        self, inputs: Mapping[str, DeviceArray], outputs: Mapping[str, DeviceArray]
    ) -> OrtCall:
        """Return the call with these inputs and outputs; it runs to its end."""
        if self._session is None:
            raise EngineError(f"the engine {self._path} is closed; load it again")
        binding = self._session.io_binding()
        for bind, arrays in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, array in arrays.items():
                element_type = _ELEMENT_TYPES[array.dtype]
                bind(name, *self._place, element_type, array.shape, array.address)
        graph_id = _NO_CAPTURE if self._graph_ids is None else next(self._graph_ids)
        options = self._ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(graph_id))
        return OrtCall(self._path, self._session, binding, options, graph_id)

    def close(self) -> None:
        """Release the session; calling it again does nothing."""
        self._session = None


class OrtCall:
    """A graph bound to device memory."""

    def __init__(self, path: Path, session: Any, binding: Any, options: Any, graph_id: int) -> None:
        self._path = path
        self._session = session
        self._binding = binding
        self._options = options
        self._graph_id = graph_id

    def run(self) -> None:
        """Run the graph to its end.

        Raises:
            CapacityError: the device has no memory for it.
            EngineError: ONNX Runtime failed otherwise.
        """
        try:
            self._session.run_with_iobinding(self._binding, self._options)
        except Exception as error:  # ONNX Runtime's exceptions share no base but this one
            reason = " ".join(str(error).split())
            if not any(sign in reason for sign in _NO_MEMORY):
                raise EngineError(
                    f"ONNX Runtime failed in a call of {self._path}: {reason}; "
                    "open the bundle again, or export it again if that does not help"
                ) from error
            raise CapacityError(
                f"no memory for what lies between the inputs and outputs of a call ({reason}); "
                "ask for fewer beams or a shorter draft, or close what else uses the device"
            ) from error

    def release(self) -> None:
        """Drop the bindings and the captured graph."""
        if self._session is not None and self._graph_id != _NO_CAPTURE:
            self._session.release_captured_graph(self._graph_id)
        self._session = self._binding = None
