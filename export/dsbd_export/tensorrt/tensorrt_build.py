"""TensorRT engines of a bundle: plans of the model and the prune graph, of target and draft."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from dsbd_export.changed_bundle import changed_bundle
from dsbd_export.errors import ExportError
from dsbd_export.progress import Report
from dsbd_export.tensorrt.tensorrt_graph import decompose_attention, parse_network, tensorrt_graph
from dsbd_export.tensorrt.tensorrt_options import (
    CAPACITY_STEP,
    MIN_CAPACITY,
    BuildPlace,
    TensorrtOptions,
    build_place,
    capability_name,
)
from dsbd_runtime.bundle_files.bundle import (
    MODEL_FILE,
    PRUNE_FILE,
    ROLES,
    Manifest,
    ModelEntry,
    open_bundle,
    sha256_of,
    write_manifest,
)
from dsbd_runtime.bundle_files.durable_files import put_in_place
from dsbd_runtime.bundle_files.manifest import quantize_option
from dsbd_runtime.parts.attention.cache_entries import recent
from dsbd_runtime.tensorrt.trt_module import first_reason, trt_logger
from dsbd_runtime.tensorrt.trt_record import (
    ENGINE_FILE,
    ENGINE_FILES,
    PRUNE_ENGINE_FILE,
    SOURCE_FILES,
    EngineRecord,
    write_record,
)

_NO_KERNEL = "not supported by a dedicated kernel"

FORWARD_PROFILES = (1, 8, 32, 64, 128, 256)
"""Rows per call of the model: one node, narrow forests, wide forests, a chunk of the prompt."""

MOST_DEFAULT_CAPACITY = 4096
"""Maximum rows of the caches if no capacity is given. A context of 131,072 rows would need 17 GB
for a model of 8 billion weights, and attention reads all rows in every call."""

_FEW_MOVED_ROWS = 32


_CRASHING = frozenset({"diffllama"})
"""Families for which TensorRT's builder crashes the process."""


def add_engines(bundle_path: Path, options: TensorrtOptions, *, report: Report) -> Manifest:
    """Build the engines of a bundle from its ONNX files; they replace existing engines.

    The bundle is replaced as a whole at the end; after an error it is unchanged.

    Raises ExportError if TensorRT cannot build for the options, BundleError if there is no such
    bundle or it cannot be written, ProviderError if TensorRT is not installed.
    """
    bundle = open_bundle(bundle_path)
    manifest = bundle.manifest
    place = build_place(options)
    entries = list(manifest.entry_by_role.values())
    with changed_bundle(bundle, [name for name in manifest.files if not is_engine(name)]) as folder:
        build_engines(folder, entries, place, options.capacity, report=report)
        report("writing the manifest")
        return write_manifest(
            folder, versions=manifest.versions, target=manifest.target, draft=manifest.draft
        )


def is_engine(name: str) -> bool:
    """Return whether a file of a bundle is a TensorRT engine or the engines' record."""
    return Path(name).name in ENGINE_FILES


def build_engines(
    folder: Path,
    entries: list[ModelEntry],
    place: BuildPlace,
    capacity: int | None,
    *,
    report: Report,
) -> None:
    """Write the engines of the target and, if any, the draft; ``entries`` are in this order.

    capacity: rows of all caches; None: the longer context, at most ``MOST_DEFAULT_CAPACITY``.
    """
    if capacity is None:
        capacity = default_capacity(max(entry.context_length for entry in entries))
    for role, entry in zip(ROLES, entries, strict=False):
        check_buildable(role, entry)
        report(
            f"{role}: building engines with {place.flavour.name} {place.trt.__version__} for "
            f"compute capability {place.compute_capability}, {capacity} cache rows"
        )
        record = build_model_engines(folder / role, place, capacity)
        report(f"{role}: attention is {record.attention}")


def build_model_engines(folder: Path, place: BuildPlace, capacity: int) -> EngineRecord:
    """Write engine.plan, prune.plan and engine.json into the folder of a model."""
    moves = move_profiles(capacity)
    plan, is_fused = build_plan(place, folder / MODEL_FILE, capacity, FORWARD_PROFILES)
    (folder / ENGINE_FILE).write_bytes(plan)
    prune, _ = build_plan(place, folder / PRUNE_FILE, capacity, moves)
    (folder / PRUNE_ENGINE_FILE).write_bytes(prune)
    record = EngineRecord(
        flavour=place.flavour.name,
        tensorrt_version=place.trt.__version__,
        compute_capability=place.compute_capability,
        capacity=capacity,
        step_profiles=list(FORWARD_PROFILES),
        move_profiles=list(moves),
        attention="fused" if is_fused else "decomposed",
        onnx_sha256={
            name: sha256_of(folder / name) for name in SOURCE_FILES if (folder / name).is_file()
        },
    )
    write_record(record, folder)
    return record


