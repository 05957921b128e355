"""Items of a trie: the products or documents, for example, of its sequences.

An item is any JSON value, kept as JSON text. A sequence has any number of them: documents that a
clustering gives the same tokens are items of one sequence.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.errors import ConstraintError


@dataclass(frozen=True, slots=True, eq=False)
class TrieItems:
    """Items by the node at which their sequence ends.

    The items "a", "b" of node 4 and "c" of node 2 are the nodes [2, 4, 4], the offsets
    [0, 3, 6, 9] and the text '"c""a""b"'.

    Attributes:
        nodes: (num_items,) int64, not decreasing.
        offsets: (num_items + 1,) int64. Item i is the text from offset i to offset i + 1.
        text: (num_bytes,) uint8. JSON in UTF-8.
    """

    nodes: NDArray[np.int64]
    offsets: NDArray[np.int64]
    text: NDArray[np.uint8]

    @classmethod
    def of(cls, nodes: NDArray[np.int64], items: Sequence[Any]) -> TrieItems:
        """Return the items of sequences that end at ``nodes``, (num_items,) int64 each."""
        order = nodes.argsort(kind="stable")
        texts = [_json(items[index], index) for index in order.tolist()]
        sizes = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        text = np.frombuffer(b"".join(texts), dtype=np.uint8)
        return cls(nodes[order], np.concatenate([np.zeros(1, np.int64), sizes.cumsum()]), text)

    def at(self, node: int) -> list[Any]:
        """Return the items of the sequences that end at a node."""
        first, last = self.nodes.searchsorted([node, node + 1]).tolist()
        edges = self.offsets[first : last + 1].tolist()
        return [json.loads(self.text[i:j].tobytes()) for i, j in itertools.pairwise(edges)]

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return self.nodes.nbytes + self.offsets.nbytes + self.text.nbytes


def check_number(items: Sequence[Any] | None, num_sequences: int) -> None:
    """Raise ConstraintError unless there is an item for every sequence."""
    if items is not None and len(items) != num_sequences:
        raise ConstraintError(
            f"{len(items)} items are given for {num_sequences} sequences; give one for each"
        )


def _json(item: Any, index: int) -> bytes:
    try:
        return json.dumps(item, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConstraintError(
            f"item {index} is a {type(item).__name__} that is not valid JSON ({error}); give a "
            "text, a number, or lists and dicts of them"
        ) from error
