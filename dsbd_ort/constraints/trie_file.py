"""Files of token sequences, and of the tries made from them.

A saved trie is one file of consecutive .npy arrays: [version, 1 if it ends with "eos"]; then
``row_offsets``, ``tokens`` and ``is_end``; then the three arrays of the items, if any; then the
seal, [CRC-32 of all bytes before it]. With the seal a file that has lost bytes is refused.
"""

import io
import itertools
import json
import os
import re
import secrets
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from dsbd_errors.text_files import check_utf_8, opened_text
from dsbd_ort.constraints.trie_build import TrieArrays, TrieItems
from dsbd_ort.decoding.errors import ConstraintError

TRIE_SUFFIX = ".trie"
ITEMS_SUFFIX = ".jsonl"

_VERSION = 2
_SEAL_BYTES = 132
_READ_BYTES = 1 << 18  # at a time, for the seal
_LINES = 1 << 16  # of a text that are parsed at a time
_NO_IDS = re.compile(rb"[^0-9 \t\r\n]")
_DTYPES = tuple(map(np.dtype, ("<i8", "<i4", "|b1", "|u1")))


def write_arrays(path: Path, arrays: TrieArrays, end: str, items: TrieItems | None) -> None:
    """Write a trie. If that fails, no incomplete file is left."""
    if path.suffix != TRIE_SUFFIX:
        raise ConstraintError(f"{path} does not end in {TRIE_SUFFIX}; name a saved trie so")
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("x+b") as file:
            head = np.array([_VERSION, end == "eos"], dtype=np.int64)
            of_items = () if items is None else (items.nodes, items.offsets, items.text)
            for array in (head, arrays.row_offsets, arrays.tokens, arrays.is_end, *of_items):
                npy.write_array(file, array, allow_pickle=False)
            file.write(_seal(file, file.tell()))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _seal(file: BinaryIO, num_bytes: int) -> bytes:
    """Return the last array of a trie's file, (1,) uint32: the CRC-32 of the bytes before it."""
    crc, left = 0, num_bytes
    file.seek(0)
    while left and (block := file.read(min(left, _READ_BYTES))):
        crc = zlib.crc32(block, crc)
        left -= len(block)
    array = io.BytesIO()
    npy.write_array(array, np.array([crc], dtype="<u4"), allow_pickle=False)
    return array.getvalue()


def map_arrays(path: Path) -> tuple[TrieArrays, str, TrieItems | None]:
    """Return the arrays of a saved trie, mapped from its file, how it ends, and its items."""
    try:
        with path.open("rb") as file:
            head = _map_next(file, path)
            if head.shape != (2,) or head[0] != _VERSION:
                raise ConstraintError(
                    f"{path} begins with {head.tolist()[:2]}, a trie of this release with "
                    f"{_VERSION}; save it again"
                )
            stop = _check_seal(file)
            row_offsets, tokens, is_end = (_map_next(file, path) for _ in range(3))
            of_items = [_map_next(file, path) for _ in range(3)] if file.tell() < stop else None
    except ConstraintError:
        raise
    except OSError as error:
        raise _unreadable(path, error) from error
    except Exception as error:  # numpy's parser of headers raises many kinds on foreign bytes
        raise ConstraintError(
            f"{path} is no saved trie, or not whole ({error}); save it again"
        ) from error
    arrays = TrieArrays(row_offsets, tokens, is_end)
    if not _is_trie(arrays):
        raise ConstraintError(f"{path} has arrays that do not form a trie; save it again")
    items = None if of_items is None else TrieItems(*of_items)
    if items is not None and not _are_items(items, len(is_end)):
        raise ConstraintError(f"{path} has arrays that do not form items; save it again")
    return arrays, "eos" if head[1] else "leaf", items


def _check_seal(file: BinaryIO) -> int:
    """Return the offset of the seal; raise ValueError if it is wrong. Keeps the file's position."""
    place = file.tell()
    stop = file.seek(0, os.SEEK_END) - _SEAL_BYTES
    expected = _seal(file, stop)
    file.seek(stop)
    if file.read() != expected:
        raise ValueError("its checksum does not match its bytes")
    file.seek(place)
    return stop


def _is_trie(arrays: TrieArrays) -> bool:
    row_offsets, tokens, is_end = arrays.row_offsets, arrays.tokens, arrays.is_end
    num_nodes = len(is_end)
    kinds = (row_offsets.dtype.kind, tokens.dtype.name, is_end.dtype.name)
    if num_nodes < 2 or kinds != ("i", "int32", "bool"):
        return False
    if (len(row_offsets), len(tokens)) != (num_nodes + 1, num_nodes - 1):
        return False
    starts, stops = row_offsets[:-1], row_offsets[1:]
    numbers = np.arange(num_nodes, dtype=row_offsets.dtype)
    return bool(
        (row_offsets[0], row_offsets[-1]) == (0, num_nodes - 1)
        and (starts <= stops).all()
        and (starts >= numbers).all()  # a child has a higher number than its parent
        and tokens.min() >= 0
    )


