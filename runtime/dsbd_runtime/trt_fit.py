"""Whether the TensorRT engines of a bundle fit a machine, and the command that builds such.

TensorRT engines run with the version that built them, on the compute capability that they were
built for; and they hold weights of their own, so they must come from the ONNX files beside them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsbd_runtime.bundle import Bundle
from dsbd_runtime.errors import BundleError
from dsbd_runtime.trt_module import Flavour
from dsbd_runtime.trt_record import EngineRecord, find_record, source_hashes


@dataclass(frozen=True, kw_only=True)
class TrtMachine:
    """What of a machine decides whether an engine runs; None is not known.

    Attributes:
        tensorrt_version: of the package of the flavour in question.
        compute_capability: of its GPU, such as "12.0".
    """

    tensorrt_version: str | None
    compute_capability: str | None


def fitting_record(
    bundle: Bundle, role: str, flavour: Flavour, machine: TrtMachine
) -> EngineRecord:
    """Return the record of engines that fit; raise BundleError with the command to build them."""
    record = find_record(bundle, role)
    if record is None:
        problem = f"{bundle.path / role} has no {flavour.name} engine"
    else:
        problems = list(misfits(record, bundle, role, flavour, machine))
        if not problems:
            return record
        problem = f"the engine in {bundle.path / role} does not fit: {'; '.join(problems)}"
    command = rebuild_command(
        bundle.path,
        flavour,
        machine.compute_capability,
        None if record is None else record.capacity,
    )
    raise BundleError(f"{problem}; build it with: {command}")


def misfits(
    record: EngineRecord, bundle: Bundle, role: str, flavour: Flavour, machine: TrtMachine
) -> Iterator[str]:
    """Yield what keeps engines from running on a machine, as far as it is known."""
    if record.flavour != flavour.name:
        yield f"it was built with {record.flavour}, not with {flavour.name}"
        return  # version numbers of the two have nothing in common
    pairs = (
        ("version", record.tensorrt_version, machine.tensorrt_version),
        ("compute capability", record.compute_capability, machine.compute_capability),
    )
    for name, built_for, here in pairs:
        if here is not None and built_for != here:
            yield f"it was built for {flavour.name} {name} {built_for}, here is {here}"
    hashes = source_hashes(bundle, role)
    for file in sorted(hashes.keys() | record.onnx_sha256.keys()):
        if hashes.get(file) != record.onnx_sha256.get(file):
            yield f"it was built from another {file} than the one beside it"


def rebuild_command(
    bundle_path: Path, flavour: Flavour, compute_capability: str | None, capacity: int | None
) -> str:
    """Return the command that builds the engines of a bundle anew from its ONNX files."""
    words = ["dsbd-export", "--bundle", str(bundle_path), "--engine", flavour.name]
    if flavour.builds_for_others and compute_capability is not None:
        words += ["--compute-capability", compute_capability]
    if capacity is not None:
        words += ["--capacity", str(capacity)]
    return shlex.join(words)


def gpu_compute_capability(runtime: Any, device_id: int) -> str | None:
    """Return that of a GPU of this machine, such as "9.0"; None where there is no such GPU.

    ``runtime`` is the module cuda.bindings.runtime.
    """
    attributes = runtime.cudaDeviceAttr
    numbers = []
    for attribute in (
        attributes.cudaDevAttrComputeCapabilityMajor,
        attributes.cudaDevAttrComputeCapabilityMinor,
    ):
        status, number = runtime.cudaDeviceGetAttribute(attribute, device_id)
        if status != runtime.cudaError_t.cudaSuccess:
            return None
        numbers.append(number)
    return ".".join(map(str, numbers))
