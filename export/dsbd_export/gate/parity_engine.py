"""Engine of the parity gate: the same that hosts open, on ONNX Runtime's CPU provider.

Cache rows that no forward has written contain noise. fp16 weights are widened only when they are
used, because an export has too little memory to widen all of them at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.errors import ExportError, reason_of
from dsbd_export.gate.unwritten_bundle import runnable_on_cpu
from dsbd_export.parity_cases import ForestCase
from dsbd_forward.features import ParentFeatures
from dsbd_forward.forward import Forward, ForwardResult, joined_forward
from dsbd_forward.rows import NO_INTS, Ints
from dsbd_runtime.bundle_files.bundle import WEIGHTS_FILE, Bundle, ModelEntry
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.engine.providers import parse_placement
from dsbd_runtime.engine.session import EngineOptions
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.loading import open_causal_lm
from dsbd_runtime.ort.ort_module import LOG_ERRORS, import_ort
from dsbd_runtime.parts.attention.attention_rows import SRC_ROWS, WRITE_INDICES
from dsbd_runtime.parts.attention.cache_entries import (
    parts_of,
    past_name,
    present_name,
    recent,
    source_name,
)
from dsbd_runtime.parts.attention.kv_cache import NUMPY_DTYPES
from dsbd_runtime.parts.feature.feature_memory import HostFeatures
from dsbd_runtime.parts.recent.recent_rows import RECENT_WRITE_INDICES, SRC_RECENT_ROWS
from dsbd_runtime.parts.source.sources import Sources


def _forward(
    case: ForestCase, token_ids: Ints, parents: Ints, first_row: int, prefix: tuple[int, int]
) -> Forward:
    """Return a forward, without logits, of nodes after the rows from prefix[0] to prefix[1]."""
    mask, positions = see_rows(parents, first_row, first_row + len(parents), prefix)
    return Forward(token_ids, positions, mask, NO_INTS, source=case.source)


def see_rows(
    parents: Ints, first_row: int, capacity: int, prefix: tuple[int, int] | None = None
) -> tuple[NDArray[np.bool_], Ints]:
    """Return which rows each node sees, (S, C) bool, and the nodes' positions, (S,).

    Nodes are the rows from ``first_row`` on. With parents [-1, -1, 0] and first_row 1, node 2 sees
    rows 0, 1 and 3 and has position 2.
    """
    begin, end = prefix or (0, first_row)
    visible = np.zeros((len(parents), capacity), np.bool_)
    positions = np.zeros(len(parents), np.int64)
    visible[:, begin:end] = True
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            visible[node] |= visible[parent]
        visible[node, first_row + node] = True
        positions[node] = end - begin if parent < 0 else positions[parent] + 1
    return visible, positions


_PERIOD_S = 0.05
_MADV_DONTNEED = 4
_MAPS = Path("/proc/self/maps")


@contextlib.contextmanager
def dropped_pages(file: Path, period_s: float = _PERIOD_S) -> Iterator[None]:
    """Inside the block, release the mapped pages of ``file`` every ``period_s`` seconds.

    A page counts as memory of this process once it is used. Changes to pages would be lost.
    """
    ranges = _mapped_ranges(file)
    if not ranges:
        yield
        return
    is_over = threading.Event()
    dropper = threading.Thread(target=_drop_until, args=(is_over, ranges, period_s), daemon=True)
    dropper.start()
    try:
        yield
    finally:
        is_over.set()
        dropper.join()


def _drop_until(is_over: threading.Event, ranges: list[tuple[int, int]], period_s: float) -> None:
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    while True:
        for start, end in ranges:
            advise(start, end - start, _MADV_DONTNEED)
        if is_over.wait(period_s):
            return


def _mapped_ranges(file: Path) -> list[tuple[int, int]]:
    """Return the addresses (start, end) at which parts of a file are mapped."""
    if not _MAPS.exists():
        return []
    ranges, resolved = [], str(file.resolve())
    for line in _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        addresses, *_, path = f"{line} ".split(" ", maxsplit=5)
        if path.strip() == resolved:
            start, end = addresses.split("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges


@contextlib.contextmanager
def parity_engine(bundle: Bundle, role: str) -> Iterator[ParityEngine]:
    """Open the engine of a bundle for parity cases; ExportError if ONNX Runtime cannot run it."""
    with contextlib.ExitStack() as stack:
        bundle_on_cpu = stack.enter_context(runnable_on_cpu(bundle, role))
        with as_export_errors():
            model = stack.enter_context(_opened(bundle_on_cpu, bundle.entry(role), role))
        weights = bundle_on_cpu.model_path(role).with_name(WEIGHTS_FILE)
        stack.enter_context(dropped_pages(weights))  # ends before the weights are unmapped
        engine = ParityEngine(model, bundle_on_cpu.entry(role))
        yield stack.enter_context(contextlib.closing(engine))


def _opened(bundle: Bundle, entry: ModelEntry, role: str) -> CausalLM:
    """Return the engine; ``entry``: the entry to be written (the bundle may have the twin's)."""
    rng = np.random.default_rng(0)

    def noise(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[np.generic]:
        return rng.standard_normal(shape, dtype=np.float32).astype(dtype)

    is_widened = entry.dtype != "fp32" and entry.quantization == "none"
    return open_causal_lm(
        EngineOptions(
            bundle=bundle,
            role=role,
            placement=parse_placement("cpu"),
            settings=EngineSettings(
                num_threads=torch.get_num_threads(),  # see ``limited_threads``
                spin_us=0,  # few calls, and torch computes between them
            ),
            new_rows=noise,
            adapt=_widen_one_by_one if is_widened else None,
        )
    )


def _widen_one_by_one(options: Any) -> None:
    """Make ONNX Runtime widen each weight to fp32 when it is used and drop it afterwards."""
    ort = import_ort()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.disable_prepacking", "1")


class ParityEngine:
    """An engine that runs parity cases one after the other, each with fresh caches."""

    def __init__(self, model: CausalLM, entry: ModelEntry) -> None:
        self.model = model
        self._float_type = NUMPY_DTYPES[entry.dtype]
        self._has_recent_rows = bool(recent(entry.caches))
        self._held = contextlib.ExitStack()

    def close(self) -> None:
        """Release the sound that was encoded last."""
        self._held.close()

    def logits(self, case: ForestCase) -> NDArray[np.float32]:
        """Return all logits of the compared nodes, (R, V); the engine has no top-k head."""
        whole = self.result(case).logits.whole
        assert whole is not None  # without a top-k head
        return whole

    def result(self, case: ForestCase, *, with_features: bool = False) -> ForwardResult:
        """Return the result for the R compared nodes, from one forward of all requests."""
        requests = case.requests
        if self._has_recent_rows:
            # A request of one node, whose logits are not compared.
            one, none, root = case.node_ids[:1], case.prefix_ids[:0], np.array([-1])
            stranger = ForestCase(
                name="stranger", prefix_ids=none, node_ids=one, parents=root, rows=none
            )
            requests = (stranger, *requests)
        with as_export_errors():
            self.model.keep(NO_INTS)
            self._hold(case)
            prefixes = [self._append_prefix(request) for request in requests]
            forwards: list[Forward] = []
            first_row = self.model.num_rows
            for request, prefix in zip(requests, prefixes, strict=True):
                forward = _forward(request, request.node_ids, request.parents, first_row, prefix)
                forward.logit_rows = request.rows
                forward.parent_features = self._features_of_nodes(request, prefix)
                if with_features:
                    is_compared = any(request is each for each in case.requests)
                    forward.feature_rows = np.arange(forward.num_new if is_compared else 0)
                forwards.append(forward)
                first_row += forward.num_new
            return self.model.forward(joined_forward(forwards))

    def _hold(self, case: ForestCase) -> None:
        """Keep the encoder's output until a case has another sound or picture: encoding is slow."""
        self._held.close()
        if case.values is not None:
            self._held.enter_context(self.model.part(Sources).slots.held(case.source))

    def _append_prefix(self, case: ForestCase) -> tuple[int, int]:
        """Append the prefix of a request; return its first row and the row after its last."""
        first_row, num_rows = self.model.num_rows, len(case.prefix_ids)
        if num_rows:
            parents, none = np.arange(-1, num_rows - 1), (first_row, first_row)
            forward = _forward(case, case.prefix_ids, parents, first_row, none)
            if case.features is not None:
                forward.parent_features = self._features(case.features[:num_rows])
            self.model.forward(forward)
        return first_row, self.model.num_rows

    def _features(self, target: NDArray[np.float32]) -> ParentFeatures:
        """Return the target's features, (n, width), as parents' features of n rows."""
        features = HostFeatures("target", target.astype(self._float_type))
        rows = np.arange(len(target))
        return ParentFeatures((features,), np.zeros_like(rows), rows)

    def _features_of_nodes(
        self, case: ForestCase, prefix: tuple[int, int]
    ) -> ParentFeatures | None:
        """Return the features of all nodes' parents; own features are computed depth by depth."""
        if case.features is None:
            return None
        features = self._features(case.features[len(case.prefix_ids) :])
        if not case.uses_own:
            return features
        is_root, num_nodes = case.parents < 0, len(case.parents)
        features = replace(
            features,
            sources=np.where(is_root, 0, 1),
            rows=np.where(is_root, features.rows, case.parents),
        )
        target, num_computed = features.forwards[0], int(is_root.sum())
        while num_computed < num_nodes:  # nodes are ordered by depth
            computed = slice(num_computed)
            ids, parents = case.node_ids[computed], case.parents[computed]
            forward = _forward(case, ids, parents, prefix[1], prefix)
            forward.parent_features = features.part(0, num_computed)
            own_features = self.model.forward(forward).features
            assert own_features is not None  # a feature draft returns them
            self.model.keep(np.arange(prefix[1]))
            features = replace(features, forwards=(target, own_features))
            num_computed = int((case.parents < num_computed).sum())
        return features


@contextlib.contextmanager
def as_export_errors() -> Iterator[None]:
    """Turn any failure of an engine into an ExportError."""
    try:
        yield
    except Exception as error:
        raise ExportError(
            f"parity failed: onnxruntime cannot run the graph: {reason_of(error)}; "
            "this family is not supported"
        ) from error


_CAPACITY = 135
_FIRST_ROW = 2
_SPARE_RECENT_ROWS = 3


def check_prune(bundle: Bundle, checkpoint: Checkpoint) -> None:
    """Move half of the rows, shuffled, to row 2; ExportError unless the result equals numpy's."""
    role = checkpoint.role
    rows = np.random.default_rng(0).permutation(_CAPACITY)[: _CAPACITY // 2]
    with runnable_on_cpu(bundle, role) as on_cpu:
        if not _moves_rows(on_cpu.prune_path(role), on_cpu.entry(role), rows, rows[::2]):
            raise ExportError(
                f"parity failed: prune.onnx of the {role} (family {checkpoint.family}) "
                "moves cache rows wrongly; this onnxruntime is not supported"
            )


def _moves_rows(
    path: Path, entry: ModelEntry, rows: NDArray[np.int64], recent_rows: NDArray[np.int64]
) -> bool:
    """Return whether the graph moves ``rows`` of full caches and ``recent_rows`` of recent ones."""
    rng, ort = np.random.default_rng(1), import_ort()
    first_row = np.array([_FIRST_ROW])
    inputs: dict[str, Any] = {SRC_ROWS: rows, WRITE_INDICES: first_row}
    if recent(entry.caches):
        inputs |= {SRC_RECENT_ROWS: recent_rows, RECENT_WRITE_INDICES: first_row}
    pairs = []
    with as_export_errors():
        options = ort.SessionOptions()
        options.log_severity_level = LOG_ERRORS
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        names, binding = {each.name for each in session.get_inputs()}, session.io_binding()
        for name, array in inputs.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        for cache, part in parts_of(entry.caches):
            is_recent = cache in recent(entry.caches)
            shape = cache.shape(part, _CAPACITY + _SPARE_RECENT_ROWS * is_recent)
            rows_in_place = rng.standard_normal(shape, np.float32).astype(NUMPY_DTYPES[cache.dtype])
            expected, moved = rows_in_place.copy(), recent_rows if is_recent else rows
            expected[:, :, _FIRST_ROW : _FIRST_ROW + len(moved)] = rows_in_place[:, :, moved]
            value = ort.OrtValue.ortvalue_from_numpy(rows_in_place)  # shares its memory
            past = past_name(cache.layer, part)
            for name in names & {past, source_name(past)}:
                binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(present_name(cache.layer, part), value)
            pairs.append((rows_in_place, expected))
        session.run_with_iobinding(binding)
    return all(np.array_equal(rows_in_place, expected) for rows_in_place, expected in pairs)
