"""Fake of the module ``trt`` over ONNX Runtime: a plan names its ONNX file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime as ort

from dsbd_runtime.bundle_files.bundle import (
    MANIFEST_NAME,
    MODEL_FILE,
    PRUNE_FILE,
    Bundle,
    open_bundle,
    write_manifest,
)
from dsbd_runtime.device.ort_engine import OrtEngine
from dsbd_runtime.devices import DeviceArray
from dsbd_runtime.tensorrt.trt_record import (
    ENGINE_FILE,
    PRUNE_ENGINE_FILE,
    EngineRecord,
    source_hashes,
    write_record,
)
from tests.ort_sessions import cpu_session
from tests.runtime.fake_cuda import FakeCudaRuntime, cudaError_t

CAPACITY = 320
STEPS = [1, 8, 32, 256]
MOVES = [32, CAPACITY]
_DTYPES = {
    "tensor(int64)": "int64",
    "tensor(bool)": "bool",
    "tensor(float)": "fp32",
    "tensor(float16)": "fp16",
}


class FakeGpu(FakeCudaRuntime):
    """The CUDA runtime of a machine whose devices have a compute capability."""

    cudaDeviceAttr = SimpleNamespace(
        cudaDevAttrComputeCapabilityMajor="major", cudaDevAttrComputeCapabilityMinor="minor"
    )

    def __init__(self, compute_capability: str = "12.0") -> None:
        super().__init__()
        self.numbers = dict(zip(("major", "minor"), compute_capability.split("."), strict=True))

    def cudaDeviceGetAttribute(self, attribute: str, device: int) -> tuple[Any, ...]:
        if not 0 <= device < self.num_devices:
            return cudaError_t.cudaErrorInvalidValue, 0
        return cudaError_t.cudaSuccess, int(self.numbers[attribute])


class FakeTrt:
    """The module.

    Attributes:
        plans: every plan that was deserialized.
        aliases: by output, the input that it shares memory with, where it is not the right one.
        refuses: names of methods of a context that fail.
    """

    class ExecutionContextAllocationStrategy:
        USER_MANAGED = "user managed"

    class DynamicShapesKernelSpecializationStrategy:
        EAGER = "eager"

    class ILogger:
        INTERNAL_ERROR, ERROR, WARNING, INFO = range(4)

        def __init__(self) -> None:
            """As the real one, which must be called."""

    def __init__(self, version: str = "1.7.1") -> None:
        self.__version__ = version
        self.plans: list[FakePlan] = []
        self.aliases: dict[str, str | None] = {}
        self.refuses: set[str] = set()
        self.has_memory = True
        self.known_kernels = [b"compiled"]  # that a cache of this machine may hold
        self.can_load = True

    def Runtime(self, logger: Any) -> Any:
        return SimpleNamespace(deserialize_cuda_engine=lambda data: self._plan(data, logger))

    def _plan(self, data: Any, logger: Any) -> FakePlan | None:
        if not self.can_load:
            logger.log(self.ILogger.ERROR, "another\nserialization version")
            return None
        self.plans.append(FakePlan(self, Path(bytes(data).decode()), logger))
        return self.plans[-1]


class FakePlan:
    """An engine of static capacity.

    Attributes:
        contexts: every context that was made.
    """

    num_optimization_profiles = 0
    device_memory_size_v2 = 4096

    def __init__(self, trt: FakeTrt, path: Path, logger: Any) -> None:
        session = cpu_session(path)
        is_prune = path.name == PRUNE_FILE
        self.trt = trt
        self.logger = logger
        self.limits = MOVES if is_prune else STEPS
        self.num_optimization_profiles = len(self.limits)
        self.engine = OrtEngine(ort, session, path, device_type="cpu")
        self.infos = {info.name: info for info in (*session.get_inputs(), *session.get_outputs())}
        self.outputs = [info.name for info in session.get_outputs()]
        self.contexts: list[FakeContext] = []

    def get_aliased_input_tensor(self, name: str) -> str | None:
        right = name.replace("present", "past_key_values") if "present" in name else None
        return self.trt.aliases.get(name, right)

    def get_tensor_shape(self, name: str) -> Sequence[int]:
        dims = self.infos[name].shape
        return [dim if isinstance(dim, int) else CAPACITY if dim == "C" else -1 for dim in dims]

    def create_runtime_config(self) -> FakeConfig:
        return FakeConfig(self.trt)

    def create_execution_context(self, config: FakeConfig) -> FakeContext | None:
        assert config.strategy == "user managed"
        if not self.trt.has_memory:
            return None
        self.contexts.append(FakeContext(self))
        return self.contexts[-1]


class FakeConfig:
    """Settings of contexts."""

    dynamic_shapes_kernel_specialization_strategy = "lazy"

    def __init__(self, trt: FakeTrt) -> None:
        self.trt = trt
        self.strategy = self.cache = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> Any:
        return SimpleNamespace(
            deserialize=lambda data: data in self.trt.known_kernels, serialize=lambda: b"compiled"
        )

    def set_runtime_cache(self, cache: Any) -> None:
        assert self.dynamic_shapes_kernel_specialization_strategy == "eager"
        self.cache = cache


class FakeContext:
    """Keeps what is set and runs the ONNX file on it.

    Attributes:
        log: (method, its first argument) of every call.
    """

    def __init__(self, plan: FakePlan) -> None:
        self._plan = plan
        self._limit: int | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self.log: list[tuple[str, Any]] = []

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._limit = self._plan.limits[profile_index]
        return self._done("set_optimization_profile_async", profile_index)

    def set_device_memory(self, memory: int, size: int) -> None:
        assert size == self._plan.device_memory_size_v2
        self.scratch = memory

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        built = self._plan.get_tensor_shape(name)
        assert self._limit is not None and len(built) == len(shape)
        for dim, most in zip(shape, built, strict=True):
            assert 1 <= dim <= self._limit if most == -1 else dim == most, (name, shape)
        self._shapes[name] = shape
        return self._done("set_input_shape", name)

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return self._done("set_tensor_address", name)

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert set(self._addresses) == set(self._plan.infos)
        arrays = {name: self._array(name) for name in self._addresses}
        outputs = {name: arrays.pop(name) for name in self._plan.outputs}
        for name, array in outputs.items():
            if "present" in name:
                assert array == arrays[name.replace("present", "past_key_values")]
        self._plan.engine.bind(arrays, outputs).run()
        return self._done("execute_async_v3", stream_handle)

    def _array(self, name: str) -> DeviceArray:
        info = self._plan.infos[name]
        num_logit_rows = math.prod(self._shapes.get("logit_rows", ()))
        shape = self._shapes.get(name) or tuple(
            {"C": CAPACITY, "R": num_logit_rows}.get(dim, dim) for dim in info.shape
        )
        return DeviceArray(self._addresses[name], shape, _DTYPES[info.type])

    def _done(self, method: str, argument: Any) -> bool:
        self.log.append((method, argument))
        if method in self._plan.trt.refuses:
            self._plan.logger.log(FakeTrt.ILogger.ERROR, f"no {method}")
            return False
        return True


def add_fake_engines(path: Path, **changes: Any) -> Bundle:
    """Give the bundle at ``path`` engines for ``FakeTrt``; ``changes`` are those of the records.

    The records fit TensorRT for RTX 1.7.1 on a GPU of 12.0.
    """
    bundle = open_bundle(path)
    for role in bundle.roles:
        folder = path / role
        (folder / ENGINE_FILE).write_text(str(folder / MODEL_FILE))
        (folder / PRUNE_ENGINE_FILE).write_text(str(folder / PRUNE_FILE))
        fields: dict[str, Any] = {
            "flavour": "tensorrt-rtx",
            "tensorrt_version": "1.7.1",
            "compute_capability": "12.0",
            "capacity": CAPACITY,
            "step_profiles": STEPS,
            "move_profiles": MOVES,
            "attention": "fused",
            "onnx_sha256": source_hashes(bundle, role),
        }
        write_record(EngineRecord(**fields | changes), folder)
    manifest = bundle.manifest
    (path / MANIFEST_NAME).unlink()
    write_manifest(path, versions=manifest.versions, target=manifest.target, draft=manifest.draft)
    return open_bundle(path)
