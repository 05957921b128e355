"""The parity gate: the exported files on ONNX Runtime against the checkpoint, value by value.

In fp32 every logit has to be right up to rounding. A lower precision or quantized weights are
judged by the mean KL divergence instead: that of real text by how good the precision is, those of
the forests, more loosely, by whether masks and positions are right. The share of rows with the
same most probable token is reported, but gates nothing: where two tokens are about as probable,
rounding decides between them, however good the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dsbd_export.checkpoint import Checkpoint
from dsbd_export.divergence import divergence
from dsbd_export.errors import ExportError
from dsbd_export.forest_cases import Reference
from dsbd_export.forest_engine import ForestEngine
from dsbd_export.parity_limits import ParityLimit
from dsbd_export.text_case import TEXT
from dsbd_runtime.bundle import MODEL_FILE, PRUNE_FILE, ParityCase, ParityReport

_SPARE_ROWS = 7  # behind the last row in use: rows full of noise that no node may see


def check_parity(
    folder: Path, checkpoint: Checkpoint, references: Sequence[Reference], limit: ParityLimit
) -> ParityReport:
    """Run every case on ``folder``/model.onnx, then prune.onnx; return the errors found.

    Raises:
        ExportError: a case above ``limit`` (or no number at all), or a row moved wrongly.
    """
    longest = max(len(ref.case.prefix_ids) + len(ref.case.node_ids) for ref in references)
    engine = ForestEngine(
        folder / MODEL_FILE, folder / PRUNE_FILE, checkpoint, capacity=longest + _SPARE_ROWS
    )
    cases = [_checked_case(engine, checkpoint, reference, limit) for reference in references]
    _check_prune(engine, checkpoint)
    summary = [case for case in cases if case.name == TEXT] or cases
    return ParityReport(
        measure=limit.measure,
        limit=limit.value,
        max_abs_error=max(case.max_abs_error for case in cases),
        mean_kl=float(np.mean([case.mean_kl for case in summary])),
        top1_agreement=float(np.mean([case.top1_agreement for case in summary])),
        cases=cases,
    )


def _checked_case(
    engine: ForestEngine, checkpoint: Checkpoint, reference: Reference, limit: ParityLimit
) -> ParityCase:
    case = reference.case
    found = divergence(engine.logits(case), reference.logits)
    error = getattr(found, limit.measure)
    highest = limit.value if case.name == TEXT else limit.forest_value
    if not error <= highest:  # also when it is NaN
        raise ExportError(
            f"parity failed: the {checkpoint.role} (family {checkpoint.family}) differs from the "
            f"checkpoint by {error:.3g} ({limit.measure}) in case {case.name} after "
            f"{case.prompt_length} tokens, the limit is {highest:.3g}; if that is rounding "
            f"allow it with a larger {limit.option}, else this family is not supported"
        )
    return ParityCase(
        name=case.name,
        prompt_length=case.prompt_length,
        max_abs_error=found.max_abs_error,
        mean_kl=found.mean_kl,
        top1_agreement=found.top1_agreement,
    )


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
