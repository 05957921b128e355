"""Arrays of a trie, built from token sequences, and the items of its sequences.

Each sequence is packed into one integer, so that millions are sorted in a second. The 63 bits hold
only a few tokens. Longer sequences are packed piece by piece: each integer has the number of the
node that the sequence has reached, then the next tokens.
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.errors import ConstraintError
from dsbd_ort.decoding.option_values import shown

_MAX_TOKEN = np.iinfo(np.int32).max
_KEY_BITS = 63


@dataclass(frozen=True, slots=True, eq=False)
class TrieArrays:
    """Arrays of a trie; see the example in ``token_trie``.

    row_offsets: (num_nodes + 1,) int32 or int64. Edges of node n: from offset n to offset n + 1.
    tokens: (num_nodes - 1,) int32. Token of each edge.
    is_end: (num_nodes,) bool. Whether a sequence ends at a node.
    """

    row_offsets: NDArray[Any]
    tokens: NDArray[np.int32]
    is_end: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Level:
    """Nodes of one level, ordered by parent, then token.

    parents: (num_nodes,) int64. Number of each node's parent within its own level.
    tokens, is_end: (num_nodes,) int32 and bool.
    """

    parents: NDArray[np.int64]
    tokens: NDArray[np.int32]
    is_end: NDArray[np.bool_]


def joined(sequences: Iterable[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the joined ids of sequences, and their lengths; ConstraintError: one is invalid."""
    if not isinstance(sequences, Iterable):
        raise ConstraintError(f"the sequences are {shown(sequences)}; give lists of token ids")
    sequences = sequences if isinstance(sequences, Sequence) else list(sequences)
    try:
        lengths = np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
        if bool in set(map(type, itertools.chain.from_iterable(sequences))):  # bools are ints
            raise TypeError
        ids = map(operator.index, itertools.chain.from_iterable(sequences))
        flat = np.fromiter(ids, dtype=np.int64, count=int(lengths.sum()))
    except (TypeError, OverflowError) as error:
        raise _fault(sequences) from error
    if flat.min(initial=0) < 0 or flat.max(initial=0) > _MAX_TOKEN:
        raise _fault(sequences)
    return flat, lengths


def _fault(sequences: Sequence[Any]) -> ConstraintError:
    expected = f"expected a whole number from 0 to {_MAX_TOKEN}"
    for index, sequence in enumerate(sequences):
        try:
            len(sequence)
            wrong = [token for token in sequence if not _is_token(token)]
        except TypeError:
            given = f"sequence {index} is {shown(sequence)}"
            return ConstraintError(f"{given}; expected a list of token ids")
        if wrong:
            given = f"sequence {index} has the token id {shown(wrong[0])}"
            return ConstraintError(f"{given}; {expected}")
    return ConstraintError(f"a token id is invalid; {expected}")


def _is_token(value: Any) -> bool:
    if isinstance(value, bool | np.bool_):
        return False
    try:
        return 0 <= operator.index(value) <= _MAX_TOKEN
    except TypeError:
        return False


