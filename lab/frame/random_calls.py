"""Calls of an engine with random tokens after full caches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from dsbd_runtime.bundle_files.bundle import Bundle
from dsbd_runtime.bundle_files.manifest import ModelEntry
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.ort.ort_module import session_options
from dsbd_runtime.parts.attention.attention_rows import (
    ATTENTION_MASK,
    INPUT_IDS,
    POSITION_IDS,
    WRITE_INDICES,
)
from dsbd_runtime.parts.attention.cache_entries import (
    num_ancestors,
    parts_of,
    past_name,
    present_name,
    recent,
)
from dsbd_runtime.parts.attention.kv_cache import NUMPY_DTYPES
from dsbd_runtime.parts.feature.feature_memory import FEATURE_ROWS
from dsbd_runtime.parts.head.head import LOGIT_ROWS
from dsbd_runtime.parts.recent.fold_chains import FOLDED_TOGETHER, STAY_RECENT
from dsbd_runtime.parts.recent.recent_rows import recent_capacity
from scripts.path_ways import recent_inputs

Change = Callable[[ort.SessionOptions], None]

_LOG_ERRORS = 3
_PRODUCTS = ("MatMul", "MatMulInteger", "MatMulNBits", "Gemm")
_WEIGHTS_FOLDER_OPTION = "session.model_external_initializers_file_folder_path"


class RandomCalls:
    """An engine with given session options, its caches, and a binding for each number of rows S.

    The caches are bound in place as in the runtime. The S rows of a call are siblings and the last
    of the C rows; the logits of every row are computed. The number of recent rows is a usual number
    of rows after a checkpoint, for any C.

    Attributes:
        caches: by (layer, part), (1, Hkv, C, D) each; every call overwrites the last S rows.
    """

    def __init__(
        self,
        graph: bytes,
        weights_folder: Path,
        entry: ModelEntry,
        *,
        row_counts: tuple[int, ...],
        capacity: int,
        options: ort.SessionOptions,
    ) -> None:
        options.log_severity_level = _LOG_ERRORS
        options.add_session_config_entry(_WEIGHTS_FOLDER_OPTION, str(weights_folder))
        self._session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self._entry, self._row_counts = entry, row_counts
        self._bind(capacity)

    @classmethod
    def opened(
        cls,
        bundle: Bundle,
        role: str,
        *,
        threads: int,
        change: Change,
        row_counts: tuple[int, ...],
        capacity: int,
    ) -> RandomCalls:
        """Return calls with the runtime's session options, changed by ``change``."""
        entry, path = bundle.entry(role), bundle.model_path(role)
        options = session_options(ort, entry, EngineSettings(num_threads=threads))
        change(options)
        return cls(
            path.read_bytes(),
            path.parent,
            entry,
            row_counts=row_counts,
            capacity=capacity,
            options=options,
        )

    def after(self, capacity: int) -> RandomCalls:
        """Return calls of the same session with separate caches of another capacity."""
        other = copy.copy(self)
        other._bind(capacity)
        return other

    def _bind(self, capacity: int) -> None:
        rng = np.random.default_rng(0)
        entry = self._entry
        num_left = min(capacity - max(self._row_counts), STAY_RECENT + FOLDED_TOGETHER // 2)
        self._num_recent = recent_capacity(num_left + max(self._row_counts))
        recents = recent(entry.caches)
        self.caches = {
            (cache.layer, part): ort.OrtValue.ortvalue_from_numpy(
                rng.standard_normal(
                    cache.shape(part, self._num_recent if cache in recents else capacity),
                    dtype=np.float32,
                ).astype(NUMPY_DTYPES[cache.dtype])
            )
            for cache, part in parts_of(entry.caches)
        }
        self._bindings = {
            rows: self._binding(rows, capacity, rng.integers(0, entry.vocab_size, (1, rows)))
            for rows in self._row_counts
        }

    def call_of(self, num_rows: int) -> Callable[[], None]:
        """Return a function that runs the engine once on ``num_rows`` rows."""
        binding = self._bindings[num_rows]
        return lambda: self._session.run_with_iobinding(binding)

    def _binding(self, num_rows: int, capacity: int, token_ids: Any) -> Any:
        first_row = capacity - num_rows
        mask = np.zeros((1, 1, num_rows, capacity), np.bool_)
        mask[..., :first_row] = True
        mask[0, 0, :, first_row:] = np.eye(num_rows, dtype=np.bool_)
        inputs = {
            INPUT_IDS: token_ids,
            POSITION_IDS: np.full((1, num_rows), first_row),
            ATTENTION_MASK: mask,
            WRITE_INDICES: np.array([first_row]),
            LOGIT_ROWS: np.arange(num_rows),
        }
        if self._entry.features is not None:  # a target that returns features
            inputs[FEATURE_ROWS] = np.arange(num_rows)
        first_recent = self._num_recent - num_rows
        before = np.arange(first_recent - num_ancestors(self._entry.caches), first_recent)
        ancestors = np.tile(np.maximum(before, -1), (num_rows, 1))
        seen = mask[0, 0, :, -self._num_recent :]
        seen = np.pad(seen, ((0, 0), (self._num_recent - seen.shape[1], 0)))
        inputs |= recent_inputs(self._entry, seen, ancestors, first_recent)
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        for (layer, part), value in self.caches.items():
            binding.bind_ortvalue_input(past_name(layer, part), value)
            binding.bind_ortvalue_output(present_name(layer, part), value)
        for output in self._session.get_outputs():
            if not output.name.startswith("present."):
                binding.bind_output(output.name)
        return binding


def product_bytes(model_path: Path) -> int:
    """Return the bytes of weights that the products of a graph read in a call."""
    graph = onnx.load(model_path, load_external_data=False).graph
    numbers = {node.input[1] for node in graph.node if node.op_type in _PRODUCTS}
    turned = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Transpose"}
    names = numbers | {turned[name] for name in numbers if name in turned}
    return sum(_num_bytes(tensor) for tensor in graph.initializer if tensor.name in names)


def _num_bytes(tensor: onnx.TensorProto) -> int:
    stored = {entry.key: entry.value for entry in tensor.external_data}
    return int(stored.get("length", len(tensor.raw_data)))
