"""Timed calls of engines with random tokens behind full caches, side by side in rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from dsbd_ort.benchmark.bootstrap import Spread, spread
from dsbd_runtime.graph import (
    ATTENTION_MASK,
    CACHE_PARTS,
    INPUT_IDS,
    LOGIT_ROWS,
    POSITION_IDS,
    WRITE_INDICES,
    past_name,
    present_name,
)
from dsbd_runtime.kv_cache import NUMPY_DTYPES
from dsbd_runtime.manifest import ModelEntry

_LOG_ERRORS = 3
_PRODUCTS = ("MatMul", "MatMulInteger", "MatMulNBits", "Gemm")
_WEIGHTS_FOLDER_OPTION = "session.model_external_initializers_file_folder_path"

PAUSE_S = 0.02  # by then the idle threads of the other engine have stopped spinning


class RandomCalls:
    """An engine with given session options, its caches and a binding for each S.

    The caches are bound in place as the runtime binds them; the S rows are siblings, the last of
    the C rows, and the logits of every row are computed.

    Attributes:
        caches: by (layer, part), (1, Hkv, C, D) each; every call overwrites its last S rows.
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
        rng = np.random.default_rng(0)
        kv = entry.kv
        shape = (1, kv.num_heads, capacity, kv.head_dim)
        self.caches = {
            (layer, part): ort.OrtValue.ortvalue_from_numpy(
                rng.standard_normal(shape, dtype=np.float32).astype(NUMPY_DTYPES[kv.dtype])
            )
            for layer in range(kv.num_layers)
            for part in CACHE_PARTS
        }
        self._bindings = {
            rows: self._binding(rows, capacity, rng.integers(0, entry.vocab_size, (1, rows)))
            for rows in row_counts
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
    """Return the bytes of the weights that the products of a graph read in a call."""
    graph = onnx.load(model_path, load_external_data=False).graph
    numbers = {node.input[1] for node in graph.node if node.op_type in _PRODUCTS}
    turned = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Transpose"}
    names = numbers | {turned[name] for name in numbers if name in turned}
    return sum(_num_bytes(tensor) for tensor in graph.initializer if tensor.name in names)


def _num_bytes(tensor: onnx.TensorProto) -> int:
    stored = {entry.key: entry.value for entry in tensor.external_data}
    return int(stored.get("length", len(tensor.raw_data)))


@dataclass(frozen=True)
class Timings:
    """Milliseconds of one call, by name; ``medians``: one of every round."""

    medians: dict[str, list[float]]

    def milliseconds(self, name: str) -> Spread:
        """Return the spread over the rounds."""
        return spread(self.medians[name])

    def ratio(self, name: str, baseline: str) -> Spread:
        """Return the spread of the ratio to ``baseline`` in the same round."""
        pairs = zip(self.medians[name], self.medians[baseline], strict=True)
        return spread([mine / theirs for mine, theirs in pairs])


def time_in_rounds(
    calls: Mapping[str, Callable[[], None]],
    *,
    num_rounds: int,
    calls_a_round: int,
    pause_s: float = PAUSE_S,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Time every call ``calls_a_round`` times in each round; the first of a round does not count.

    A machine that slows down slows all of them, and the calls of a round follow each other as in a
    request.
    """
    medians: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for index in range(num_rounds):
        for name in names if index % 2 == 0 else names[::-1]:
            time.sleep(pause_s)
            calls[name]()
            seconds = []
            for _ in range(calls_a_round):
                began = clock()
                calls[name]()
                seconds.append(clock() - began)
            medians[name].append(1e3 * statistics.median(seconds))
    return Timings(medians)