def trie_of(
    flat: NDArray[Any], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> TrieArrays:
    """Return the trie of the sequences ``flat[start:start + length]``, in any order."""
    _check(flat, lengths)
    counts, tokens, is_end = [], [], [np.zeros(1, dtype=np.bool_)]
    for level in _levels(flat, starts, lengths):
        counts.append(np.bincount(level.parents, minlength=len(is_end[-1])))
        tokens.append(level.tokens)
        is_end.append(level.is_end)
    counts.append(np.zeros(len(is_end[-1]), dtype=np.int64))
    row_offsets = np.concatenate([np.zeros(1, dtype=np.int64), *counts]).cumsum()
    fits = row_offsets[-1] <= np.iinfo(np.int32).max
    return TrieArrays(
        row_offsets=row_offsets.astype(np.int32) if fits else row_offsets,
        tokens=np.concatenate(tokens),
        is_end=np.concatenate(is_end),
    )


def _check(flat: NDArray[Any], lengths: NDArray[np.int64]) -> None:
    if not len(lengths):
        raise ConstraintError("a token trie of no sequences; give one at least")
    if not lengths.all():
        raise ConstraintError(
            f"sequence {int(np.argmin(lengths))} is empty; give every sequence one token at least"
        )
    highest = int(flat.max())
    if highest > _MAX_TOKEN:
        raise ConstraintError(
            f"a sequence has the token id {highest}; expected a whole number from 0 to {_MAX_TOKEN}"
        )


def _levels(
    flat: NDArray[Any], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> Iterator[_Level]:
    """Yield the levels below the root; the sequences are processed piece by piece."""
    token_bits = (int(flat.max()) + 1).bit_length()  # of a token id plus 1; 0 means no token
    nodes, num_nodes = np.zeros(len(starts), dtype=np.int64), 1
    while len(nodes):
        bits_left = _KEY_BITS - (num_nodes - 1).bit_length() - 1
        depths = min(bits_left // token_bits, int(lengths.max()))
        keys = nodes
        for depth in range(depths):
            keys <<= token_bits
            keys |= _codes(flat, starts, lengths, depth)
        goes_on = lengths > depths
        keys <<= 1
        keys |= goes_on
        order = np.argsort(keys) if goes_on.any() else None
        if order is None:
            keys.sort()
        else:
            keys = keys[order]
        ranks = yield from _levels_of(keys, depths, token_bits)
        if order is None:
            return
        nodes, num_nodes = np.empty_like(ranks), int(ranks[-1]) + 1
        nodes[order] = ranks
        nodes, starts, lengths = nodes[goes_on], starts[goes_on] + depths, lengths[goes_on] - depths


def _codes(
    flat: NDArray[Any], starts: NDArray[np.int64], lengths: NDArray[np.int64], depth: int
) -> NDArray[np.int64]:
    """Return the token of each sequence at a depth, plus 1; 0 after its last token."""
    if depth < lengths.min():
        return flat[starts + depth].astype(np.int64) + 1
    is_there = depth < lengths
    codes = np.zeros(len(starts), dtype=np.int64)
    codes[is_there] = flat[starts[is_there] + depth]
    return codes + is_there


def _levels_of(
    keys: NDArray[np.int64], depths: int, token_bits: int
) -> Generator[_Level, None, NDArray[np.int64]]:
    """Yield the levels of one piece of ``depths`` tokens; return each key's node in the last level.

    keys: (num_sequences,) int64, sorted. From the high bits to the low ones: the node reached
        before, ``depths`` codes of ``token_bits`` bits, and 1 if the sequence goes on.
    """
    mask = (1 << token_bits) - 1
    ranks = keys >> depths * token_bits + 1
    for depth in range(depths):
        shift = (depths - 1 - depth) * token_bits + 1
        prefixes = keys >> shift
        is_there = (prefixes & mask) > 0
        is_new = np.diff(prefixes, prepend=-1) > 0
        is_new &= is_there
        first = np.flatnonzero(is_new)
        parents, tokens = ranks[first], (prefixes[first] & mask) - 1
        ranks = np.cumsum(is_new) - 1
        next_bits = 1 if shift == 1 else token_bits
        ends_here = is_there & ((keys >> shift - next_bits & (1 << next_bits) - 1) == 0)
        is_end = np.zeros(len(first), dtype=np.bool_)
        is_end[ranks[ends_here]] = True
        yield _Level(parents, tokens.astype(np.int32), is_end)
    return ranks


@dataclass(frozen=True, slots=True, eq=False)
class TrieItems:
    """JSON values, stored by the node at which their sequence ends; a sequence may have several.

    The items "a" and "b" of node 4 and "c" of node 2 are stored as nodes [2, 4, 4], offsets
    [0, 3, 6, 9] and text '"c""a""b"'.

    nodes: (num_items,) int64, not decreasing.
    offsets: (num_items + 1,) int64. Item i is the text from offset i to offset i + 1.
    text: (num_bytes,) uint8. JSON in UTF-8.
    """

    nodes: NDArray[np.int64]
    offsets: NDArray[np.int64]
    text: NDArray[np.uint8]

    @classmethod
    def of(cls, nodes: NDArray[np.int64], items: Sequence[Any]) -> TrieItems:
        """Return TrieItems; ``nodes``: (num_items,) int64, where each item's sequence ends."""
        order = nodes.argsort(kind="stable")
        texts = [_json(items[index], index) for index in order.tolist()]
        sizes = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        text = np.frombuffer(b"".join(texts), dtype=np.uint8)
        return cls(nodes[order], np.concatenate([np.zeros(1, np.int64), sizes.cumsum()]), text)

    def at(self, node: int) -> list[Any]:
        first, last = self.nodes.searchsorted([node, node + 1]).tolist()
        edges = self.offsets[first : last + 1].tolist()
        return [json.loads(self.text[i:j].tobytes()) for i, j in itertools.pairwise(edges)]

    @property
    def num_bytes(self) -> int:
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
