"""From one ONNX file to one TensorRT plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from dsbd_export.errors import ExportError
from dsbd_export.tensorrt_graph import tensorrt_graph
from dsbd_export.tensorrt_network import decompose_attention, parse_network
from dsbd_export.tensorrt_options import BuildPlace, capability_name
from dsbd_export.tensorrt_profiles import add_profiles
from dsbd_export.tensorrt_timing_cache import (
    load_timing_cache,
    save_timing_cache,
    timing_cache_file,
)
from dsbd_runtime.trt_module import first_reason, trt_logger

_NO_KERNEL = "not supported by a dedicated kernel"


@dataclass(frozen=True)
class BuiltPlan:
    """A serialized engine.

    Attributes:
        plan: its bytes.
        is_fused: whether every attention has a kernel of its own.
    """

    plan: memoryview
    is_fused: bool


def build_plan(
    place: BuildPlace, file: Path, capacity: int, profiles: tuple[int, ...]
) -> BuiltPlan:
    """Build the plan of a graph; attention is computed in pieces only where no kernel takes it.

    Raises:
        ExportError: TensorRT cannot build it, with its reason.
    """
    model = tensorrt_graph(file, capacity)
    has_attention = any(node.op_type == "Attention" for node in model.graph.node)
    errors: list[str] = []
    plan = _built(place, model, file, profiles, errors, is_decomposed=False)
    if plan is not None:
        return BuiltPlan(plan, is_fused=has_attention)
    if has_attention and any(_NO_KERNEL in error for error in errors):
        errors.clear()
        plan = _built(place, model, file, profiles, errors, is_decomposed=True)
    if plan is None:
        raise ExportError(
            f"TensorRT cannot build {file} for compute capability {place.compute_capability}: "
            f"{first_reason(errors)}; export with engine='onnx'"
        )
    return BuiltPlan(plan, is_fused=False)


def _built(
    place: BuildPlace,
    model: onnx.ModelProto,
    file: Path,
    profiles: tuple[int, ...],
    errors: list[str],
    *,
    is_decomposed: bool,
) -> memoryview | None:
    """Return the plan; None, with reasons added to ``errors``, when it cannot be built."""
    trt = place.trt
    logger = trt_logger(trt, errors)
    builder = trt.Builder(logger)
    network = parse_network(trt, builder, model, file)
    if is_decomposed:
        decompose_attention(trt, network)
    config = builder.create_builder_config()
    add_profiles(builder, config, network, profiles)
    if place.flavour.builds_for_others:
        config.num_compute_capabilities = 1
        capability = getattr(trt.ComputeCapability, capability_name(place.compute_capability))
        config.set_compute_capability(capability, 0)
    if not place.flavour.has_timing_cache:
        return _serialized(builder, network, config)
    times_file = timing_cache_file(place)
    times = load_timing_cache(config, times_file)
    plan = _serialized(builder, network, config)
    save_timing_cache(times, times_file)
    return plan


def _serialized(builder: Any, network: Any, config: Any) -> memoryview | None:
    plan = builder.build_serialized_network(network, config)
    return None if plan is None else memoryview(plan)
