"""The top-k head: a graph that returns its K largest logits of a row, and the sum of all.

It is put on the finished file, after parity has judged the logits themselves, and is then judged
against those logits. Shapes are those of ``dsbd_runtime.graph``.

    top_logits, top_ids = TopK(logits, K)                  largest first, ties by lower id
    logsumexp           = top_logits[0] - LogSoftmax(logits)[top_ids[0]]

The last line instead of ReduceLogSumExp because of onnxruntime 1.31 on CPU: that one adds up one
after the other in float32 (20 rows of 128,256 logits: 16 ms and wrong by 2e-4; LogSoftmax 0.6 ms
and 6e-6), and every Reduce operator returns a wrong shape where no row is asked for.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from dsbd_export.errors import ExportError
from dsbd_runtime.graph import LOGITS, LOGSUMEXP, TOP_IDS, TOP_LOGITS

_PREFIX = "topk_head."  # of the names inside the head


def check_num_candidates(num_candidates: int, vocab_size: int) -> None:
    """Raise unless the vocabulary has as many tokens as the head is to return."""
    if num_candidates > vocab_size:
        raise ExportError(
            f"logits='topk:{num_candidates}' asks for more candidates than the vocabulary has "
            f"tokens, {vocab_size}; use topk:{vocab_size} at most, or full"
        )


def append_topk_head(model_file: Path, num_candidates: int) -> None:
    """Put the head on a graph file in place of its output ``logits``; weights stay as they are."""
    model = onnx.load(model_file, load_external_data=False)
    graph = model.graph
    position = [output.name for output in graph.output].index(LOGITS)
    logits = graph.output[position]
    num_rows = logits.type.tensor_type.shape.dim[0].dim_param
    graph.value_info.append(logits)
    outputs = [
        helper.make_tensor_value_info(TOP_LOGITS, TensorProto.FLOAT, [num_rows, num_candidates]),
        helper.make_tensor_value_info(TOP_IDS, TensorProto.INT64, [num_rows, num_candidates]),
        helper.make_tensor_value_info(LOGSUMEXP, TensorProto.FLOAT, [num_rows]),
    ]
    caches = [output for output in graph.output if output.name != LOGITS]
    del graph.output[:]
    graph.output.extend([*outputs, *caches])
    graph.node.extend(_head_nodes())
    graph.initializer.extend(
        numpy_helper.from_array(np.array([value], np.int64), _PREFIX + name)
        for name, value in (("k", num_candidates), ("first", 0), ("second", 1))
    )
    onnx.save(model, model_file)


def _head_nodes() -> list[onnx.NodeProto]:
    """Return the nodes from ``logits`` to the three outputs."""
    k, first, second, log_probs, best_logit, best_id, best_log_prob, row_sums = (
        _PREFIX + name
        for name in (
            "k",
            "first",
            "second",
            "log_probs",  # (R, V)
            "best_logit",  # (R, 1), as all below
            "best_id",
            "best_log_prob",
            "row_sums",
        )
    )
    return [
        helper.make_node("TopK", [LOGITS, k], [TOP_LOGITS, TOP_IDS], axis=-1, largest=1, sorted=1),
        helper.make_node("LogSoftmax", [LOGITS], [log_probs], axis=-1),
        helper.make_node("Slice", [TOP_LOGITS, first, second, second], [best_logit]),
        helper.make_node("Slice", [TOP_IDS, first, second, second], [best_id]),
        helper.make_node("GatherElements", [log_probs, best_id], [best_log_prob], axis=1),
        helper.make_node("Sub", [best_logit, best_log_prob], [row_sums]),
        helper.make_node("Squeeze", [row_sums, second], [LOGSUMEXP]),
    ]
