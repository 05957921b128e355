"""Engine of the parity gate: the exported files on ONNX Runtime's CPU provider.

Independent of the runtime package on purpose: a mistake there must not hide one here.

The CPU provider has no MatMul, Add, RMSNormalization, ... in bf16, so a bf16 graph runs as its
twin in fp32: every weight is the bf16 one, widened, and all arithmetic and the caches are fp32.
Parity of a bf16 export judges the graph and the rounding of its weights, not the rounding of
activations and caches on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.errors import ExportError, reason_of
from dsbd_export.gate.mapped_pages import dropped_pages
from dsbd_export.gate.parity_checkpoints import ParityCheckpoint
from dsbd_export.gate.parity_sources import ParitySources
from dsbd_export.gate.seen_rows import NodesTogether, SeenRows, rows_above
from dsbd_export.parity_cases import ForestCase
from dsbd_forward.logits import Gather
from dsbd_runtime.bundle_files.bundle import FOLD_FILE, MODEL_FILE, PRUNE_FILE, WEIGHTS_FILE
from dsbd_runtime.engine.graph import (
    ATTENTION_MASK,
    ATTENTION_MASK_SLIDING,
    FEATURE_INDEX,
    FEATURE_ROWS,
    FEATURES,
    GATHER_IDS,
    GATHER_ROWS,
    GATHERED_LOGITS,
    INPUT_IDS,
    LOGIT_ROWS,
    LOGITS,
    OWN_FEATURES,
    POSITION_IDS,
    RECENT_WRITE_INDICES,
    SRC_RECENT_ROWS,
    SRC_ROWS,
    TARGET_FEATURES,
    WRITE_INDICES,
)
from dsbd_runtime.ort.ort_module import import_ort, keep_int8_products_exact
from dsbd_runtime.parts.cache_entries import (
    most_new_rows,
    parts_of,
    past_name,
    present_name,
    recent,
    recurrent,
)
from dsbd_runtime.parts.encoder_entry import ENCODER_FILE, ROW_POSITIONS

_PREFIX_CHUNK = 256  # rows a call; the mask of a long prefix stays small
_MOST_NEW_ROWS = 2**31
_ERROR_LOG_LEVEL = 3
_WEIGHTS_FOLDER_OPTION = "session.model_external_initializers_file_folder_path"
# bf16 runs as a twin in fp32, see fp32_twin.
_CACHE_DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": np.float32}

# Products that need the optimizations with which they are served (ONNX Runtime 1.31.1; without them
# results are wrong, and no error says so). Blocks compute in another precision when not packed, and
# in fp16 their scales have to be constants when the graph is opened, not widened when they are
# used. Integers saturate on some processors, see ``keep_int8_products_exact``.
_BLOCKS, _INTEGERS = "MatMulNBits", "MatMulInteger"
_QUANTIZED_PRODUCTS = {_BLOCKS, _INTEGERS}

LOW, HIGH = TensorProto.BFLOAT16, TensorProto.FLOAT


class ForestEngine:
    """The sessions of an engine and their caches.

    Attributes:
        capacity: rows of the caches (C).
        caches: key and value of each layer, (1, Hkv, C, D) in the precision of the checkpoint's
            ``caches`` (fp32 for bf16), full of noise at first: a graph that looks at rows its mask
            hides cannot pass. Recent rows are as many and more, see ``ParityCheckpoint``.
        is_recent: of each of the caches, whether it has recent rows.
    """

    def __init__(self, folder: Path, checkpoint: Checkpoint, *, capacity: int) -> None:
        """Open the engine in a folder."""
        caches = checkpoint.caches
        rng = np.random.default_rng(0)
        parts = parts_of(caches)
        names = [(cache.layer, part) for cache, part in parts]
        self.capacity = capacity
        self._recent = ParityCheckpoint(caches, capacity) if recent(caches) else None
        self.is_recent = [cache in recent(caches) for cache, _ in parts]
        num_recent = 0 if self._recent is None else self._recent.capacity
        self.caches = [
            rng.standard_normal(
                cache.shape(part, num_recent if is_recent else capacity), dtype=np.float32
            ).astype(_CACHE_DTYPES[cache.dtype])
            for (cache, part), is_recent in zip(parts, self.is_recent, strict=True)
        ]
        self._past_names = [past_name(*name) for name in names]
        self._present_names = [present_name(*name) for name in names]
        # These values share the memory of ``caches``.
        ort = import_ort()
        self._cache_values = [ort.OrtValue.ortvalue_from_numpy(cache) for cache in self.caches]
        dtype = caches[0].dtype
        self._weights_file = folder / WEIGHTS_FILE
        self._model = parity_session(folder / MODEL_FILE, dtype)
        self._prune = parity_session(folder / PRUNE_FILE, dtype)
        self._fold = parity_session(folder / FOLD_FILE, "fp32") if recurrent(caches) else None
        encoder = checkpoint.encoder
        self._sources = None
        if encoder is not None:
            shared = folder.with_name("target") / ENCODER_FILE if encoder.is_shared else None
            self._sources = ParitySources(
                parity_session(folder / ENCODER_FILE, dtype),
                encoder,
                None if shared is None else parity_session(shared, dtype),
            )
        self._reads_positions = encoder is not None and encoder.reads_positions
        self._masks = checkpoint.masks
        self._returns_features = checkpoint.feature_layers is not None
        self._window = checkpoint.sliding_window
        self._most_new_rows = most_new_rows(caches, _MOST_NEW_ROWS)

    def logits(self, case: ForestCase) -> NDArray[np.float32]:
        """Return (R, V) float32: fill the cache with the prefix, then run the nodes."""
        return self.outputs(case, [LOGITS])[0]

    def outputs(
        self, case: ForestCase, names: list[str], gather: Gather | None = None
    ) -> list[NDArray[Any]]:
        """Return the named outputs, a row for each of the R compared nodes.

        Most of a long prefix is folded into a checkpoint, and what its rows were becomes noise.

        gather: the pairs of a gather head, whose first output has a number for each.
        """
        if case.together:
            return self._outputs_together(case, names, gather)
        num_prefix, features = len(case.prefix_ids), case.features
        no_rows = np.zeros(0, np.int64)
        no_pairs = None if gather is None else Gather(no_rows, no_rows)
        if self._recent is not None:
            self._recent.begin()
        for start in range(0, num_prefix, _PREFIX_CHUNK):
            chunk = case.prefix_ids[start : start + _PREFIX_CHUNK]
            inputs = self._source_inputs([case], [len(chunk)])
            if features is not None:
                inputs = self._feature_inputs(features[start : start + len(chunk)])
            parents = np.arange(-1, len(chunk) - 1)
            self._step(chunk, parents, start, no_rows, names, inputs, no_pairs)
        if self._recent is not None:
            self._fold_prefix(num_prefix)
        inputs = self._source_inputs([case], [len(case.node_ids)])
        if features is not None:
            inputs = self._node_features(case, features[num_prefix:], no_pairs)
        return self._step(case.node_ids, case.parents, num_prefix, case.rows, names, inputs, gather)

    def _outputs_together(
        self, case: ForestCase, names: list[str], gather: Gather | None
    ) -> list[NDArray[Any]]:
        """Return the outputs of requests whose nodes are in one call, behind prefixes of each.

        The prefixes lie one behind the other, each computed in a call of its own.
        """
        no_rows = np.zeros(0, np.int64)
        no_pairs = None if gather is None else Gather(no_rows, no_rows)
        nodes = NodesTogether.of(case.requests)
        row_positions = np.zeros(self.capacity, np.int64)
        for request, prefix in zip(case.requests, nodes.prefixes, strict=True):
            tokens, first = request.prefix_ids, int(prefix[0])
            row_positions[slice(*prefix)] = np.arange(len(tokens))
            if len(tokens):
                parents = np.arange(-1, len(tokens) - 1)
                no_prefix = np.tile([first, first], (len(tokens), 1))
                seen = SeenRows.of(parents, first, row_positions, no_prefix)
                inputs = self._source_inputs([request], [len(tokens)])
                self._step(tokens, parents, first, no_rows, names, inputs, no_pairs, seen)
        inputs = self._source_inputs(case.requests, nodes.sizes)
        ids, parents, first = nodes.node_ids, nodes.parents, int(nodes.prefixes[-1, 1])
        prefixes = np.repeat(nodes.prefixes, nodes.sizes, axis=0)
        seen = SeenRows.of(parents, first, row_positions, prefixes)
        return self._step(ids, parents, first, nodes.rows, names, inputs, gather, seen)

    def move_rows(
        self, src_rows: NDArray[np.int64], first_row: int, recent_rows: NDArray[np.int64]
    ) -> None:
        """Move cache rows, and other recent ones to the same place, with the prune graph."""
        first = np.array([first_row], np.int64)
        inputs = {SRC_ROWS: src_rows, WRITE_INDICES: first}
        if self._recent is not None:
            inputs |= {SRC_RECENT_ROWS: recent_rows, RECENT_WRITE_INDICES: first}
        self._run(self._prune, inputs, [])

    def _fold_prefix(self, num_prefix: int) -> None:
        """Fold the first rows of a long prefix, which no row sees any more."""
        assert self._recent is not None
        rows = self._recent.rows_to_fold(num_prefix)
        if not len(rows):
            return
        names = zip(self._past_names, self.caches, self.is_recent, strict=True)
        recent_rows = {name: cache for name, cache, is_recent in names if is_recent}
        if self._fold is not None:
            wanted = self._recent.folded_names
            with as_export_errors():
                found = self._fold.run(wanted, self._recent.fold_inputs(rows, recent_rows))
            self._recent.take(found)
        for cache in recent_rows.values():
            noise = np.random.default_rng(len(rows)).standard_normal(cache[:, :, rows].shape)
            cache[:, :, rows] = noise

    def _step(
        self,
        token_ids: NDArray[np.int64],
        parents: NDArray[np.int64],
        first_row: int,
        logit_rows: NDArray[np.int64],
        outputs: list[str],
        further: Mapping[str, NDArray[Any]],
        gather: Gather | None,
        seen: SeenRows | None = None,
    ) -> list[NDArray[Any]]:
        """Return the named outputs of nodes, by as many calls as their number takes.

        further: inputs of a feature draft, which takes any number in one call, or of a source.
        gather: the pairs of a gather head, None for any other.
        seen: by the nodes; None: all rows before them, which are a path.
        """
        if seen is None:
            seen = SeenRows.of(parents, first_row, np.arange(self.capacity))
        visible, positions, row_positions = seen.visible, seen.positions, seen.row_positions
        near = visible
        if self._window is not None:
            near = visible & (positions[:, None] - row_positions < self._window)
        mask_by_name = {ATTENTION_MASK: visible, ATTENTION_MASK_SLIDING: near}
        found = []
        for start in range(0, len(token_ids), self._most_new_rows):
            part = slice(start, start + self._most_new_rows)
            is_wanted = (start <= logit_rows) & (logit_rows < part.stop)
            inputs = {
                INPUT_IDS: token_ids[None, part],
                POSITION_IDS: positions[None, part],
                WRITE_INDICES: np.array([first_row + start], np.int64),
                LOGIT_ROWS: logit_rows[is_wanted] - start,
                **{name: mask_by_name[name][None, None, part] for name in self._masks},
                **further,
                **_gather_inputs(gather, is_wanted),
            }
            if self._recent is not None:
                number = self._recent.num_ancestors
                above = rows_above(parents, first_row, number)
                inputs |= self._recent.inputs(visible[part], above[part], first_row + start)
            if self._reads_positions:
                inputs[ROW_POSITIONS] = row_positions
            if self._returns_features:
                inputs[FEATURE_ROWS] = np.arange(len(token_ids[part]))
            found.append(self._run(self._model, inputs, outputs))
        joined = [np.concatenate(arrays) for arrays in zip(*found, strict=True)]
        if gather is not None and len(found) > 1:  # the calls' pairs lie one behind the other
            order = (logit_rows[gather.rows] // self._most_new_rows).argsort(kind="stable")
            gathered = joined[outputs.index(GATHERED_LOGITS)]
            gathered[order] = gathered.copy()
        return joined

    def _source_inputs(
        self, requests: Sequence[ForestCase], num_rows: Sequence[int]
    ) -> dict[str, NDArray[Any]]:
        """Return the inputs of a call with so many rows of each request, none without an encoder.

        A model with an encoder has a source in all of its cases.
        """
        if self._sources is None:
            return {}
        sources = [each.source_ids if each.sound is None else each.sound for each in requests]
        known = [source for source in sources if source is not None]
        with as_export_errors():
            return self._sources.inputs(known, np.repeat(np.arange(len(known)), num_rows))

    def _feature_inputs(
        self,
        target: NDArray[np.float32],
        own: NDArray[Any] | None = None,
        index: NDArray[np.int64] | None = None,
    ) -> dict[str, NDArray[Any]]:
        """Return the feature inputs of a call; without ``index`` every row has the target's."""
        dtype = self.caches[0].dtype
        if own is None:
            width = next(i.shape[1] for i in self._model.get_inputs() if i.name == OWN_FEATURES)
            own = np.zeros((0, width), dtype)
        return {
            TARGET_FEATURES: target.astype(dtype),
            OWN_FEATURES: own,
            FEATURE_INDEX: np.arange(len(target)) if index is None else index,
        }

    def _node_features(
        self, case: ForestCase, target: NDArray[np.float32], no_pairs: Gather | None
    ) -> dict[str, NDArray[Any]]:
        """Return the feature inputs of all nodes; own features are computed layer by layer.

        target: (S, width) float32.
        """
        if not case.uses_own:
            return self._feature_inputs(target)
        is_root = case.parents < 0
        roots = target[is_root]
        index = np.where(is_root, is_root.cumsum() - 1, len(roots) + case.parents)
        own = None
        num_known, num_nodes = int(is_root.sum()), len(case.parents)
        while num_known < num_nodes:  # nodes stand in the order of their depths
            nodes = slice(num_known)
            inputs = self._feature_inputs(roots, own, index[nodes])
            (own,) = self._step(
                case.node_ids[nodes],
                case.parents[nodes],
                len(case.prefix_ids),
                np.zeros(0, np.int64),
                [FEATURES],
                inputs,
                no_pairs,
            )
            num_known = int((case.parents < num_known).sum())
        return self._feature_inputs(roots, own, index)

    def _run(
        self,
        session: Any,
        inputs: Mapping[str, NDArray[Any]],
        outputs: list[str],
    ) -> list[NDArray[Any]]:
        """Run with every cache bound to both its input and its output."""
        binding = session.io_binding()
        for name, array in inputs.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        for name in outputs:
            binding.bind_output(name)
        for past, present, value in zip(
            self._past_names, self._present_names, self._cache_values, strict=True
        ):
            binding.bind_ortvalue_input(past, value)
            binding.bind_ortvalue_output(present, value)
        with as_export_errors(), dropped_pages(self._weights_file):
            session.run_with_iobinding(binding)
        return [binding.get_outputs()[index].numpy() for index in range(len(outputs))]


