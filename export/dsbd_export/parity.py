"""The parity gate: the exported files on ONNX Runtime against the checkpoint, value by value."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsbd_export.checkpoint import Checkpoint
from dsbd_export.errors import ExportError
from dsbd_export.forest_cases import Reference
from dsbd_export.forest_engine import ForestEngine
from dsbd_runtime.bundle import MODEL_FILE, PRUNE_FILE, ParityCase, ParityReport

_SPARE_ROWS = 7  # behind the last row in use: rows full of noise that no node may see


def check_parity(
    folder: Path, checkpoint: Checkpoint, references: Sequence[Reference], atol: float
) -> ParityReport:
    """Run every case on ``folder``/model.onnx, then prune.onnx; return the errors found.

    Raises:
        ExportError: an error above ``atol`` (or no number at all), or a row moved wrongly.
    """
    longest = max(len(ref.case.prefix_ids) + len(ref.case.node_ids) for ref in references)
    engine = ForestEngine(
        folder / MODEL_FILE, folder / PRUNE_FILE, checkpoint, capacity=longest + _SPARE_ROWS
    )
    cases = [_checked_case(engine, checkpoint, reference, atol) for reference in references]
    _check_prune(engine, checkpoint)
    worst = max(case.max_abs_error for case in cases)
    return ParityReport(max_abs_error=worst, tolerance=atol, cases=cases)


def _checked_case(
    engine: ForestEngine, checkpoint: Checkpoint, reference: Reference, atol: float
) -> ParityCase:
    case = reference.case
    error = _max_abs_error(engine.logits(case), reference.logits)
    if not error <= atol:  # also when it is NaN
        raise ExportError(
            f"parity failed: the {checkpoint.role} (family {checkpoint.family}) differs from the "
            f"checkpoint by {error:.3g} in case {case.name} after {case.prompt_length} tokens, "
            f"the limit is {atol:.3g}; if that is rounding allow it with a larger atol, else this "
            "family is not supported"
        )
    return ParityCase(name=case.name, prompt_length=case.prompt_length, max_abs_error=error)


def _max_abs_error(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """Return the largest difference, infinite where the shapes differ, NaN where a value is."""
    if found.shape != wanted.shape:
        return float("inf")
    return float(np.max(np.abs(found - wanted)))


def _check_prune(engine: ForestEngine, checkpoint: Checkpoint) -> None:
    """Move a shuffled half of the rows to row 2 and compare every cache with numpy."""
    first_row = 2
    kept = np.random.default_rng(0).permutation(engine.capacity)[: engine.capacity // 2]
    wanted = [cache.copy() for cache in engine.caches]
    for cache in wanted:
        cache[:, :, first_row : first_row + len(kept)] = cache[:, :, kept]
    engine.move_rows(kept.astype(np.int64), first_row)
    if not all(map(np.array_equal, engine.caches, wanted)):
        raise ExportError(
            f"parity failed: prune.onnx of the {checkpoint.role} (family {checkpoint.family}) "
            "moves cache rows wrongly; this onnxruntime is not supported"
        )
