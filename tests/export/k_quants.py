"""Q4_K and Q6_K of GGUF, which the gguf package reads and does not write."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

SIZE = 256  # numbers of a block
Bytes = NDArray[np.uint8]


def quantized(values: NDArray[np.float32], kind: str) -> tuple[NDArray[np.generic], Kind]:
    """Return a matrix as it is stored, and how; blocks that do not fit are 8 bits, as usual."""
    if kind not in _K_QUANTS:
        return gguf.quants.quantize(values, Kind[kind]), Kind[kind]
    if values.shape[-1] % SIZE:
        return gguf.quants.quantize(values, Kind.Q8_0), Kind.Q8_0
    blocks = _K_QUANTS[kind](values.reshape(-1, SIZE).astype(np.float64))
    return blocks.reshape(len(values), -1), Kind[kind]


def _q4_k(blocks: NDArray[np.float64]) -> Bytes:
    """Eight groups of 32 numbers of 4 bits, each with a scale and a least number of 6 bits."""
    groups = blocks.reshape(-1, 8, 32)
    least = np.minimum(groups.min(axis=2), 0)
    d, scales = _scaled((groups.max(axis=2) - least) / 15, 63)
    d_least, mins = _scaled(-least, 63)
    step = np.maximum(d.astype(float) * scales, 1e-30)[..., None]
    offset = (d_least.astype(float) * mins)[..., None]
    q = np.clip(np.rint((groups + offset) / step), 0, 15).astype(np.uint8)
    packed = np.empty((len(blocks), 12), np.uint8)
    packed[:, :4] = scales[:, :4] | scales[:, 4:] >> 4 << 6
    packed[:, 4:8] = mins[:, :4] | mins[:, 4:] >> 4 << 6
    packed[:, 8:] = scales[:, 4:] & 15 | (mins[:, 4:] & 15) << 4
    nibbles = (q[:, ::2] | q[:, 1::2] << 4).reshape(-1, 128)
    return np.concatenate([_bytes(d), _bytes(d_least), packed, nibbles], axis=1)


def _q6_k(blocks: NDArray[np.float64]) -> Bytes:
    """Sixteen groups of 16 numbers of 6 bits, each with a scale of 8 bits."""
    groups = blocks.reshape(-1, 16, 16)
    d, scales = _scaled(np.abs(groups).max(axis=2) / 31, 127)
    step = np.maximum(d.astype(float) * scales, 1e-30)[..., None]
    q = (np.clip(np.rint(groups / step), -32, 31) + 32).astype(np.uint8)
    q = q.reshape(-1, 2, 4, 32)  # halves of four rows, whose high bits share a byte
    low = np.concatenate([q[:, :, :2] & 15 | (q[:, :, 2:] & 15) << 4], axis=2).reshape(-1, 128)
    high = (q >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(axis=2, dtype=np.uint8)
    return np.concatenate([low, high.reshape(-1, 64), scales, _bytes(d)], axis=1)


def _scaled(steps: NDArray[np.float64], most: int) -> tuple[NDArray[np.float16], Bytes]:
    """Return for each block one number, and integers that times it are the steps."""
    d = (steps.max(axis=1, keepdims=True) / most).astype(np.float16)
    return d, np.clip(np.rint(steps / np.maximum(d.astype(float), 1e-30)), 0, most).astype(np.uint8)


def _bytes(numbers: NDArray[np.float16]) -> Bytes:
    return numbers.view(np.uint8).reshape(len(numbers), -1)


_K_QUANTS = {"Q4_K": _q4_k, "Q6_K": _q6_k}