def _gather_inputs(
    gather: Gather | None, is_wanted: NDArray[np.bool_]
) -> dict[str, NDArray[np.int64]]:
    """Return the inputs of a gather head for some of the logit rows, (R,) bool."""
    if gather is None:
        return {}
    is_pair = is_wanted[gather.rows]
    rows = is_wanted.cumsum()[gather.rows[is_pair]] - 1
    return {GATHER_ROWS: rows, GATHER_IDS: gather.token_ids[is_pair]}


def parity_session(file: Path, dtype: str) -> Any:
    """Open a graph of ``dtype``: in bf16 its twin in fp32."""
    ort = import_ort()
    with as_export_errors():
        operators = _operators(file)
        is_quantized = not _QUANTIZED_PRODUCTS.isdisjoint(operators)
        is_widened = dtype != "fp32" and not is_quantized
        options = _widening_one_by_one(ort) if is_widened else ort.SessionOptions()
        options.log_severity_level = _ERROR_LOG_LEVEL
        options.intra_op_num_threads = torch.get_num_threads()  # see ``limited_threads``
        # A few calls between which other sessions run: waiting busily only disturbs them.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry(_WEIGHTS_FOLDER_OPTION, str(file.parent))
        if _BLOCKS not in operators:
            # Prepacked weights would be a second copy of them for a few calls.
            options.add_session_config_entry("session.disable_prepacking", "1")
        if _INTEGERS in operators:
            keep_int8_products_exact(options)
        graph = fp32_twin(file) if dtype == "bf16" else str(file)
        return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def _widening_one_by_one(ort: ModuleType) -> Any:
    """Return options with which a weight is widened to fp32 when it is used, then dropped.

    The CPU provider computes in fp32. By default it widens all weights when it opens a graph,
    which takes twice their size; and it would widen many ahead of their use, and keep the memory.
    """
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    return options


