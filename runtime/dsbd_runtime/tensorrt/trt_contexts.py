"""Execution contexts of one TensorRT plan: shared scratch memory and a cache of kernels."""

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from dsbd_runtime.bundle_files.durable_files import put_in_place
from dsbd_runtime.device.cuda_device import CudaDevice
from dsbd_runtime.devices import DeviceArray
from dsbd_runtime.tensorrt.trt_module import Flavour

_log = logging.getLogger(__name__)


class TrtContexts:
    """Makes the contexts of one plan, one for each optimization profile in use.

    Their calls are queued on one stream, so they can share scratch memory, which is allocated once,
    for the largest profile.
    """

    def __init__(
        self, trt: ModuleType, plan: Any, device: CudaDevice, kernels_file: Path | None
    ) -> None:
        """``kernels_file``: of the kernels that TensorRT for RTX compiles, or None."""
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
        """Return a new context, None without room; raise MemoryError without scratch memory."""
        num_bytes = int(self._plan.device_memory_size_v2)
        if self._scratch is None and num_bytes:
            self._scratch = self._device.allocate((num_bytes,), "uint8")
        context = self._plan.create_execution_context(self._config)
        if context is not None and self._scratch is not None:
            context.set_device_memory(self._scratch.address, num_bytes)
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
    """Return the cache file of the kernels of a plan, None if plans contain their kernels.

    The folder is ``$XDG_CACHE_HOME/dsbd-ort``, because a bundle may be read-only or shared.
    """
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
