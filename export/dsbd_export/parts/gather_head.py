"""Gather head: a graph that returns the logits of named tokens and the log-sum of all.

It is put on the finished file as the top-k head is, and judged against the logits in the same way.
Shapes are those of ``dsbd_runtime.parts.head``.

    gathered_logits = GatherND(logits, [gather_rows, gather_ids])      N pairs, copied bit for bit
    logsumexp       = as in ``topk_head``, from the largest logit of a row

The logits that it reads stay an output: a call without pairs reads these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.errors import ExportError
from dsbd_export.gate.parity_engine import parity_engine
from dsbd_export.gate.unwritten_bundle import with_head
from dsbd_export.parity_cases import ForestCase, differences
from dsbd_export.parts.topk_head import (
    log_sums,
    logit_limit,
    logsumexp_nodes,
    longest_cases,
)
from dsbd_forward.logits import DenseLogits, Gather, GatheredLogits
from dsbd_runtime.bundle_files.bundle import Bundle
from dsbd_runtime.parts.head import (
    GATHER,
    GATHER_IDS,
    GATHER_ROWS,
    GATHERED_LOGITS,
    LOGIT_ROWS,
    LOGITS,
    LOGSUMEXP,
)

_PREFIX = "gather_head."  # of the names inside the head
_NUM_PAIRS = "N"
_PAIRS_A_ROW = 32  # of the comparison


def append_gather_head(model_file: Path) -> None:
    """Put the head on a graph file before its output ``logits``; weights stay as they are."""
    model = onnx.load(model_file, load_external_data=False)
    graph = model.graph
    position = [output.name for output in graph.output].index(LOGITS)
    logits = graph.output[position]
    num_rows = logits.type.tensor_type.shape.dim[0].dim_param
    outputs = [
        helper.make_tensor_value_info(GATHERED_LOGITS, TensorProto.FLOAT, [_NUM_PAIRS]),
        helper.make_tensor_value_info(LOGSUMEXP, TensorProto.FLOAT, [num_rows]),
        logits,
    ]
    caches = [output for output in graph.output if output.name != LOGITS]
    del graph.output[:]
    graph.output.extend([*outputs, *caches])
    behind = [value.name for value in graph.input].index(LOGIT_ROWS) + 1
    for name in (GATHER_IDS, GATHER_ROWS):
        pairs = helper.make_tensor_value_info(name, TensorProto.INT64, [_NUM_PAIRS])
        graph.input.insert(behind, pairs)
    graph.node.extend(_head_nodes())
    graph.initializer.append(numpy_helper.from_array(np.array([1], np.int64), _PREFIX + "one"))
    onnx.save(model, model_file)


def _head_nodes() -> list[onnx.NodeProto]:
    """Return the nodes from ``logits`` and the pairs to the two outputs of the head."""
    one, best_logit, best_id, rows, ids, pairs = (
        _PREFIX + name for name in ("one", "best_logit", "best_id", "rows", "ids", "pairs")
    )
    return [
        helper.make_node("TopK", [LOGITS, one], [best_logit, best_id], axis=-1),  # (R, 1) each
        *logsumexp_nodes(_PREFIX, best_logit, best_id, one),
        helper.make_node("Unsqueeze", [GATHER_ROWS, one], [rows]),  # (N, 1)
        helper.make_node("Unsqueeze", [GATHER_IDS, one], [ids]),
        helper.make_node("Concat", [rows, ids], [pairs], axis=1),  # (N, 2)
        helper.make_node("GatherND", [LOGITS, pairs], [GATHERED_LOGITS]),
    ]


@dataclass(frozen=True)
class GatheredRows:
    """Outputs for N pairs of R rows: (N,) float32, (R,) float32, (R, V) float32."""

    gathered_logits: NDArray[np.float32]
    logsumexp: NDArray[np.float32]
    logits: NDArray[np.float32]


def add_gather_head(bundle: Bundle, checkpoint: Checkpoint, cases: Sequence[ForestCase]) -> None:
    """Put the head on the graph of an engine and compare it with the logits without it.

    cases: those with the longest prompt are run.

    Raises:
        ExportError: a logit or a sum is wrong.
    """
    role = checkpoint.role
    cases = longest_cases(cases)
    with parity_engine(bundle, role) as dense:
        logits_by_case = [dense.logits(case) for case in cases]
    append_gather_head(bundle.model_path(role))
    rng = np.random.default_rng(0)
    with parity_engine(with_head(bundle, role, GATHER), role) as engine:
        for case, logits in zip(cases, logits_by_case, strict=True):
            gather = _random_pairs(logits.shape, rng)
            found, whole = engine.result(case, gather).logits, engine.result(case).logits
            assert isinstance(found, GatheredLogits) and isinstance(whole, DenseLogits)
            rows = GatheredRows(found.values, found.logsumexp, whole.values)
            if problem := gather_problem(rows, logits, gather):
                raise ExportError(
                    f"parity failed: the gather head of the {role} (family "
                    f"{checkpoint.family}) is wrong in case {case.name}: {problem}; export with "
                    "--logits full"
                )


def _random_pairs(shape: tuple[int, ...], rng: np.random.Generator) -> Gather:
    """Return pairs of (R, V) logits in no order: first, last and random tokens of every row."""
    num_rows, vocab_size = shape
    ids = rng.integers(vocab_size, size=(num_rows, _PAIRS_A_ROW))
    ids[:, 0], ids[:, 1] = 0, vocab_size - 1
    rows = np.repeat(np.arange(num_rows), _PAIRS_A_ROW)
    order = rng.permutation(rows.size)
    return Gather(rows[order], ids.ravel()[order])


def gather_problem(found: GatheredRows, logits: NDArray[np.float32], gather: Gather) -> str | None:
    """Return the first error of the head, given all logits (R, V); None without one."""
    wanted = logits[gather.rows, gather.token_ids]
    limit = logit_limit(logits)
    compared: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {
        GATHERED_LOGITS: (found.gathered_logits, wanted),
        LOGSUMEXP: (found.logsumexp, log_sums(logits)),
        LOGITS: (found.logits, logits),
    }
    for name, (array, expected) in compared.items():
        if array.shape != expected.shape:
            return f"{name} has shape {array.shape}, expected {expected.shape}"
        worst = float(differences(array, expected).max())
        if not worst <= limit:  # also when it is NaN
            return f"{name} differs by {worst:.3g}, the limit is {limit:.3g}"
    return None
