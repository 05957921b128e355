"""The weight files of a checkpoint: which they are, their precision, and reading them piecewise."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_DTYPE_BY_SAFETENSORS_NAME = {"F64": "fp32", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}


def safetensors_files(folder: Path) -> list[Path]:
    """Return the files that transformers would read, none where it would read other formats."""
    if (folder / _SINGLE_FILE).is_file():
        return [folder / _SINGLE_FILE]
    if not (folder / _INDEX_FILE).is_file():
        return []
    file_by_weight = json.loads((folder / _INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
    return [folder / name for name in sorted(set(file_by_weight.values()))]


@contextlib.contextmanager
def open_weights(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a reader by weight name; nothing is read before a reader is indexed.

    Files are read, not mapped: the pages of a mapped file count as memory of this process until
    the file is closed, which adds the whole checkpoint to that of the model.
    """
    with contextlib.ExitStack() as stack:
        readers: dict[str, Any] = {}
        for file in safetensors_files(folder):
            tensors = stack.enter_context(safe_open(file, framework="pt", backend="pread"))
            readers |= {name: tensors.get_slice(name) for name in tensors.keys()}
        yield readers


def stored_dtype(folder: Path) -> str | None:
    """Return the precision that holds most of the checkpoint's numbers, None if no file tells."""
    num_elements: Counter[str] = Counter()
    with open_weights(folder) as readers:
        for reader in readers.values():
            dtype = _DTYPE_BY_SAFETENSORS_NAME.get(reader.get_dtype())
            if dtype is not None:
                num_elements[dtype] += torch.Size(reader.get_shape()).numel()
    return num_elements.most_common(1)[0][0] if num_elements else None
