"""Record of the TensorRT engines of one model (engine.json), and whether they fit a machine.

TensorRT engines run with the version that built them, on the compute capability they were built
for. They contain weights, so they must be built from the ONNX files in the same folder.
"""

import dataclasses
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsbd_runtime.bundle_files.bundle import MODEL_FILE, PRUNE_FILE, WEIGHTS_FILE, Bundle
from dsbd_runtime.errors import BundleError
from dsbd_runtime.tensorrt.trt_module import FLAVOURS, Flavour
from dsbd_runtime.typed_json import json_from_file, mismatch, typed

ENGINE_FILE = "engine.plan"
PRUNE_ENGINE_FILE = "prune.plan"
RECORD_FILE = "engine.json"
ENGINE_FILES = (ENGINE_FILE, PRUNE_ENGINE_FILE, RECORD_FILE)
SOURCE_FILES = (MODEL_FILE, WEIGHTS_FILE, PRUNE_FILE)


@dataclass(frozen=True, kw_only=True)
class EngineRecord:
    """Content of engine.json, on engine.plan (the model) and prune.plan (the prune graph).

    flavour: a key of ``trt_module.FLAVOURS``.
    compute_capability: the compute capability that they were built for, such as "12.0".
    step_profiles: maximum rows S of a call, by optimization profile of engine.plan.
    move_profiles: maximum rows K of a call, by optimization profile of prune.plan.
    attention: "fused" with one kernel per layer, "decomposed" when computed in pieces.
    onnx_sha256: hashes of the model files that they were built from, by name.
    """

    flavour: str
    tensorrt_version: str
    compute_capability: str
    capacity: int
    step_profiles: list[int]
    move_profiles: list[int]
    attention: str
    onnx_sha256: dict[str, str]


def write_record(record: EngineRecord, folder: Path) -> None:
    """Write engine.json into the folder of a model."""
    text = json.dumps(dataclasses.asdict(record), indent=2)
    (folder / RECORD_FILE).write_text(text + "\n", encoding="utf-8")


def find_record(bundle: Bundle, role: str) -> EngineRecord | None:
    """Return the record of a role's engines, None if there are none; BundleError: invalid."""
    files = bundle.manifest.files
    if f"{role}/{RECORD_FILE}" not in files:
        return None
    file = bundle.path / role / RECORD_FILE
    for name in ENGINE_FILES:
        if f"{role}/{name}" not in files:
            raise BundleError(f"{file} exists, {name} does not; export the bundle again")
    record = typed(EngineRecord, json_from_file(file), str(file))
    _check_record(record, str(file))
    return record


def source_hashes(bundle: Bundle, role: str) -> dict[str, str]:
    """Return the manifest's sha256 of each ONNX file of a model, by name."""
    files = bundle.manifest.files
    return {
        name: files[f"{role}/{name}"].sha256 for name in SOURCE_FILES if f"{role}/{name}" in files
    }


def _check_record(record: EngineRecord, where: str) -> None:
    if record.flavour not in FLAVOURS:
        raise mismatch(f"one of {', '.join(FLAVOURS)}", record.flavour, f"{where}: flavour")
    for name in ("step_profiles", "move_profiles"):
        sizes: list[int] = getattr(record, name)
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1 or sizes[-1] > record.capacity:
            expected = f"numbers from 1 to {record.capacity} (the capacity), each above the last"
            raise mismatch(expected, sizes, f"{where}: {name}")


@dataclass(frozen=True, kw_only=True)
class TrtMachine:
    """Versions of a machine that an engine must match; None: unknown."""

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
    """Yield the known reasons why engines cannot run on a machine."""
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
            yield f"{file} has changed since it was built"


def rebuild_command(
    bundle_path: Path, flavour: Flavour, compute_capability: str | None, capacity: int | None
) -> str:
    """Return the command that rebuilds the engines of a bundle from its ONNX files."""
    words = ["dsbd-export", "--bundle", str(bundle_path), "--engine", flavour.name]
    if flavour.builds_for_others and compute_capability is not None:
        words += ["--compute-capability", compute_capability]
    if capacity is not None:
        words += ["--capacity", str(capacity)]
    return shlex.join(words)
