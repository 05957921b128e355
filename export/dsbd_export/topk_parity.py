"""The top-k head judged by value: on ONNX Runtime against the logits of the same graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsbd_export.checkpoint import Checkpoint
from dsbd_export.errors import ExportError
from dsbd_export.forest_cases import ForestCase
from dsbd_export.forest_engine import ForestEngine
from dsbd_export.topk_head import append_topk_head
from dsbd_runtime.bundle import MODEL_FILE, PRUNE_FILE
from dsbd_runtime.graph import LOGSUMEXP, TOP_IDS, TOP_LOGITS

# Of the largest logit: the head only copies logits and adds up, so the precision of the graph
# before it, fp16 or quantized, plays no part.
_RELATIVE_LIMIT = 1e-5


@dataclass(frozen=True)
class HeadRows:
    """What the head returned for R rows: (R, K) int64, (R, K) float32, (R,) float32."""

    top_ids: NDArray[np.int64]
    top_logits: NDArray[np.float32]
    logsumexp: NDArray[np.float32]


def add_topk_head(
    folder: Path, checkpoint: Checkpoint, cases: Sequence[ForestCase], num_candidates: int
) -> None:
    """Put the head on ``folder``/model.onnx and compare it with the logits of before.

    cases: those with the longest prompt are run.

    Raises:
        ExportError: an id, a logit or a sum is wrong.
    """
    longest = max(case.prompt_length for case in cases)
    cases = [case for case in cases if case.prompt_length == longest]
    dense = _engine(folder, checkpoint, cases)
    logits_by_case = [dense.logits(case) for case in cases]
    del dense  # one engine at a time
    append_topk_head(folder / MODEL_FILE, num_candidates)
    engine = _engine(folder, checkpoint, cases)
    for case, logits in zip(cases, logits_by_case, strict=True):
        found = HeadRows(*engine.outputs(case, [TOP_IDS, TOP_LOGITS, LOGSUMEXP]))
        if problem := head_problem(found, logits, num_candidates):
            raise ExportError(
                f"parity failed: the top-k head of the {checkpoint.role} (family "
                f"{checkpoint.family}) is wrong in case {case.name}: {problem}; export with "
                "--logits full"
            )


def head_problem(found: HeadRows, logits: NDArray[np.float32], num_candidates: int) -> str | None:
    """Return what is wrong with the head's rows, given all logits (R, V); None if nothing is."""
    wanted_shape = (len(logits), num_candidates)
    if found.top_ids.shape != wanted_shape or found.top_logits.shape != wanted_shape:
        return f"shape {found.top_ids.shape}, expected {wanted_shape}"
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :num_candidates]
    limit = _RELATIVE_LIMIT * max(1.0, float(np.abs(logits).max()))
    largest = logits.max(axis=1).astype(np.float64)
    sums = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
    errors = {
        "top_logits": found.top_logits - np.take_along_axis(logits, ids, axis=1),
        # Two engines may round a tie differently: an id is right if its logit is.
        "top_ids": found.top_logits - np.take_along_axis(logits, found.top_ids, axis=1),
        "logsumexp": found.logsumexp - sums,
    }
    for name, error in errors.items():
        worst = float(np.abs(error).max())
        if not worst <= limit:  # also when it is NaN
            return f"{name} differs by {worst:.3g}, the limit is {limit:.3g}"
    in_order = np.sort(found.top_ids, axis=1)
    if (in_order[:, 1:] == in_order[:, :-1]).any():
        return "top_ids names a token twice"
    return None


def _engine(folder: Path, checkpoint: Checkpoint, cases: Sequence[ForestCase]) -> ForestEngine:
    capacity = max(len(case.prefix_ids) + len(case.node_ids) for case in cases)
    return ForestEngine(folder / MODEL_FILE, folder / PRUNE_FILE, checkpoint, capacity=capacity)