def check_buildable(role: str, entry: ModelEntry) -> None:
    """Raise ExportError for an engine that only ONNX Runtime runs."""
    if entry.quantization != "none":
        raise ExportError(
            f"the {role} is quantized ({quantize_option(entry.quantization)}), which only ONNX "
            "Runtime runs; export it with --quantize none --dtype fp16"
        )
    if entry.form is not None:
        raise ExportError(
            f"the {role} has the form {entry.form}, whose operators only ONNX Runtime has; export "
            "it with --form portable"
        )
    if recent(entry.caches):
        raise ExportError(
            f"the {role} (family {entry.family}) has convolutions or recurrences, whose rows only "
            "provider 'cpu' folds; export it with engine='onnx'"
        )
    if entry.family in _CRASHING:
        raise ExportError(
            f"TensorRT crashes while it builds family {entry.family} (seen with TensorRT for RTX "
            f"1.7); export the {role} with engine='onnx'"
        )
    if entry.features is not None:
        raise ExportError(
            f"the {role} {'reads' if entry.is_feature_draft else 'returns'} features, which only "
            "ONNX Runtime runs; export it without, or use provider 'cpu' or 'cuda'"
        )


def default_capacity(context_length: int) -> int:
    """Return the capacity for a context: 300 rows get 320, 131,072 get 4096."""
    num_rows = min(context_length, MOST_DEFAULT_CAPACITY)
    return max(MIN_CAPACITY, -(-num_rows // CAPACITY_STEP) * CAPACITY_STEP)


def build_plan(
    place: BuildPlace, file: Path, capacity: int, profiles: tuple[int, ...]
) -> tuple[memoryview, bool]:
    """Return the plan of a graph, and whether all attention is fused; or raise ExportError."""
    model = tensorrt_graph(file, capacity)
    has_attention = any(node.op_type == "Attention" for node in model.graph.node)
    errors: list[str] = []
    plan = _built(place, model, file, profiles, errors, is_decomposed=False)
    if plan is not None:
        return plan, has_attention
    if has_attention and any(_NO_KERNEL in error for error in errors):
        errors.clear()
        plan = _built(place, model, file, profiles, errors, is_decomposed=True)
    if plan is None:
        raise ExportError(
            f"TensorRT cannot build {file} for compute capability {place.compute_capability}: "
            f"{first_reason(errors)}; export with engine='onnx'"
        )
    return plan, False


def _built(
    place: BuildPlace,
    model: onnx.ModelProto,
    file: Path,
    profiles: tuple[int, ...],
    errors: list[str],
    *,
    is_decomposed: bool,
) -> memoryview | None:
    """Return the plan; None if it cannot be built, with reasons added to ``errors``."""
    trt = place.trt
    logger = trt_logger(trt, errors)
    builder = trt.Builder(logger)
    network = parse_network(trt, builder, model, file)
    if is_decomposed:
        decompose_attention(trt, network)
    config = builder_config(trt, builder)
    add_profiles(builder, config, network, profiles)
    if place.flavour.builds_for_others:
        config.num_compute_capabilities = 1
        capability = getattr(trt.ComputeCapability, capability_name(place.compute_capability))
        config.set_compute_capability(capability, 0)
    times_file = timing_cache_file(place)
    times = load_timing_cache(config, times_file) if place.flavour.has_timing_cache else None
    plan = builder.build_serialized_network(network, config)
    if times is not None:
        save_timing_cache(times, times_file)
    return None if plan is None else memoryview(plan)


def builder_config(trt: Any, builder: Any) -> Any:
    """Return a config without TF32, whose products have 10 bits of mantissa."""
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)
    return config


def move_profiles(capacity: int) -> tuple[int, ...]:
    """Return the profiles of the prune graph, in rows per call: few rows, or all."""
    return (_FEW_MOVED_ROWS, capacity)


def add_profiles(builder: Any, config: Any, network: Any, sizes: tuple[int, ...]) -> None:
    """Add a profile per size: dynamic dimensions from 1 to the size, optimized for the size."""
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    for size in sizes:
        profile = builder.create_optimization_profile()
        for tensor in inputs:
            dims = tuple(tensor.shape)
            if -1 in dims:
                smallest, largest = (
                    tuple(n if dim == -1 else dim for dim in dims) for n in (1, size)
                )
                profile.set_shape(tensor.name, smallest, largest, largest)
        config.add_optimization_profile(profile)


def timing_cache_file(place: BuildPlace, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the file of kernel times for this version and GPU, in ``$XDG_CACHE_HOME/dsbd-ort``."""
    root = environment.get("XDG_CACHE_HOME")
    folder = (Path(root) if root else Path.home() / ".cache") / "dsbd-ort"
    version, capability = place.trt.__version__, place.compute_capability
    return folder / f"{place.flavour.name}-{version}-sm{capability}.timing"


def load_timing_cache(config: Any, file: Path) -> Any:
    """Load a file's times, if it exists, into the config; return the cache that the build fills."""
    cache = config.create_timing_cache(file.read_bytes() if file.is_file() else b"")
    config.set_timing_cache(cache, False)
    return cache


def save_timing_cache(cache: Any, file: Path) -> None:
    """Write the times; a concurrent build sees either the old file or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    partial.write_bytes(bytes(cache.serialize()))
    put_in_place(partial, file)
