"""Trie of the valid token sequences (item ids, labels, names), in compressed sparse rows.

Nodes are numbered level by level, and within a level by parent, then token. So the edges of a node
are one row of ``tokens``, in increasing order, and edge e leads to node e + 1. The sequences
[5], [5, 7] and [6, 7] make

    node            0     1    2    3    4
    sequence        []    5    6    57   67
    row_offsets     0     2    3    4    4   4
    is_end          no    yes  no   yes  yes
    tokens, by edge       5    6    7    7
"""

from __future__ import annotations

import bisect
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.constraints.trie_build import TrieArrays, TrieItems, check_number, joined, trie_of
from dsbd_ort.constraints.trie_file import (
    ITEMS_SUFFIX,
    TRIE_SUFFIX,
    map_arrays,
    read_items,
    read_sequences,
    write_arrays,
)
from dsbd_ort.decoding.errors import ConstraintError
from dsbd_ort.decoding.logits_processing.constraint import States, TokenLists

End = Literal["leaf", "eos"]


class TokenTrie:
    """Constraint to the sequences of a trie; the state of a path is its node.

    With ``end="leaf"`` a path ends at a leaf without an end-of-sequence token. With ``end="eos"``
    such a token follows the leaf, and is part of log-probability and score. A sequence that is the
    beginning of another one (5 in the example above) may end with an end-of-sequence token either
    way. Sequences may stand for items: JSON values that are returned with them. Tries are immutable
    and compare by their sequences and items. A trie that is mapped from a file is pickled as the
    path of the file.
    """

    def __init__(
        self,
        arrays: TrieArrays,
        *,
        end: End = "leaf",
        path: Path | None = None,
        items: TrieItems | None = None,
    ) -> None:
        if end not in ("leaf", "eos"):
            raise ConstraintError(f"end is {end!r}; a trie ends with 'leaf' or 'eos'")
        self.end: End = end
        self.path = path
        self._items = items
        self._arrays = arrays
        self._row_offsets = arrays.row_offsets
        self._tokens = arrays.tokens
        self._is_end = arrays.is_end
        self._checked_ends: tuple[int, ...] | None = None
        self._view = arrays.tokens.data  # bisect reads this view faster than the array

    @classmethod
    def from_sequences(
        cls,
        sequences: Iterable[Sequence[int]],
        *,
        end: End = "leaf",
        items: Sequence[Any] | None = None,
    ) -> TokenTrie:
        """Build the trie of token sequences of any lengths, in any order; repeats are fine.

        items: for each sequence the JSON value that it stands for. A repeated sequence stands for
            several.
        """
        flat, lengths = joined(sequences)
        return cls._of(flat, np.cumsum(lengths) - lengths, lengths, end, items)

    @classmethod
    def _of(
        cls,
        flat: NDArray[Any],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        end: End,
        items: Sequence[Any] | None,
    ) -> TokenTrie:
        check_number(items, len(lengths))
        trie = cls(trie_of(flat, starts, lengths), end=end)
        if items is None:
            return trie
        nodes = np.zeros(len(lengths), dtype=np.int64)
        for depth in range(int(lengths.max())):
            goes_on = (lengths > depth).nonzero()[0]
            nodes[goes_on] = trie.advance(nodes[goes_on], flat[starts[goes_on] + depth])
        return cls(trie._arrays, end=end, items=TrieItems.of(nodes, items))

    @classmethod
    def from_array(
        cls, array: NDArray[Any], *, end: End = "leaf", items: Sequence[Any] | None = None
    ) -> TokenTrie:
        """Build the trie of the rows of ``array``, (num_sequences, longest) integers.

        Shorter sequences are padded with -1 at their end.
        """
        if not isinstance(array, np.ndarray):
            raise ConstraintError(
                f"the sequences are a {type(array).__name__}; give an array of integers, or lists "
                "to from_sequences"
            )
        if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
            raise ConstraintError(
                f"the sequences are an array of {array.dtype} with {array.ndim} dimensions; give "
                "integers, one sequence a row, padded with -1"
            )
        lengths = np.zeros(len(array), dtype=np.int64)
        is_wrong = np.zeros(len(array), dtype=np.bool_)
        for depth, column in enumerate(array.T):
            is_token = column >= 0
            is_wrong |= is_token & (lengths < depth) | (column < -1)
            lengths += is_token
        if is_wrong.any():
            row = int(np.argmax(is_wrong))
            raise ConstraintError(
                f"row {row} of the sequences is {array[row].tolist()}; token ids are 0 or more, "
                "and -1 may only follow the last one"
            )
        starts = np.arange(len(array), dtype=np.int64) * array.shape[1]
        return cls._of(array.reshape(-1), starts, lengths, end, items)

    @classmethod
    def from_texts(
        cls,
        texts: Iterable[str],
        encode: Callable[[str], Sequence[int]],
        *,
        end: End = "leaf",
        items: Sequence[Any] | None = None,
    ) -> TokenTrie:
        """Build the trie of texts, each in the one tokenization that ``encode`` returns.

        ``encode`` must add no special tokens. ``Choice`` allows every tokenization of its texts.
        """
        return cls.from_sequences([encode(text) for text in texts], end=end, items=items)

    @classmethod
    def from_file(cls, path: str | Path, *, end: End | None = None) -> TokenTrie:
        """Build or map the trie of a file.

        A ``.trie`` file, which ``save`` writes, is mapped. A ``.npy`` file holds the array of
        ``from_array``. A ``.jsonl`` file has a sequence and its item on each line, {"token_ids":
        [5, 7], "item": "sku-1"}. Any other file is text, with the token ids of one sequence on each
        line. ``end=None``: as saved, or "leaf" for other files.
        """
        path = Path(path)
        if path.suffix == TRIE_SUFFIX:
            return cls.load(path, end=end)
        ends = end or "leaf"
        if path.suffix == ITEMS_SUFFIX:
            sequences, items = read_items(path)
            with _naming(path):
                return cls.from_sequences(sequences, end=ends, items=items)
        content = read_sequences(path)
        with _naming(path):
            if isinstance(content, np.ndarray):
                return cls.from_array(content, end=ends)
            flat, lengths = content
            return cls(trie_of(flat, np.cumsum(lengths) - lengths, lengths), end=ends)

    @classmethod
    def load(cls, path: str | Path, *, end: End | None = None) -> TokenTrie:
        """Map a trie that ``save`` wrote, after reading it once as a check.

        Processes share its pages. ``end=None``: the saved value.
        """
        arrays, saved_end, items = map_arrays(Path(path))
        ends = end or ("eos" if saved_end == "eos" else "leaf")
        return cls(arrays, end=ends, path=Path(path), items=items)

    def save(self, path: str | Path) -> None:
        """Write the trie to one file, for ``load``."""
        write_arrays(Path(path), self._arrays, self.end, self._items)

    def ending(self, end: End) -> TokenTrie:
        """Return a trie of the same arrays with this ``end``."""
        return TokenTrie(self._arrays, end=end, path=self.path, items=self._items)

    @property
    def has_items(self) -> bool:
        return self._items is not None

    def items_of(self, token_ids: Sequence[int]) -> list[Any]:
        """Return the items of a sequence, with or without an end-of-sequence token after it."""
        if self._items is None:
            return []
        node = 0
        for index, token in enumerate(token_ids):
            begin, end = int(self._row_offsets[node]), int(self._row_offsets[node + 1])
            edge = bisect.bisect_left(self._view, token, begin, end)
            if edge == end or self._view[edge] != token:
                return self._items.at(node) if index == len(token_ids) - 1 else []
            node = edge + 1
        return self._items.at(node)

    @functools.cached_property
    def most_tokens(self) -> int:
        """The most tokens of a path, including the end-of-sequence token of ``end="eos"``."""
        depth, last = 0, 1  # the nodes before ``last`` are those of this depth and above
        while (next_last := int(self._row_offsets[last]) + 1) > last:
            depth, last = depth + 1, next_last
        return depth + (self.end == "eos")

    @functools.cached_property
    def highest_token(self) -> int:
        """The highest token id of all sequences; for a mapped trie this reads the file once."""
        return int(self._tokens.max())

    def check_ends(self, eos_token_ids: Iterable[int]) -> None:
        """Raise ConstraintError if a sequence has one of these tokens before its end.

        Likewise if the token ends a sequence that is also in the trie without it: the decoder
        allows the token there anyway.
        """
        eos = tuple(eos_token_ids)
        if eos == self._checked_ends:  # looking at 10 million tokens takes some milliseconds
            return
        edges = np.flatnonzero(np.isin(self._tokens, eos))
        nodes = np.searchsorted(self._row_offsets, edges, side="right") - 1
        goes_on = self._row_offsets[edges + 1] != self._row_offsets[edges + 2]
        if len(wrong := np.flatnonzero(goes_on | self._is_end[nodes])):
            token = int(self._tokens[edges[wrong[0]]])
            where = "within a sequence" if goes_on[wrong[0]] else "after a sequence of its own"
            raise ConstraintError(
                f"{self.name} has the end-of-sequence token {token} {where}; leave such tokens "
                "out, the decoder allows them where a sequence ends"
            )
        self._checked_ends = eos

    @property
    def name(self) -> str:
        if self.path is not None:
            return f"the token trie {str(self.path)!r}"
        return f"the token trie of {self.num_nodes} nodes"

    @property
    def num_nodes(self) -> int:
        return len(self._is_end)

    @property
    def num_bytes(self) -> int:
        of_items = 0 if self._items is None else self._items.num_bytes
        return self._row_offsets.nbytes + self._tokens.nbytes + self._is_end.nbytes + of_items

    def start(self, prompt_ids: Sequence[int]) -> States:
        return np.zeros(1, dtype=np.int64)

    def advance(self, states: States, tokens: NDArray[np.int64]) -> States:
        starts, ends = self._row_offsets[states], self._row_offsets[states + 1]
        rows = zip(tokens.tolist(), starts.tolist(), ends.tolist(), strict=True)
        places = [bisect.bisect_left(self._view, token, a, b) for token, a, b in rows]
        edges = np.array(places, dtype=np.int64)
        is_known = (edges < ends) & (self._tokens.take(edges, mode="clip") == tokens)
        if not is_known.all():
            wrong = int(np.argmin(is_known))
            raise ConstraintError(
                f"{self.name} has no token {int(tokens[wrong])} after node {int(states[wrong])}; "
                "a path advances by the tokens that are allowed there"
            )
        return edges + 1

    def allowed(self, states: States) -> TokenLists:
        starts, ends = self._row_offsets[states], self._row_offsets[states + 1]
        rows = [self._tokens[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        empty = np.empty(0, dtype=np.int64)
        return TokenLists(
            tokens=np.concatenate([empty, *rows]), counts=(ends - starts).astype(np.int64)
        )

    def accepts(self, states: States) -> NDArray[np.bool_]:
        return self._is_end[states]

    def has_ended(self, states: States) -> NDArray[np.bool_]:
        """Return which nodes are leaves; all False with ``end="eos"``."""
        if self.end == "eos":
            return np.zeros(len(states), dtype=np.bool_)
        is_leaf: NDArray[np.bool_] = self._row_offsets[states] == self._row_offsets[states + 1]
        return is_leaf

    def ends_next(self, states: States) -> NDArray[np.bool_]:
        """Return for which nodes every edge leads to a leaf; all False with ``end="eos"``.

        The edges of a node lead to consecutive nodes. These are leaves if the edges of the last one
        end where the edges of the first one begin.
        """
        if self.end == "eos":
            return np.zeros(len(states), dtype=np.bool_)
        first, last = self._row_offsets[states] + 1, self._row_offsets[states + 1] + 1
        is_last: NDArray[np.bool_] = self._row_offsets[first] == self._row_offsets[last]
        return is_last

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenTrie):
            return NotImplemented
        if self is other:
            return True
        mine, theirs = self._all_arrays(), other._all_arrays()
        return (
            self.end == other.end
            and len(mine) == len(theirs)
            and all(map(np.array_equal, mine, theirs))
        )

    def _all_arrays(self) -> list[Any]:
        arrays, items = self._arrays, self._items
        of_items = [] if items is None else [items.nodes, items.offsets, items.text]
        return [arrays.row_offsets, arrays.tokens, arrays.is_end, *of_items]

    def __hash__(self) -> int:
        return hash((self.end, self.num_nodes))

    def __reduce__(self) -> tuple[Callable[..., TokenTrie], tuple[Any, ...]]:
        if self.path is not None:
            return functools.partial(TokenTrie.load, end=self.end), (self.path.absolute(),)
        return functools.partial(TokenTrie, end=self.end, items=self._items), (self._arrays,)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except ConstraintError as error:
        raise ConstraintError(f"{path} does not hold a trie: {error}") from error
