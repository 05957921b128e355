"""engine.json: what the TensorRT engines of one model were built from, with and for."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from dsbd_runtime.bundle import MODEL_FILE, PRUNE_FILE, WEIGHTS_FILE, Bundle
from dsbd_runtime.errors import BundleError
from dsbd_runtime.trt_module import FLAVOURS
from dsbd_runtime.typed_json import json_from_file, mismatch, typed

ENGINE_FILE = "engine.plan"
PRUNE_ENGINE_FILE = "prune.plan"
RECORD_FILE = "engine.json"
ENGINE_FILES = (ENGINE_FILE, PRUNE_ENGINE_FILE, RECORD_FILE)
SOURCE_FILES = (MODEL_FILE, WEIGHTS_FILE, PRUNE_FILE)


@dataclass(frozen=True, kw_only=True)
class EngineRecord:
    """What a machine must know of engine.plan (the model) and prune.plan (the prune graph).

    Attributes:
        flavour: a key of ``trt_module.FLAVOURS``.
        tensorrt_version: of that package.
        compute_capability: of the GPU that they were built for, such as "12.0".
        capacity: rows of the caches, fixed.
        step_profiles: by optimization profile of engine.plan, the most rows S of a call.
        move_profiles: by optimization profile of prune.plan, the most rows K of a call.
        attention: "fused" where every layer has a kernel of its own, "decomposed" where it is
            computed in pieces.
        onnx_sha256: the hash of each file of the model that they were built from, by name.
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
    """Return the record of the engines of "target" or "draft", None where it has none.

    Raises BundleError for a record that cannot be read, or one without its engines.
    """
    files = bundle.manifest.files
    if f"{role}/{RECORD_FILE}" not in files:
        return None
    file = bundle.path / role / RECORD_FILE
    for name in ENGINE_FILES:
        if f"{role}/{name}" not in files:
            raise BundleError(f"{file} is there, {name} is not; export the bundle again")
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
            wanted = f"numbers from 1 to {record.capacity} (the capacity), each above the last"
            raise mismatch(wanted, sizes, f"{where}: {name}")
