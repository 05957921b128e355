"""Engine of a DeviceSession on TensorRT's own runtime, its plans bound by address."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dsbd_runtime.bundle_files.durable_files import put_in_place
from dsbd_runtime.device.bound_calls import MOST_RECORDED, LoadedModel
from dsbd_runtime.device.cuda_device import CudaDevice, gpu_compute_capability, import_cuda_runtime
from dsbd_runtime.device.device_session import DeviceSession
from dsbd_runtime.devices import DeviceArray
from dsbd_runtime.engine.providers import check_runnable
from dsbd_runtime.engine.session import EngineOptions
from dsbd_runtime.errors import BundleError, CapacityError, EngineError
from dsbd_runtime.parts.attention.attention_rows import MAX_FORWARD_ROWS
from dsbd_runtime.parts.attention.cache_entries import CacheEntry, parts_of, past_name, present_name
from dsbd_runtime.tensorrt.trt_module import FLAVOURS, Flavour, first_reason, import_trt, trt_logger
from dsbd_runtime.tensorrt.trt_record import (
    ENGINE_FILE,
    PRUNE_ENGINE_FILE,
    TrtMachine,
    fitting_record,
)

_log = logging.getLogger(__name__)


class TrtEngine:
    """One plan on one stream, with an execution context for each optimization profile in use."""

    def __init__(
        self,
        trt: ModuleType,
        path: Path,
        *,
        caches: Sequence[CacheEntry],
        capacity: int,
        profiles: Sequence[int],
        device: CudaDevice,
        kernels: Path | None,
    ) -> None:
        """Load the plan at ``path``; ``profiles``: most rows of a call, by optimization profile.

        BundleError: it cannot be loaded, has other profiles or another capacity, or a cache that
        would not be updated in place. kernels: see ``kernels_file``.
        """
        self._errors: list[str] = []
        runtime = trt.Runtime(trt_logger(trt, self._errors))
        plan = runtime.deserialize_cuda_engine(np.memmap(path, mode="r"))
        if plan is None:
            raise BundleError(
                f"TensorRT {trt.__version__} cannot load {path} ({self._reason()}); copy the "
                "bundle, or build its engines again with dsbd-export --bundle"
            )
        self._plan: Any = plan
        self._path = path
        self._capacity = capacity
        self._profiles = tuple(profiles)
        self._stream = device.stream
        self._maker = TrtContexts(trt, plan, device, kernels)
        self._contexts: dict[int, Any] = {}
        self._last_call: dict[int, TrtCall] = {}
        if plan.num_optimization_profiles != len(self._profiles):
            raise BundleError(
                f"{self._path} has {plan.num_optimization_profiles} optimization profiles, "
                f"engine.json says {len(self._profiles)}; export the bundle again"
            )
        for cache, part in parts_of(caches):
            names = past_name(cache.layer, part), present_name(cache.layer, part)
            self._check_cache(plan, *names)

    def capacity_for(self, num_rows: int) -> int:
        if num_rows > self._capacity:
            raise CapacityError(
                f"{num_rows} cache rows do not fit {self._path}, which was built for "
                f"{self._capacity}; shorten the prompt, ask for fewer new tokens or fewer beams, "
                "or build it with a larger --capacity"
            )
        return self._capacity

    def bind(
        self, inputs: Mapping[str, DeviceArray], outputs: Mapping[str, DeviceArray]
    ) -> TrtCall:
        """Return the call with these inputs and outputs, in the first profile that fits."""
        num_rows = max(
            dim for name, array in inputs.items() for dim in self._dynamic_dims(name, array.shape)
        )
        profile = next(
            (i for i, max_rows in enumerate(self._profiles) if num_rows <= max_rows), None
        )
        if profile is None:
            raise CapacityError(
                f"a call of {num_rows} rows does not fit {self._path}, which was built for "
                f"{self._profiles[-1]}; open the bundle again with fewer rows a call"
            )
        return TrtCall(self, profile, inputs, outputs)

    def close(self) -> None:
        self._last_call.clear()
        self._contexts.clear()
        if self._plan is not None:
            self._maker.close()
            self._plan = None

    def execute(self, call: TrtCall) -> None:
        """Queue a call; set its shapes and addresses unless its profile still has them."""
        context = self._context(call.profile)
        if self._last_call.get(call.profile) is not call:
            self._last_call.pop(call.profile, None)
            for name, array in call.inputs.items():
                self._check(context.set_input_shape(name, array.shape), f"shape of {name}")
            for name, array in (*call.inputs.items(), *call.outputs.items()):
                self._check(context.set_tensor_address(name, array.memory), f"address of {name}")
            self._last_call[call.profile] = call
        self._check(context.execute_async_v3(self._stream), "call")

    def forget(self, call: TrtCall) -> None:
        """Let the next call of its profile set its own shapes and addresses."""
        if self._last_call.get(call.profile) is call:
            del self._last_call[call.profile]

    def _open_plan(self) -> Any:
        if self._plan is None:
            raise EngineError(f"the engine {self._path} is closed; load it again")
        return self._plan

    def _context(self, profile: int) -> Any:
        if profile not in self._contexts:
            context = self._new_context()
            chosen = context.set_optimization_profile_async(profile, self._stream)
            self._check(chosen, f"optimization profile {profile}")
            self._contexts[profile] = context
        return self._contexts[profile]

    def _new_context(self) -> Any:
        self._open_plan()
        try:
            context: Any = self._maker.make()
            if context is not None:
                return context
            reason = self._reason()
        except MemoryError as error:
            reason = str(error)
        raise CapacityError(
            f"no device memory to run {self._path} ({reason}); free some, or build it with a "
            "smaller --capacity"
        )

    def _dynamic_dims(self, name: str, shape: tuple[int, ...]) -> list[int]:
        built = self._open_plan().get_tensor_shape(name)
        return [dim for dim, fixed in zip(shape, built, strict=True) if fixed == -1] or [1]

    def _check_cache(self, plan: Any, past: str, present: str) -> None:
        """Refuse a cache that is not updated in place, which would silently lose its rows."""
        if (aliased := plan.get_aliased_input_tensor(present)) != past:
            raise BundleError(
                f"{self._path} writes {present} to the memory of {aliased}, expected {past}: the "
                "cache would not be updated in place; build it with another TensorRT version"
            )
        if (rows := plan.get_tensor_shape(past)[2]) != self._capacity:
            raise BundleError(
                f"{self._path} has caches of {rows} rows, engine.json says {self._capacity}; "
                "export the bundle again"
            )

    def _check(self, succeeded: bool, what: str) -> None:
        if not succeeded:
            raise EngineError(
                f"TensorRT refuses the {what} of {self._path}: {self._reason()}; build it again "
                "with dsbd-export --bundle"
            )

    def _reason(self) -> str:
        reason = first_reason(self._errors)
        self._errors.clear()
        return reason


@dataclass(eq=False)
class TrtCall:
    """A BoundCall: a profile of an engine, and its inputs and outputs."""

    engine: TrtEngine
    profile: int
    inputs: Mapping[str, DeviceArray]
    outputs: Mapping[str, DeviceArray]

    def run(self) -> None:
        self.engine.execute(self)

    def release(self) -> None:
        self.engine.forget(self)


def open_trt_session(
    request: EngineOptions, *, trt: ModuleType | None = None, cuda_runtime: Any = None
) -> DeviceSession:
    """Open the engine of "target" or "draft" and its prune engine on one GPU.

    trt, cuda_runtime: the modules tensorrt and cuda.bindings.runtime; None imports them.

    BundleError: no engine, or none for this machine; the message has the command that builds it.
    ProviderError: package, driver or device is missing. CapacityError: no memory for the caches.
    """
    bundle, role, provider = request.bundle, request.role, request.placement.provider
    device_id = request.placement.device_id
    check_runnable(provider, bundle.entry(role), bundle.model_path(role))
    flavour = FLAVOURS[provider.name]
    trt = import_trt(flavour) if trt is None else trt
    if cuda_runtime is None:
        cuda_runtime = import_cuda_runtime(provider.install_line)
    device = CudaDevice(device_id, cuda_runtime)
    try:
        machine = TrtMachine(
            tensorrt_version=trt.__version__,
            compute_capability=gpu_compute_capability(cuda_runtime, device_id),
        )
        record = fitting_record(bundle, role, flavour, machine)
        folder, entry = bundle.path / role, bundle.entry(role)
        engine, prune_engine = (
            TrtEngine(
                trt,
                folder / file,
                caches=entry.caches,
                capacity=record.capacity,
                profiles=profiles,
                device=device,
                kernels=kernels_file(
                    flavour, trt.__version__, machine.compute_capability, folder / file
                ),
            )
            for file, profiles in (
                (ENGINE_FILE, record.step_profiles),
                (PRUNE_ENGINE_FILE, record.move_profiles),
            )
        )
        most_recorded = MOST_RECORDED if request.records_calls else 0
        return DeviceSession(
            LoadedModel(device, engine, prune_engine, entry, MAX_FORWARD_ROWS, most_recorded)
        )
    except BaseException:
        device.close()
        raise


class TrtContexts:
    """Makes the contexts of one plan, one for each optimization profile in use.

    Their calls are queued on one stream, so they share scratch memory, for the largest profile.
    """

    def __init__(
        self, trt: ModuleType, plan: Any, device: CudaDevice, kernels_file: Path | None
    ) -> None:
        """kernels_file: file for the kernels that TensorRT for RTX compiles, or None."""
        self._plan = plan
        self._device = device
        self._kernels_file = kernels_file
        self._kernels: Any = None
        self._scratch: DeviceArray | None = None
        self._config = plan.create_runtime_config()
        self._config.set_execution_context_allocation_strategy(
            trt.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        if kernels_file is not None:
            # By default the kernels of a size are compiled during its first calls, which run other
            # kernels: their bits differ from those of later calls.
            strategies = trt.DynamicShapesKernelSpecializationStrategy
            self._config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER
            self._kernels = self._config.create_runtime_cache()
            if kernels_file.is_file() and not self._kernels.deserialize(kernels_file.read_bytes()):
                _log.info("%s is of another GPU or version, and is written anew", kernels_file)
            self._config.set_runtime_cache(self._kernels)

    def make(self) -> Any:
        """Return a new context; None: no room. MemoryError: no room for the scratch memory."""
        num_bytes = int(self._plan.device_memory_size_v2)
        if self._scratch is None and num_bytes:
            self._scratch = self._device.allocate((num_bytes,), "uint8")
        context = self._plan.create_execution_context(self._config)
        if context is not None and self._scratch is not None:
            context.set_device_memory(self._scratch.memory, num_bytes)
        return context

    def close(self) -> None:
        """Free the scratch memory and write the kernels; all contexts were released before."""
        if self._scratch is not None:
            self._device.free(self._scratch)
            self._scratch = None
        if self._kernels is not None and self._kernels_file is not None:
            _write(bytes(self._kernels.serialize()), self._kernels_file)
            self._kernels = None


def kernels_file(
    flavour: Flavour,
    version: str,
    compute_capability: str | None,
    plan: Path,
    environment: Mapping[str, str] = os.environ,
) -> Path | None:
    """Return the path for a plan's kernels in $XDG_CACHE_HOME/dsbd-ort; None: they are in it."""
    if not flavour.compiles_kernels:
        return None
    root = environment.get("XDG_CACHE_HOME")
    folder = (Path(root) if root else Path.home() / ".cache") / "dsbd-ort"
    place = hashlib.sha256(str(plan.resolve()).encode()).hexdigest()[:16]
    return folder / f"{flavour.name}-{version}-sm{compute_capability}-{place}.kernels"


def _write(kernels: bytes, file: Path) -> None:
    """Write the file of kernels, complete or not at all; a failure is only logged."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        partial.write_bytes(kernels)
        put_in_place(partial, file)
    except OSError as error:
        _log.warning("the kernels of this GPU are not kept for the next opening: %s", error)
