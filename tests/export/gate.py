"""The parity gate as one call: what it measures, and its refusal as an error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsbd_export.capture.forest_graph import joined
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.config import ModelOptions
from dsbd_export.errors import ExportError
from dsbd_export.gate.parity import InFloat64, ParityLimit, measured_parity, refusal
from dsbd_export.gate.unwritten_bundle import unwritten_bundle
from dsbd_export.opening import source_of
from dsbd_export.parity_cases import Reference, forest_cases, reference_logits
from dsbd_export.pipeline import manifest_entry
from dsbd_runtime.bundle_files.bundle import Bundle, ModelEntry, ParityReport

_FP32 = ModelOptions()


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


def references(model: Any, checkpoint: Checkpoint) -> list[Reference]:
    """Return all forests with the logits of the unmodified model."""
    return [
        Reference(case=case, logits=reference_logits(model, case))
        for case in forest_cases(checkpoint)
    ]


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
