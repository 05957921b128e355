"""Files of token sequences, and of the tries made of them.

A saved trie is one file of .npy arrays one behind the other: [version, 1 if it ends with "eos"],
then ``row_offsets``, ``tokens`` and ``is_end``; and where it has items the three arrays of these.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from dsbd_ort.constraints.trie_items import TrieItems
from dsbd_ort.decoding.errors import ConstraintError

TRIE_SUFFIX = ".trie"
ITEMS_SUFFIX = ".jsonl"

_VERSION = 1
_BLOCK = 1 << 24  # bytes of text that are parsed at a time
_MOST_DIGITS = 10  # the highest token id has ten


@dataclass(frozen=True, slots=True, eq=False)
class TrieArrays:
    """Arrays of a trie; ``token_trie`` says how they belong together.

    Attributes:
        row_offsets: (num_nodes + 1,) int32 or int64. Edges of node n are those from offset n to
            offset n + 1.
        tokens: (num_nodes - 1,) int32. The token of each edge.
        is_end: (num_nodes,) bool. Whether a sequence ends at a node.
    """

    row_offsets: NDArray[Any]
    tokens: NDArray[np.int32]
    is_end: NDArray[np.bool_]

    def equal(self, other: TrieArrays) -> bool:
        """Return whether both are the same trie."""
        return all(
            np.array_equal(mine, theirs)
            for mine, theirs in (
                (self.row_offsets, other.row_offsets),
                (self.tokens, other.tokens),
                (self.is_end, other.is_end),
            )
        )


def is_trie_file(path: Path) -> bool:
    """Return whether a file is named as a saved trie."""
    return path.suffix == TRIE_SUFFIX


def write_arrays(path: Path, arrays: TrieArrays, end: str, items: TrieItems | None) -> None:
    """Write a trie; the file is whole or not there."""
    if not is_trie_file(path):
        raise ConstraintError(f"{path} does not end in {TRIE_SUFFIX}; name a saved trie so")
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            head = np.array([_VERSION, end == "eos"], dtype=np.int64)
            of_items = () if items is None else (items.nodes, items.offsets, items.text)
            for array in (head, arrays.row_offsets, arrays.tokens, arrays.is_end, *of_items):
                npy.write_array(file, array, allow_pickle=False)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def map_arrays(path: Path) -> tuple[TrieArrays, str, TrieItems | None]:
    """Return the arrays of a saved trie, mapped from its file, how it ends, and its items."""
    try:
        with path.open("rb") as file:
            head, row_offsets, tokens, is_end = (_map_next(file, path) for _ in range(4))
            has_items = file.tell() < path.stat().st_size
            of_items = [_map_next(file, path) for _ in range(3)] if has_items else None
    except OSError as error:
        raise ConstraintError(f"{path} cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise ConstraintError(f"{path} is no saved trie, or not whole ({error})") from error
    if head.shape != (2,) or head[0] != _VERSION:
        raise ConstraintError(
            f"{path} begins with {head.tolist()[:2]}, a trie of this release with {_VERSION}; "
            "save it again"
        )
    num_nodes = len(is_end)
    shapes = (row_offsets.shape, tokens.shape, is_end.shape)
    if shapes != ((num_nodes + 1,), (num_nodes - 1,), (num_nodes,)) or (
        row_offsets[-1] != num_nodes - 1
    ):
        raise ConstraintError(f"{path} has arrays that make no trie; save it again")
    items = None if of_items is None else _checked_items(TrieItems(*of_items), num_nodes, path)
    return TrieArrays(row_offsets, tokens, is_end), "eos" if head[1] else "leaf", items


def _checked_items(items: TrieItems, num_nodes: int, path: Path) -> TrieItems:
    shapes = (items.nodes.shape, items.offsets.shape, items.text.shape)
    num_items = len(items.nodes)
    if (
        shapes != ((num_items,), (num_items + 1,), (int(items.offsets[-1]),))
        or items.nodes[-1] >= num_nodes
    ):
        raise ConstraintError(f"{path} has arrays that make no items; save it again")
    return items


def _map_next(file: BinaryIO, path: Path) -> NDArray[Any]:
    """Map the array at the file's position, as a plain array, and go behind it."""
    if npy.read_magic(file) != (1, 0):
        raise ValueError("another version of .npy")
    shape, _, dtype = npy.read_array_header_1_0(file)
    mapped = np.memmap(path, dtype=dtype, mode="r", offset=file.tell(), shape=shape)
    file.seek(mapped.nbytes, os.SEEK_CUR)
    return np.asarray(mapped)  # indexing a memmap costs microseconds