def _are_items(items: TrieItems, num_nodes: int) -> bool:
    nodes, offsets, text = items.nodes, items.offsets, items.text
    return (
        [array.dtype.name for array in (nodes, offsets, text)] == ["int64", "int64", "uint8"]
        and len(offsets) == len(nodes) + 1
        and bool((nodes[1:] >= nodes[:-1]).all() and (offsets[1:] >= offsets[:-1]).all())
        and 0 <= nodes[0] <= nodes[-1] < num_nodes
        and (offsets[0], offsets[-1]) == (0, len(text))
    )


def _map_next(file: BinaryIO, path: Path) -> NDArray[Any]:
    """Map the array at the file's position, as a plain array; move to its end."""
    if npy.read_magic(file) != (1, 0):
        raise ValueError("another version of .npy")
    shape, _, dtype = npy.read_array_header_1_0(file)
    if len(shape) != 1 or dtype not in _DTYPES:
        raise ValueError(f"an array of {dtype} with {len(shape)} dimensions")
    mapped = np.memmap(path, dtype=dtype, mode="r", offset=file.tell(), shape=shape)
    file.seek(mapped.nbytes, os.SEEK_CUR)
    return np.asarray(mapped)  # indexing a memmap costs microseconds


def read_items(path: Path) -> tuple[list[list[int]], list[Any]]:
    """Return sequences and items of a .jsonl file of {"token_ids": [5, 7], "item": "sku-1"}."""
    sequences, items = [], []
    try:
        with path.open("rb") as opened, opened_text(opened) as file:
            for number, line in enumerate(file, start=1):
                entry = _json_line(line)
                if entry is None:
                    raise ConstraintError(
                        f"line {number} of {path} is {line.strip()[:60]!r}; expected an object "
                        'with a list of token ids and an item, as {"token_ids": [5, 7], "item": '
                        '"sku-1"}'
                    )
                sequences.append(entry["token_ids"])
                items.append(entry["item"])
    except ConstraintError:
        raise
    except (OSError, ValueError) as error:  # bytes that are not UTF-8, or an impossible file name
        raise _unreadable(path, error) from error
    return sequences, items


def _unreadable(path: Path, error: Exception) -> ConstraintError:
    reason = getattr(error, "strerror", None) or error
    return ConstraintError(f"{path} cannot be read ({reason})")


def _json_line(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or set(entry) != {"token_ids", "item"}:
        return None
    ids = entry["token_ids"]
    return entry if isinstance(ids, list) and all(type(i) is int for i in ids) else None


def read_sequences(path: Path) -> NDArray[Any] | tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the array of a .npy file, or the ids and the lengths of the lines of a text."""
    try:
        if path.suffix == ".npy":
            return _mapped_npy(path)
        with path.open("rb") as file:
            check_utf_8(file.peek(4))
            if file.peek(4).startswith(BOM_UTF8):
                file.read(len(BOM_UTF8))
            blocks = list(_blocks_of_lines(file, path))
    except ConstraintError:
        raise
    except (OSError, ValueError) as error:  # ValueError: an impossible file name
        raise _unreadable(path, error) from error
    if not blocks:
        raise ConstraintError(f"{path} is empty; give the token ids of one sequence on each line")
    return np.concatenate([b[0] for b in blocks]), np.concatenate([b[1] for b in blocks])


def _mapped_npy(path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = npy.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # numpy's parser of headers raises many kinds on foreign bytes
        raise ConstraintError(
            f"{path} is not a .npy file of integers ({error}); write it with numpy.save"
        ) from error
    return array


def _blocks_of_lines(
    file: BinaryIO, path: Path
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield ids and lengths for ``_LINES`` lines at a time; lists of all would fill the memory."""
    num_before = 0
    while lines := list(itertools.islice(file, _LINES)):
        lengths = np.array([len(line.split()) for line in lines], dtype=np.int64)
        text = b"".join(lines)
        if _NO_IDS.search(text) or not lengths.all():
            wrong = next(i for i, n in enumerate(lengths) if not n or _NO_IDS.search(lines[i]))
            raise ConstraintError(
                f"line {num_before + wrong + 1} of {path} is {lines[wrong][:60]!r}; expected the "
                "token ids of one sequence with spaces between them"
            )
        num_before += len(lines)
        yield np.fromstring(text.decode("ascii"), dtype=np.int64, sep=" "), lengths
