"""Check of prune.onnx, which hosts on a device run: a direct comparison with numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.errors import ExportError
from dsbd_export.gate.bf16_twin import runnable_on_cpu
from dsbd_export.gate.parity_engine import as_export_errors
from dsbd_runtime.bundle_files.bundle import Bundle, ModelEntry
from dsbd_runtime.ort.ort_module import LOG_ERRORS, import_ort
from dsbd_runtime.parts.attention_rows import SRC_ROWS, WRITE_INDICES
from dsbd_runtime.parts.cache_entries import parts_of, past_name, present_name, recent
from dsbd_runtime.parts.kv_cache import NUMPY_DTYPES
from dsbd_runtime.parts.recent_rows import RECENT_WRITE_INDICES, SRC_RECENT_ROWS

_CAPACITY = 135
_FIRST_ROW = 2
_SPARE_RECENT_ROWS = 3


def check_prune(bundle: Bundle, checkpoint: Checkpoint) -> None:
    """Move a shuffled half of the rows to row 2; raise ExportError unless caches equal numpy's."""
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
    """Return whether the graph moves rows of every cache, and others of the recent ones."""
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
        binding = session.io_binding()
        for name, array in inputs.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        for cache, part in parts_of(entry.caches):
            is_recent = cache in recent(entry.caches)
            shape = cache.shape(part, _CAPACITY + _SPARE_RECENT_ROWS * is_recent)
            found = rng.standard_normal(shape, np.float32).astype(NUMPY_DTYPES[cache.dtype])
            wanted, moved = found.copy(), recent_rows if is_recent else rows
            wanted[:, :, _FIRST_ROW : _FIRST_ROW + len(moved)] = found[:, :, moved]
            value = ort.OrtValue.ortvalue_from_numpy(found)  # shares its memory
            binding.bind_ortvalue_input(past_name(cache.layer, part), value)
            binding.bind_ortvalue_output(present_name(cache.layer, part), value)
            pairs.append((found, wanted))
        session.run_with_iobinding(binding)
    return all(np.array_equal(found, wanted) for found, wanted in pairs)