def read_items(path: Path) -> tuple[list[list[int]], list[Any]]:
    """Return the sequences and the items of a .jsonl file.

    Each line is an object such as {"token_ids": [5, 7], "item": "sku-1"}.
    """
    sequences, items = [], []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                found = _json_line(line)
                if found is None:
                    raise ConstraintError(
                        f"line {number} of {path} is {line.strip()[:60]!r}; expected an object "
                        'with a list of token ids and an item, as {"token_ids": [5, 7], "item": '
                        '"sku-1"}'
                    )
                sequences.append(found["token_ids"])
                items.append(found["item"])
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConstraintError(f"{path} cannot be read ({reason})") from error
    return sequences, items


def _json_line(line: str) -> dict[str, Any] | None:
    """Return the object of a line with a sequence and an item, None for any other line."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or set(found) != {"token_ids", "item"}:
        return None
    ids = found["token_ids"]
    return found if isinstance(ids, list) and all(type(i) is int for i in ids) else None


def read_sequences(path: Path) -> NDArray[Any] | tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the array of a .npy file, or the ids and the lengths of the lines of a text."""
    try:
        if path.suffix == ".npy":
            array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
            return array
        with path.open("rb") as file:
            blocks = list(_parsed_blocks(file, path))
    except OSError as error:
        raise ConstraintError(f"{path} cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        if isinstance(error, ConstraintError):
            raise
        raise ConstraintError(f"{path} is no .npy file of integers ({error})") from error
    if not blocks:
        raise ConstraintError(f"{path} is empty; give the token ids of one sequence on each line")
    return np.concatenate([b[0] for b in blocks]), np.concatenate([b[1] for b in blocks])


def _parsed_blocks(
    file: BinaryIO, path: Path
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the ids and the lengths of some lines at a time."""
    num_lines = 0
    while block := file.read(_BLOCK):
        block += file.readline()
        if not block.endswith(b"\n"):
            block += b"\n"
        ids, lengths = _parsed(block, path, num_lines)
        num_lines += len(lengths)
        yield ids, lengths


def _parsed(
    block: bytes, path: Path, num_lines_before: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the ids of whole lines, (num_ids,) int64, and how many each line has."""
    codes = np.frombuffer(block, dtype=np.uint8)
    is_digit = (codes >= ord("0")) & (codes <= ord("9"))
    is_newline = codes == ord("\n")
    is_known = is_digit | is_newline | np.isin(codes, np.frombuffer(b" \t\r", dtype=np.uint8))

    def raise_at(position: int, what: str) -> None:
        line = num_lines_before + 1 + int(is_newline[:position].sum())
        raise ConstraintError(
            f"line {line} of {path} {what}; give token ids with spaces between them, one sequence "
            "on each line"
        )

    if not is_known.all():
        position = int(np.argmin(is_known))
        raise_at(position, f"has the byte {block[position : position + 1]!r}")
    edges = np.diff(is_digit.astype(np.int8), prepend=0)  # the last byte is no digit
    starts = np.flatnonzero(edges == 1)
    num_digits = np.flatnonzero(edges == -1) - starts
    if (num_digits > _MOST_DIGITS).any():
        raise_at(int(starts[np.argmax(num_digits)]), f"has an id of {num_digits.max()} digits")
    newlines = np.flatnonzero(is_newline)
    lengths = np.diff(np.searchsorted(starts, newlines), prepend=0)
    if not lengths.all():
        raise_at(int(newlines[np.argmin(lengths)]), "is empty")
    return np.fromstring(block.decode("ascii"), dtype=np.int64, sep=" "), lengths.astype(np.int64)
