"""The noise of the gumbel coupling: one Gumbel number per (seed, path, token, depth), by hashing.

docs/algorithm.md 3.6. A path's key is chained from its parent's, so that draft and target, a sparse
top-k computation and a dense one, and hosts in other languages all see the same numbers.

``mix64(key, index)`` is output number ``index`` of SplitMix64 seeded with ``key`` (Steele, Lea,
Flood: Fast splittable pseudorandom number generators, OOPSLA 2014, constants of its reference).

    root key   = mix64(seed, 0)
    child key  = mix64(parent key, token)
    noise bits = mix64(child key XOR NOISE_DOMAIN, depth)
                 (draw j with replacement: mix64(noise bits, j))
    u          = (top 52 bits + 1/2) / 2**52, strictly inside (0, 1)
    G          = -log(-log u)

    sample seed = mix64(seed, i) >> 11  (sample i > 0 of a request for several; see sample_seed)

``NOISE_DOMAIN`` separates the numbers of a path from the keys of its children. An absorbing beam
continues by the reserved token ``joint_distribution.STAY``: its key stays the same, the depth does
not.
"""

import numpy as np
from numpy.typing import NDArray

_GOLDEN, _MULTIPLIER_1, _MULTIPLIER_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1


def _constant(value: int) -> NDArray[np.uint64]:
    """Return a number as an array of no dimensions: a ufunc takes it faster than a scalar."""
    return np.array(value, dtype=np.uint64)


_STRIDE, _FACTOR_1, _FACTOR_2 = map(_constant, (_GOLDEN, _MULTIPLIER_1, _MULTIPLIER_2))
_SHIFT_1, _SHIFT_2, _SHIFT_3, _DROPPED_BITS = map(_constant, (30, 27, 31, 12))
_EXPONENT_OF_1, _HALF_STEP_BELOW_1 = _constant(0x3FF << 52), np.array(1.0 - 2.0**-53)
NOISE_DOMAIN = _constant(0xD1B54A32D192ED03)

Keys = NDArray[np.uint64]


def mix64(key: Keys, index: NDArray[np.int64] | int) -> Keys:
    """Return output ``index`` (0, 1, ...; -1 wraps) of SplitMix64 seeded with ``key``.

    key, index: arrays of any broadcastable shapes. The known answer mix64(0, 0) is
    0xE220A8397B1DCDAF, the first output of SplitMix64 seeded with 0.
    """
    if isinstance(index, int):
        z: Keys = key + np.array((index + 1) * _GOLDEN & _MASK, np.uint64)
    else:
        z = index.view(np.uint64) * _STRIDE + (key + _STRIDE)
    z ^= z >> _SHIFT_1
    z *= _FACTOR_1
    z ^= z >> _SHIFT_2
    z *= _FACTOR_2
    z ^= z >> _SHIFT_3
    return z


def root_key(seed: int) -> int:
    """Return the path key of the prompt for a 63-bit ``seed``."""
    return int(mix64(np.array([seed], np.uint64), 0)[0])


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of sample ``index`` of several that one request with ``seed`` makes.

    Sample 0 has the seed itself. All others have the upper 53 bits, which any JSON parser keeps, of
    output ``index`` of SplitMix64 seeded with the exclusive or of the seed's 64-bit words: those of
    neighbouring seeds differ.
    """
    if index == 0:
        return seed
    return child_key((seed ^ seed >> 64) & _MASK, index) >> 11


def child_key(parent_key: int, token: int) -> int:
    """Return ``mix64`` of one parent's key and token, in plain integers."""
    z = (parent_key + _GOLDEN * (token + 1)) & _MASK
    z = ((z ^ (z >> 30)) * _MULTIPLIER_1) & _MASK
    z = ((z ^ (z >> 27)) * _MULTIPLIER_2) & _MASK
    return z ^ (z >> 31)


def gumbel_noise(keys: Keys, depth: int, draw: int | None = None) -> NDArray[np.float64]:
    """Return the Gumbel numbers of candidates with these (child) keys, of one of several draws."""
    return noisy(np.array(0.0), keys, depth, draw)


def noisy(
    log_masses: NDArray[np.float64], keys: Keys, depth: int, draw: int | None = None
) -> NDArray[np.float64]:
    """Return ``log_masses`` plus ``gumbel_noise``, (num_candidates,) float64."""
    bits = mix64(keys ^ NOISE_DOMAIN, depth)
    if draw is not None:
        bits = mix64(bits, draw)
    bits >>= _DROPPED_BITS
    bits |= _EXPONENT_OF_1
    u = bits.view(np.float64)  # 1 + b / 2**52
    u -= _HALF_STEP_BELOW_1  # exact
    np.log(u, out=u)
    np.negative(u, out=u)
    np.log(u, out=u)  # -G
    return np.subtract(log_masses, u, out=u)
