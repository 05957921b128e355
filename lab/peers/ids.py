"""Item ids for searches: sequences of codes, drawn from a seed, in a file that all tools read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

LENGTH, MOST_CODES = 4, 256
_SEED = 0
_FIRST_TOKEN = 16  # lower ids may be special tokens, which are not used as codes


def made_ids(num_ids: int, vocab_size: int) -> NDArray[np.int32]:
    """Return distinct ids, (num_ids, LENGTH) int32, with up to 256 different codes at each place.

    The codes are drawn independently, and each place has its own tokens, as in ids of items that
    are quantized level by level. The tokens are drawn at random. A small vocabulary has fewer codes
    per place.
    """
    num_codes = min(MOST_CODES, max(vocab_size - _FIRST_TOKEN, 0) // LENGTH)
    if num_ids > num_codes**LENGTH // 2:
        raise ValueError(
            f"{num_ids} ids: a vocabulary of {vocab_size} tokens has room for {LENGTH} x "
            f"{num_codes} codes, so give {num_codes**LENGTH // 2} ids or fewer"
        )
    rng = np.random.default_rng(_SEED)
    tokens = rng.permutation(np.arange(_FIRST_TOKEN, vocab_size, dtype=np.int32))
    codes = tokens[: LENGTH * num_codes].reshape(LENGTH, num_codes)
    numbers = rng.choice(num_codes**LENGTH, size=num_ids, replace=False, shuffle=False)
    digits = np.stack(np.unravel_index(numbers, (num_codes,) * LENGTH), axis=1)
    return np.stack([codes[place][digits[:, place]] for place in range(LENGTH)], axis=1)


class Ids:
    """Ids in a file; counts which sequences are among them."""

    def __init__(self, file: Path) -> None:
        """Read a ``.npy`` file of integers, (num_ids, length)."""
        self.file = file
        self._ids = frozenset(map(tuple, np.load(file).tolist()))

    @classmethod
    def written(cls, folder: Path, num_ids: int, vocab_size: int) -> Ids:
        """Return the ids of a file in ``folder``, which is written if missing."""
        file = folder / f"ids-{num_ids}-of-{vocab_size}.npy"
        if not file.exists():
            partial = file.with_name(f".{os.getpid()}-{file.name}")
            np.save(partial, made_ids(num_ids, vocab_size))
            partial.rename(file)
        return cls(file)

    def num_legal(self, sequences: Sequence[Sequence[int]]) -> int:
        """Return the number of distinct ids among the sequences."""
        return len({tuple(sequence) for sequence in sequences} & self._ids)
