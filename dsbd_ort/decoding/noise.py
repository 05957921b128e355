"""The noise of the gumbel coupling: one Gumbel number per (seed, path, token, step), by hashing.

ALGORITHM.md 3.6. A path's key is chained from its parent's, so that draft and target, a sparse
top-k computation and a dense one, and hosts in other languages all see the same numbers.

``mix64(key, index)`` is output number ``index`` of the generator SplitMix64 seeded with ``key``
(Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014, with the
constants of its reference implementation).

    root key   = mix64(seed, 0)
    child key  = mix64(parent key, token)
    noise bits = mix64(child key XOR NOISE_DOMAIN, step)
                 (draw j with replacement: mix64(noise bits, j))
    u          = (top 52 bits + 1/2) / 2**52, strictly inside (0, 1)
    G          = -log(-log u)

``NOISE_DOMAIN`` separates the numbers of a path from the keys of its children. An absorbing beam
continues by the reserved token ``joint_law.STAY``; while it stays its key is the same, the step
is not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
NOISE_DOMAIN = np.uint64(0xD1B54A32D192ED03)

Keys = NDArray[np.uint64]


def mix64(key: Keys, index: NDArray[np.int64]) -> Keys:
    """Return output ``index`` (0, 1, ...; -1 wraps) of SplitMix64 seeded with ``key``.

    key, index: arrays of any broadcastable shapes. The known answer mix64(0, 0) is
    0xE220A8397B1DCDAF, the first output of SplitMix64 seeded with 0.
    """
    z = key + _GOLDEN * (index.astype(np.uint64) + np.uint64(1))
    z = (z ^ (z >> np.uint64(30))) * _MULTIPLIER_1
    z = (z ^ (z >> np.uint64(27))) * _MULTIPLIER_2
    mixed: Keys = z ^ (z >> np.uint64(31))
    return mixed


def root_key(seed: int) -> int:
    """Return the path key of the prompt for a 63-bit ``seed``."""
    return int(mix64(np.array([seed], np.uint64), np.array([0]))[0])


def child_keys(parent_keys: Keys, tokens: NDArray[np.int64]) -> Keys:
    """Return the path keys of the children ``tokens``; ``STAY`` hashes like a token of its own."""
    return mix64(parent_keys, tokens)


def gumbel_noise(keys: Keys, step: int, draw: int | None = None) -> NDArray[np.float64]:
    """Return the standard Gumbel numbers of the candidates with these (child) path keys.

    With ``draw``, those that belong to one of several draws with replacement.
    """
    bits = mix64(keys ^ NOISE_DOMAIN, np.array([step]))
    if draw is not None:
        bits = mix64(bits, np.array([draw]))
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise
