"""The parity gate as one call: what it measures, and its refusal as an error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.errors import ExportError
from dsbd_export.gate.parity import InFloat64, ParityLimit, measured_parity, refusal
from dsbd_export.parity_cases import Reference
from dsbd_runtime.bundle_files.bundle import ParityReport


def check_parity(
    folder: Path,
    checkpoint: Checkpoint,
    wanted: Sequence[Reference],
    limit: ParityLimit,
    in_float64: InFloat64 | None = None,
) -> ParityReport:
    report = measured_parity(folder, checkpoint, wanted, limit, in_float64)
    if reason := refusal(checkpoint, report):
        raise ExportError(reason)
    return report
