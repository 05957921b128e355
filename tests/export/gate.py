"""Exports of one model, and the parity gate as one call: its refusal is an error."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from dsbd_export.capture.forest_graph import joined
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.config import ExportConfig, ModelOptions
from dsbd_export.errors import ExportError
from dsbd_export.gate.parity import InFloat64, ParityLimit, measured_parity, refusal
from dsbd_export.gate.unwritten_bundle import unwritten_bundle
from dsbd_export.model_source import SourceOf
from dsbd_export.opening import open_checkpoint, open_pair, source_of
from dsbd_export.parity_cases import Reference, forest_cases, reference_logits
from dsbd_export.pipeline import export_model, manifest_entry
from dsbd_export.progress import silent
from dsbd_runtime.bundle_files.bundle import Bundle, ModelEntry, ParityReport
from dsbd_runtime.bundle_files.manifest import MANIFEST_NAME, manifest_from_file

_FP32 = ModelOptions()


def export_alone(
    source: Path,
    output: Path,
    captures: SourceOf = source_of,
    report: Callable[[str], None] = silent,
    **options: Any,
) -> tuple[Checkpoint, ModelEntry, onnx.ModelProto]:
    """Export a target to ``output / "target"``; return its checkpoint, entry and graph."""
    config = ExportConfig(target="", output=output, **options)
    checkpoint = open_checkpoint("target", source, config)
    entry = export_model(checkpoint, output, config, report, captures)
    graph = onnx.load(output / "target" / "model.onnx", load_external_data=False)
    return replace(checkpoint, caches=tuple(entry.caches), encoder=entry.encoder), entry, graph


def exported_target(config: ExportConfig, bundle: Path) -> Checkpoint:
    """Return the checkpoint that was exported by ``config`` to ``bundle``, with its caches."""
    caches = manifest_from_file(bundle / MANIFEST_NAME).target.caches
    return replace(open_pair(config)[0], caches=caches)


def bundle_of(
    folder: Path,
    checkpoint: Checkpoint,
    config: ModelOptions = _FP32,
    target: ModelEntry | None = None,
) -> Bundle:
    """Return the bundle of an engine in a folder that is named by its role."""
    assert folder.name == checkpoint.role
    contract = joined(source_of(checkpoint).parts(config))
    entry = manifest_entry(checkpoint, config, contract)
    return unwritten_bundle(folder.parent, checkpoint.role, entry, target)


def references(
    model: Any, checkpoint: Checkpoint, cases: Iterable[Any] | None = None
) -> list[Reference]:
    """Return cases, all forests by default, with the logits of the unmodified model."""
    cases = forest_cases(checkpoint) if cases is None else cases
    return [Reference(case=case, logits=reference_logits(model, case)) for case in cases]


def check_parity(
    folder: Path,
    checkpoint: Checkpoint,
    wanted: Sequence[Reference],
    limit: ParityLimit,
    in_float64: InFloat64 | None = None,
    *,
    config: ModelOptions = _FP32,
    target: ModelEntry | None = None,
) -> ParityReport:
    bundle = bundle_of(folder, checkpoint, config, target)
    report = measured_parity(bundle, checkpoint, wanted, limit, in_float64)
    if reason := refusal(checkpoint, report):
        raise ExportError(reason)
    return report


def check_refused(
    change: Callable[[onnx.GraphProto], None], folder: Path, *arguments: Any, **options: Any
) -> None:
    """Check that the graph in ``folder`` passes ``check_parity``, and that a changed one fails."""
    check_parity(folder, *arguments, **options)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    change(model.graph)
    onnx.save(model, folder / "model.onnx")
    with pytest.raises(ExportError, match="differs from the checkpoint"):
        check_parity(folder, *arguments, **options)


def rename_inputs(graph: onnx.GraphProto, **names: str) -> None:
    """Let every node read other tensors, by the names of those that it reads now."""
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]


def swap_keys_of_sources(graph: onnx.GraphProto) -> None:
    rename_inputs(graph, **{"cross.0.key": "cross.1.key", "cross.1.key": "cross.0.key"})


def count_positions_from_the_first_new_row(graph: onnx.GraphProto) -> None:
    """Positions 0, 1, ... in every call: right for a prefill, wrong after a prefix."""
    rename_inputs(graph, position_ids="own")
    graph.node.insert(0, onnx.helper.make_node("Sub", ["position_ids", "write_indices"], ["own"]))
