"""Weights that model.onnx.data has byte for byte, which the encoder's graph reads from there."""

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from dsbd_runtime.bundle_files.bundle import (
    ENCODER_FILE,
    ENCODER_WEIGHTS_FILE,
    MODEL_FILE,
    WEIGHTS_FILE,
)

_ALIGNED_FROM, _ALIGNMENT = 2**20, 2**16  # bytes: as the weights of other graphs, to be mapped


def share_weights(folder: Path) -> int:
    """Remove from the encoder's weights those that the decoder has; return the bytes saved."""
    if not ((folder / WEIGHTS_FILE).is_file() and (folder / ENCODER_WEIGHTS_FILE).is_file()):
        return 0  # so few that they lie in the graphs
    decoder = onnx.load(folder / MODEL_FILE, load_external_data=False)
    encoder = onnx.load(folder / ENCODER_FILE, load_external_data=False)
    theirs, own = (
        np.memmap(folder / n, np.uint8, "r") for n in (WEIGHTS_FILE, ENCODER_WEIGHTS_FILE)
    )
    known = defaultdict(list)
    for weight in _stored(decoder, WEIGHTS_FILE):
        known[weight.data_type, tuple(weight.dims)].append(weight)
    num_saved, kept = 0, []
    for weight in _stored(encoder, ENCODER_WEIGHTS_FILE):
        numbers = _bytes_of(weight, own)
        alike = known[weight.data_type, tuple(weight.dims)]
        same = next((w for w in alike if np.array_equal(_bytes_of(w, theirs), numbers)), None)
        if same is None:
            kept.append((weight, numbers))
            continue
        num_saved += len(numbers)
        _place(weight, WEIGHTS_FILE, *_place_of(same))
    if not num_saved:
        return 0
    _write(folder, kept)
    onnx.save(encoder, folder / ENCODER_FILE)
    return num_saved


def _write(folder: Path, weights: Iterable[tuple[TensorProto, NDArray[np.uint8]]]) -> None:
    """Write weights one after the other in place of the encoder's file."""
    partial = folder / f"{ENCODER_WEIGHTS_FILE}.partial"
    with partial.open("wb") as file:
        for weight, numbers in weights:
            if len(numbers) >= _ALIGNED_FROM:
                file.write(bytes(-file.tell() % _ALIGNMENT))
            _place(weight, ENCODER_WEIGHTS_FILE, file.tell(), len(numbers))
            numbers.tofile(file)
    os.replace(partial, folder / ENCODER_WEIGHTS_FILE)


def _stored(model: onnx.ModelProto, file: str) -> list[TensorProto]:
    """Return the weights of a graph that are in a file next to it."""
    return [
        weight
        for weight in model.graph.initializer
        if weight.data_location == TensorProto.EXTERNAL
        and any(e.key == "location" and e.value == file for e in weight.external_data)
    ]


def _place_of(weight: TensorProto) -> tuple[int, int]:
    entries = {entry.key: entry.value for entry in weight.external_data}
    return int(entries.get("offset", 0)), int(entries["length"])


def _bytes_of(weight: TensorProto, file: NDArray[np.uint8]) -> NDArray[np.uint8]:
    offset, length = _place_of(weight)
    return file[offset : offset + length]


def _place(weight: TensorProto, location: str, offset: int, length: int) -> None:
    del weight.external_data[:]
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        weight.external_data.add(key=key, value=str(value))