def _operators(file: Path) -> set[str]:
    return {node.op_type for node in onnx.load(file, load_external_data=False).graph.node}


@contextlib.contextmanager
def as_export_errors() -> Iterator[None]:
    """Turn any failure of ONNX Runtime, whose exceptions share no base, into ExportError."""
    try:
        yield
    except Exception as error:
        raise ExportError(
            f"parity failed: onnxruntime cannot run the graph: {reason_of(error)}; "
            "this family is not supported"
        ) from error


def fp32_twin(model_file: Path) -> bytes:
    """Return the twin; its weights stay where they are, in the external data of ``model_file``.

    Each is widened where it is used, right before: all at once would take twice their size.
    """
    model = onnx.load(model_file, load_external_data=False)
    graph = model.graph
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == LOW:
            value.type.tensor_type.elem_type = HIGH
    del graph.value_info[:]
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        _widen_attribute(attribute)
    stored = {weight.name for weight in graph.initializer if weight.data_type == LOW}
    nodes = [part for node in graph.node for part in _with_widened_weights(node, stored)]
    del graph.node[:]
    graph.node.extend(nodes)
    twin: bytes = model.SerializeToString()
    return twin


def _with_widened_weights(node: onnx.NodeProto, stored: set[str]) -> list[onnx.NodeProto]:
    """Return a node between the Casts that it needs, one for each stored weight that it reads."""
    if node.op_type == "Gather" and node.input[0] in stored:  # few rows of an embedding
        rows, (result,) = f"{node.output[0]}.stored", node.output
        node.output[0] = rows
        return [node, helper.make_node("Cast", [rows], [result], to=HIGH)]
    casts = []
    for index, name in enumerate(node.input):
        if name in stored:
            node.input[index] = f"{name}.for.{node.output[0]}.{index}"
            casts.append(helper.make_node("Cast", [name], [node.input[index]], to=HIGH))
    return [*casts, node]


def _widen_attribute(attribute: onnx.AttributeProto) -> None:
    """Change the type that a Cast goes to, and the value of a constant."""
    if attribute.name == "to" and attribute.i == LOW:
        attribute.i = HIGH
    if attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type == LOW:
        widened = numpy_helper.to_array(attribute.t).astype("float32")
        attribute.t.CopyFrom(numpy_helper.from_array(widened, attribute.t.name))
