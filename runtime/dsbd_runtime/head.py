"""What an engine returns of every asked row: all logits, or the largest of them and their sum.

A manifest names it: "full", or "topk:64" for the 64 largest logits and the log of the sum of
the exponentials of all, so that log-probabilities are known without a row of the vocabulary's size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.graph import LOGITS, LOGSUMEXP, TOP_IDS, TOP_LOGITS

FULL = "full"
_TOP_PREFIX = "topk:"


class TopLogits(NamedTuple):
    """The K largest logits of each of R rows, by decreasing logit, ties by increasing id.

    Attributes:
        top_ids: (R, K) int64. Their tokens.
        top_logits: (R, K) float32.
        logsumexp: (R,) float32. Log of the sum of exp(logit) over the whole vocabulary.
    """

    top_ids: NDArray[np.int64]
    top_logits: NDArray[np.float32]
    logsumexp: NDArray[np.float32]


@dataclass(frozen=True)
class HeadOutput:
    """One output of the head, of shape [R, *row_shape]."""

    name: str
    dtype: type[np.generic]
    row_shape: tuple[int, ...]


def parse_num_top_logits(kind: str) -> int:
    """Return K of "topk:K", 0 of "full"; raise ValueError for any other text."""
    if kind == FULL:
        return 0
    digits = kind.removeprefix(_TOP_PREFIX)
    if digits == kind or not (digits.isascii() and digits.isdigit()) or digits[0] == "0":
        raise ValueError(f"{kind!r} is neither {FULL!r} nor {_TOP_PREFIX}K with K at least 1")
    return int(digits)


def head_outputs(kind: str, vocab_size: int) -> tuple[HeadOutput, ...]:
    """Return the outputs of an engine that returns ``kind``, caches aside."""
    num_top_logits = parse_num_top_logits(kind)
    if not num_top_logits:
        return (HeadOutput(LOGITS, np.float32, (vocab_size,)),)
    return (
        HeadOutput(TOP_LOGITS, np.float32, (num_top_logits,)),
        HeadOutput(TOP_IDS, np.int64, (num_top_logits,)),
        HeadOutput(LOGSUMEXP, np.float32, ()),
    )


def empty_outputs(head: tuple[HeadOutput, ...], num_logit_rows: int) -> dict[str, NDArray[Any]]:
    """Return uninitialised arrays for the outputs of R asked rows, by name."""
    return {
        output.name: np.empty((num_logit_rows, *output.row_shape), output.dtype) for output in head
    }
