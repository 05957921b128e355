"""Calls of one engine with random tokens behind full caches: what a step of S rows costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

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
_WEIGHTS_FOLDER_OPTION = "session.model_external_initializers_file_folder_path"


class RandomCalls:
    """An engine under session options of one's choice, its caches and a binding for each S.

    The caches are bound in place as the runtime binds them; the S rows are siblings, the last of
    the C rows, and every row's logits are asked for.

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
