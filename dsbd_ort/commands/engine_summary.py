"""The TensorRT engines of a bundle: what they were built for, and whether that is this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsbd_runtime.bundle import ROLES, Bundle
from dsbd_runtime.cuda_device import gpu_compute_capability, import_cuda_runtime
from dsbd_runtime.errors import BundleError, ProviderError
from dsbd_runtime.providers import Provider
from dsbd_runtime.trt_module import FLAVOURS, Flavour, import_trt
from dsbd_runtime.trt_record import EngineRecord, TrtMachine, find_record, fitting_record, misfits


@dataclass(frozen=True, kw_only=True)
class EngineSummary:
    """The engines of one model.

    Attributes:
        role: "target" or "draft".
        built: content of its engine.json.
        problems: why they do not run on this machine.
        not_checked: what this machine cannot tell about that.
    """

    role: str
    built: EngineRecord
    problems: list[str]
    not_checked: list[str]


def summarize_engines(bundle: Bundle) -> list[EngineSummary]:
    """Return a summary for each model with TensorRT engines."""
    records = ((role, find_record(bundle, role)) for role in ROLES)
    return [_summary(bundle, role, record) for role, record in records if record is not None]


def engine_problems(bundle: Bundle, provider: Provider) -> Iterator[str]:
    """Yield for each model why it has no engine for a TensorRT provider here, with the mend."""
    flavour = FLAVOURS[provider.name]
    machine = machine_here(flavour)
    for role in ROLES:
        try:
            fitting_record(bundle, role, flavour, machine)
        except BundleError as error:
            yield str(error)


def machine_here(flavour: Flavour) -> TrtMachine:
    """Return what can be told of this machine and its first GPU."""
    try:
        version = str(import_trt(flavour).__version__)
    except ProviderError:
        version = None
    try:
        runtime = import_cuda_runtime(flavour.provider.install_line)
        capability = gpu_compute_capability(runtime, 0)
    except ProviderError:
        capability = None
    return TrtMachine(tensorrt_version=version, compute_capability=capability)


def _summary(bundle: Bundle, role: str, record: EngineRecord) -> EngineSummary:
    flavour = FLAVOURS[record.flavour]
    machine = machine_here(flavour)
    facts = {
        f"version of {flavour.name}, which is not installed": machine.tensorrt_version,
        "compute capability, because no GPU is found": machine.compute_capability,
    }
    return EngineSummary(
        role=role,
        built=record,
        problems=list(misfits(record, bundle, role, flavour, machine)),
        not_checked=[name for name, fact in facts.items() if fact is None],
    )
