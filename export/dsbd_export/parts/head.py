"""Head: the logits of some nodes; and the top-k head: the K largest logits and the log-sum of all.

The top-k head is added to the finished file and compared with the logits. Shapes:
``dsbd_runtime.parts.head.head``.

    top_logits, top_ids = TopK(logits, K)                  largest first, ties by lower id
    logsumexp           = top_logits[0] - LogSoftmax(logits)[top_ids[0]], or for WebGPU
                          top_logits[0] + log(sum(exp(logits - top_logits[0])))

``logits`` stays an output, which costs nothing, because a host copies only the rows that it needs.
For a draft that proposes only some tokens (``draft_vocabulary``), the head reads the logits before
they are spread over the target's vocabulary, and ``logits`` is removed from the outputs.

ReduceLogSumExp is not used: onnxruntime 1.31 on a CPU sums one number after the other in float32
(20 rows of 128,256 logits: 16 ms, error 2e-4; LogSoftmax: 0.6 ms, 6e-6).
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from dsbd_export.capture.forest_graph import (
    Axis,
    CapturedCall,
    Example,
    ExportContract,
    ExportPart,
    Hook,
    Made,
)
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.config import ModelOptions
from dsbd_export.errors import ExportError
from dsbd_export.gate.parity_engine import parity_engine
from dsbd_export.gate.unwritten_bundle import unwritten_bundle
from dsbd_export.parity_cases import ForestCase, differences
from dsbd_export.parts.draft_vocabulary import cut_head, spread
from dsbd_forward.logits import TopLogits
from dsbd_runtime.bundle_files.bundle import Bundle
from dsbd_runtime.bundle_files.manifest import WEBGPU
from dsbd_runtime.parts.head.head import FULL, LOGIT_ROWS, LOGITS, LOGSUMEXP, TOP_IDS, TOP_LOGITS


class ExportedHead(ExportPart):
    """Logits over the vocabulary, (R, V) float32; -inf for tokens that a draft does not propose."""

    def contract(self) -> ExportContract:
        rows = Example((Axis("R", 3, min_size=0),))
        return ExportContract(
            inputs={LOGIT_ROWS: rows},
            outputs=(LOGITS,),
            entry={"logits": FULL, "full_logits": True},
            is_leading=True,
        )

    def hook(self, model: Any, graph: Any) -> Hook:
        proposed, vocab_size = self._checkpoint.proposed_tokens, self._checkpoint.vocab_size
        graph._tokens = None
        if proposed is not None:
            cut_head(model, proposed)
            graph._tokens = torch.from_numpy(proposed)

        def chosen(call: CapturedCall) -> nullcontext[None]:
            call.arguments["logits_to_keep"] = call.inputs[LOGIT_ROWS]
            call.outputs[LOGITS] = lambda: spread(call.logits.float(), graph._tokens, vocab_size)
            return nullcontext()

        return chosen

    def complete(self, made: Made) -> dict[str, Any]:
        checkpoint, options = self._checkpoint, made.options
        cases = [reference.case for reference in made.references]
        keeps_logits = True
        if options.num_top_logits:
            made.report(
                f"{checkpoint.role}: adding the top-k head and comparing it with the logits"
            )
            keeps_logits = add_topk_head(made.judged, checkpoint, cases, options)
        return {"logits": options.logits, "full_logits": keeps_logits}


_PREFIX = "topk_head."  # prefix of names inside the head

# Largest error relative to the largest logit. The head only copies and sums logits, so the
# precision of the graph before it (fp16, quantized) does not matter.
RELATIVE_LIMIT = 1e-5


def check_num_top_logits(num_top_logits: int, vocab_size: int) -> None:
    """Raise ExportError if the head would return more tokens than the vocabulary has."""
    if num_top_logits > vocab_size:
        raise ExportError(
            f"logits='topk:{num_top_logits}' names more logits than the vocabulary has "
            f"tokens, {vocab_size}; use topk:{vocab_size} at most, or full"
        )


@dataclass(frozen=True)
class ProposedLogits:
    """Logits of a draft before they are spread over the vocabulary."""

    logits: str  # name of the tensor, (R, n)
    tokens: str  # name of the initializer with their tokens, n int64 in any shape
    number: int  # n


def append_topk_head(model_file: Path, num_top_logits: int, *, for_webgpu: bool = False) -> bool:
    """Add the head to a graph file; return whether ``logits`` is still an output."""
    model = onnx.load(model_file, load_external_data=False)
    graph = model.graph
    proposed = proposed_logits(graph)
    if proposed is not None and proposed.number < num_top_logits:
        proposed = None  # the output is filled up with logits of -inf
    position = [output.name for output in graph.output].index(LOGITS)
    logits = graph.output[position]
    num_rows = logits.type.tensor_type.shape.dim[0].dim_param
    outputs = [
        helper.make_tensor_value_info(TOP_LOGITS, TensorProto.FLOAT, [num_rows, num_top_logits]),
        helper.make_tensor_value_info(TOP_IDS, TensorProto.INT64, [num_rows, num_top_logits]),
        helper.make_tensor_value_info(LOGSUMEXP, TensorProto.FLOAT, [num_rows]),
        *([logits] if proposed is None else []),
    ]
    caches = [output for output in graph.output if output.name != LOGITS]
    del graph.output[:]
    graph.output.extend([*outputs, *caches])
    graph.node.extend(_head_nodes(proposed, for_webgpu=for_webgpu))
    graph.initializer.extend(
        numpy_helper.from_array(np.array([value], np.int64), _PREFIX + name)
        for name, value in (("k", num_top_logits), ("first", 0), ("second", 1), ("all", -1))
        if proposed is not None or name != "all"
    )
    if proposed is not None:
        _remove_unused(graph)  # nodes that spread the logits
    onnx.save(model, model_file)
    return proposed is None


def proposed_logits(graph: onnx.GraphProto) -> ProposedLogits | None:
    """Return the input of ``draft_vocabulary.spread`` in a graph, None if it is not used."""
    producers = {name: node for node in graph.node for name in node.output}
    initializers = {value.name: value for value in graph.initializer}
    scatter = producers[LOGITS]
    if scatter.op_type != "ScatterElements":
        return None
    _others, tokens, logits = scatter.input
    while tokens in producers:  # a Where gives each row of logits the tokens
        tokens = producers[tokens].input[-1]
    return ProposedLogits(logits, tokens, int(np.prod(initializers[tokens].dims)))


def _remove_unused(graph: onnx.GraphProto) -> None:
    outputs = {output.name for output in graph.output}
    while True:
        read = {name for node in graph.node for name in node.input} | outputs
        unused = [node for node in graph.node if not read & {*node.output}]
        if not unused:
            break
        for node in unused:
            graph.node.remove(node)
    for value in [value for value in graph.initializer if value.name not in read]:
        graph.initializer.remove(value)


def _head_nodes(proposed: ProposedLogits | None, *, for_webgpu: bool) -> list[onnx.NodeProto]:
    k, first, second, best_logit, own_ids, tokens, every, row_sums = (
        _PREFIX + name
        for name in ("k", "first", "second", "best_logit", "ids", "tokens", "all", "row_sums")
    )
    logits, ids = (LOGITS, TOP_IDS) if proposed is None else (proposed.logits, own_ids)
    log_sum = _log_sum_by_exponentials if for_webgpu else _log_sum_by_softmax
    nodes = [
        helper.make_node("TopK", [logits, k], [TOP_LOGITS, ids], axis=-1, largest=1, sorted=1),
        helper.make_node("Slice", [TOP_LOGITS, first, second, second], [best_logit]),
        *log_sum(logits, best_logit, ids, row_sums),
        # a sum of one number: for WebGPU outputs are computed, see ``compute_outputs``
        helper.make_node("ReduceSum", [row_sums, second], [LOGSUMEXP], keepdims=0)
        if for_webgpu
        else helper.make_node("Squeeze", [row_sums, second], [LOGSUMEXP]),
    ]
    if proposed is not None:
        nodes += [
            helper.make_node("Reshape", [proposed.tokens, every], [tokens]),
            helper.make_node("Gather", [tokens, own_ids], [TOP_IDS]),
        ]
    return nodes


def _log_sum_by_softmax(
    logits: str, best_logit: str, ids: str, row_sums: str
) -> list[onnx.NodeProto]:
    first, second, best_id, log_probs, best_log_prob = (
        _PREFIX + name for name in ("first", "second", "best_id", "log_probs", "best_log_prob")
    )
    return [
        helper.make_node("Slice", [ids, first, second, second], [best_id]),
        helper.make_node("LogSoftmax", [logits], [log_probs], axis=-1),
        helper.make_node("GatherElements", [log_probs, best_id], [best_log_prob], axis=1),
        helper.make_node("Sub", [best_logit, best_log_prob], [row_sums]),
    ]


def _log_sum_by_exponentials(
    logits: str, best_logit: str, ids: str, row_sums: str
) -> list[onnx.NodeProto]:
    """Return nodes for best + log(sum(exp(logits - best))), see ``webgpu_graph``."""
    second, below, powers, total, log_total = (
        _PREFIX + name for name in ("second", "below", "powers", "total", "log_total")
    )
    return [
        helper.make_node("Sub", [logits, best_logit], [below]),
        helper.make_node("Exp", [below], [powers]),
        helper.make_node("ReduceSum", [powers, second], [total], keepdims=1),
        helper.make_node("Log", [total], [log_total]),
        helper.make_node("Add", [best_logit, log_total], [row_sums]),
    ]


@dataclass(frozen=True)
class HeadRows:
    """Outputs for R rows: (R, K) int64, (R, K) float32, (R,) float32, (R, V) float32 or None."""

    top_ids: NDArray[np.int64]
    top_logits: NDArray[np.float32]
    logsumexp: NDArray[np.float32]
    logits: NDArray[np.float32] | None = None


def add_topk_head(
    bundle: Bundle, checkpoint: Checkpoint, cases: Sequence[ForestCase], options: ModelOptions
) -> bool:
    """Add the head by ``append_topk_head``; raise ExportError if it differs from the logits."""
    role, num_top_logits = checkpoint.role, options.num_top_logits
    longest = max(case.prompt_length for case in cases)
    cases = [case for case in cases if case.prompt_length == longest]
    with parity_engine(bundle, role) as dense:
        logits_by_case = [dense.logits(case) for case in cases]
    keeps_logits = append_topk_head(
        bundle.model_path(role), num_top_logits, for_webgpu=options.form == WEBGPU
    )
    entry = bundle.entry(role)
    entry = replace(entry, logits=f"topk:{num_top_logits}", full_logits=keeps_logits)
    bundle = unwritten_bundle(bundle.path, role, entry, bundle.manifest.target)
    with parity_engine(bundle, role) as engine:
        for case, logits in zip(cases, logits_by_case, strict=True):
            top = engine.result(case).logits
            assert isinstance(top, TopLogits)  # the entry says so
            full = None if top.kept is None else top.kept.read(np.arange(len(top)))
            rows = HeadRows(top.top_ids, top.top_logits, top.logsumexp, full)
            if problem := head_problem(rows, logits, num_top_logits):
                raise ExportError(
                    f"parity failed: the top-k head of the {role} (family "
                    f"{checkpoint.family}) is wrong in case {case.name}: {problem}; export with "
                    "--logits full"
                )
    return keeps_logits


def head_problem(rows: HeadRows, logits: NDArray[np.float32], num_top_logits: int) -> str | None:
    """Return the first error in the head's rows, given all logits (R, V); None if all are right."""
    wanted_shape = (len(logits), num_top_logits)
    if rows.top_ids.shape != wanted_shape or rows.top_logits.shape != wanted_shape:
        return f"shape {rows.top_ids.shape}, expected {wanted_shape}"
    if rows.logits is not None and rows.logits.shape != logits.shape:
        return f"logits has shape {rows.logits.shape}, expected {logits.shape}"
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :num_top_logits]
    possible = np.abs(logits, where=logits > -np.inf, out=np.zeros_like(logits))
    limit = RELATIVE_LIMIT * max(1.0, float(possible.max()))
    largest = logits.max(axis=1).astype(np.float64)
    log_sums = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
    best, chosen = (np.take_along_axis(logits, by, axis=1) for by in (ids, rows.top_ids))
    errors = {
        "top_logits": differences(rows.top_logits, best),
        # Two engines may round a tie differently: an id is right if its logit is right.
        "top_ids": differences(rows.top_logits, chosen),
        "logsumexp": differences(rows.logsumexp, log_sums),
    }
    if rows.logits is not None:
        errors["logits"] = differences(rows.logits, logits)
    for name, error in errors.items():
        worst = float(error.max())
        if not worst <= limit:  # also when it is NaN
            return f"{name} differs by {worst:.3g}, the limit is {limit:.3g}"
    in_order = np.sort(rows.top_ids, axis=1)
    if (in_order[:, 1:] == in_order[:, :-1]).any():
        return "top_ids names a token twice"
    return None
