"""Engine of a DeviceSession on TensorRT's own runtime, its plans bound by address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dsbd_runtime.device.bound_calls import LoadedModel
from dsbd_runtime.device.cuda_device import CudaDevice, gpu_compute_capability, import_cuda_runtime
from dsbd_runtime.device.device_session import DeviceSession
from dsbd_runtime.device.recorded_calls import MOST_RECORDED
from dsbd_runtime.devices import DeviceArray
from dsbd_runtime.engine.providers import check_runnable
from dsbd_runtime.engine.session import EngineOptions
from dsbd_runtime.errors import BundleError, CapacityError, EngineError
from dsbd_runtime.parts.attention_rows import MAX_FORWARD_ROWS
from dsbd_runtime.parts.cache_entries import CacheEntry, parts_of, past_name, present_name
from dsbd_runtime.tensorrt.trt_contexts import TrtContexts, kernels_file
from dsbd_runtime.tensorrt.trt_module import FLAVOURS, first_reason, import_trt, trt_logger
from dsbd_runtime.tensorrt.trt_record import (
    ENGINE_FILE,
    PRUNE_ENGINE_FILE,
    TrtMachine,
    fitting_record,
)


class TrtEngine:
    """One plan on one stream, with an execution context for each optimization profile in use."""

    def __init__(
        self,
        plan: Any,
        path: Path,
        *,
        caches: Sequence[CacheEntry],
        capacity: int,
        profiles: Sequence[int],
        stream: int,
        contexts: TrtContexts,
        errors: list[str],
    ) -> None:
        """Check the plan, whose file is ``path``, and own it.

        profiles: maximum rows of a call, by optimization profile.
        stream: address of the CUDA stream of all calls.
        errors: list to which the logger of ``plan`` appends errors.

        Raises:
            BundleError: the plan has other profiles or another capacity, or would not update a
                cache in place.
        """
        self._plan: Any = plan
        self._path = path
        self._capacity = capacity
        self._profiles = tuple(profiles)
        self._stream = stream
        self._maker = contexts
        self._errors = errors
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
        """Return the only capacity, for which the engine was built."""
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
        profile = next((i for i, most in enumerate(self._profiles) if num_rows <= most), None)
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
                self._check(context.set_tensor_address(name, array.address), f"address of {name}")
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

    Raises:
        BundleError: there is no engine, or it does not fit this machine; the message has the
            command that builds one.
        ProviderError: package, driver or device is missing; the message says which.
        CapacityError: the GPU has no memory for the caches.
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
            open_engine(
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


def open_engine(
    trt: ModuleType,
    path: Path,
    *,
    caches: Sequence[CacheEntry],
    capacity: int,
    profiles: list[int],
    device: CudaDevice,
    kernels: Path | None,
) -> TrtEngine:
    """Deserialize a plan on a device; see ``TrtEngine`` and ``TrtContexts`` for the arguments."""
    errors: list[str] = []
    runtime = trt.Runtime(trt_logger(trt, errors))
    plan = runtime.deserialize_cuda_engine(np.memmap(path, mode="r"))
    if plan is None:
        raise BundleError(
            f"TensorRT {trt.__version__} cannot load {path} ({first_reason(errors)}); "
            "copy the bundle, or build its engines again with dsbd-export --bundle"
        )
    return TrtEngine(
        plan,
        path,
        caches=caches,
        capacity=capacity,
        profiles=profiles,
        stream=device.stream,
        contexts=TrtContexts(trt, plan, device, kernels),
        errors=errors,
    )
