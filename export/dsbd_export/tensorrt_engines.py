"""The TensorRT engines of a bundle: the model and the prune graph of target and draft."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from dsbd_export.errors import ExportError
from dsbd_export.tensorrt_build import build_plan
from dsbd_export.tensorrt_options import (
    CAPACITY_STEP,
    MIN_CAPACITY,
    BuildPlace,
    TensorrtOptions,
    build_place,
)
from dsbd_export.tensorrt_profiles import FORWARD_PROFILES, move_profiles
from dsbd_runtime.bundle import (
    MODEL_FILE,
    PRUNE_FILE,
    ROLES,
    Manifest,
    ModelEntry,
    open_bundle,
    sha256_of,
    write_manifest,
)
from dsbd_runtime.staging import new_bundle
from dsbd_runtime.trt_record import (
    ENGINE_FILE,
    ENGINE_FILES,
    PRUNE_ENGINE_FILE,
    SOURCE_FILES,
    EngineRecord,
    write_record,
)

Report = Callable[[str], None]


def add_engines(bundle_path: Path, options: TensorrtOptions, *, report: Report) -> Manifest:
    """Build the engines of a bundle from its ONNX files, in place of those that it has.

    The bundle is replaced as a whole at the end; after any error it is as it was.

    Raises:
        ExportError: TensorRT cannot build for what was asked.
        BundleError: there is no such bundle, or it cannot be written.
        ProviderError: TensorRT is not installed.
    """
    bundle = open_bundle(bundle_path)
    manifest = bundle.manifest
    place = build_place(options)
    entries = [manifest.target, manifest.draft]
    try:
        with new_bundle(bundle_path) as folder:
            for name in manifest.files:
                if Path(name).name not in ENGINE_FILES:
                    _link(bundle.path / name, folder / name)
            build_engines(folder, entries, place, options.capacity, report=report)
            report("writing the manifest")
            return write_manifest(
                folder, versions=manifest.versions, target=manifest.target, draft=manifest.draft
            )
    except OSError as error:
        raise ExportError(f"cannot write {bundle_path}: {error}; free some space") from error


def build_engines(
    folder: Path,
    entries: list[ModelEntry],
    place: BuildPlace,
    capacity: int | None,
    *,
    report: Report,
) -> None:
    """Write the engines of target and draft, whose entries are given in this order.

    capacity: rows of the caches of both; None for the longer context, rounded up.
    """
    if capacity is None:
        capacity = _rounded_up(max(entry.context_length for entry in entries))
    for role, entry in zip(ROLES, entries, strict=True):
        check_buildable(role, entry.quantization)
        report(
            f"{role}: building engines with {place.flavour.name} {place.trt.__version__} for "
            f"compute capability {place.compute_capability}, {capacity} cache rows"
        )
        record = build_model_engines(folder / role, place, capacity)
        report(f"{role}: attention is {record.attention}")


def build_model_engines(folder: Path, place: BuildPlace, capacity: int) -> EngineRecord:
    """Write engine.plan, prune.plan and engine.json into the folder of a model."""
    moves = move_profiles(capacity)
    model = build_plan(place, folder / MODEL_FILE, capacity, FORWARD_PROFILES)
    (folder / ENGINE_FILE).write_bytes(model.plan)
    prune = build_plan(place, folder / PRUNE_FILE, capacity, moves)
    (folder / PRUNE_ENGINE_FILE).write_bytes(prune.plan)
    record = EngineRecord(
        flavour=place.flavour.name,
        tensorrt_version=place.trt.__version__,
        compute_capability=place.compute_capability,
        capacity=capacity,
        step_profiles=list(FORWARD_PROFILES),
        move_profiles=list(moves),
        attention="fused" if model.is_fused else "decomposed",
        onnx_sha256={
            name: sha256_of(folder / name) for name in SOURCE_FILES if (folder / name).is_file()
        },
    )
    write_record(record, folder)
    return record


def check_buildable(role: str, quantization: str) -> None:
    """Raise ExportError for weights that only ONNX Runtime reads."""
    if quantization != "none":
        raise ExportError(
            f"the {role} is quantized ({quantization}), which only ONNX Runtime runs; export it "
            "with --quantize none --dtype fp16"
        )


def _rounded_up(num_rows: int) -> int:
    """Return a capacity for a context: 300 rows get 320."""
    return max(MIN_CAPACITY, -(-num_rows // CAPACITY_STEP) * CAPACITY_STEP)


def _link(source: Path, target: Path) -> None:
    """Give a file a second name; copy it where the file system has none."""
    target.parent.mkdir(exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
