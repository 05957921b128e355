"""Header of a GGUF file, read with every count and length checked against the file's size.

Nothing beyond the file's size is read or allocated. A file that passes is complete: little-endian,
one part, all bytes of all tensors.
"""

import math
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType
from numpy.typing import NDArray

from dsbd_export.errors import ExportError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DISPENSABLE = ("padding", "mask", "unknown")  # special tokens
_MOST_DIMENSIONS = 4
_LAYER = re.compile(r"(?:^|\.)blk\.(\d+)\.")
_COPY_AGAIN = "download or copy it again"
_MERGE = (
    "join its parts with llama.cpp's 'llama-gguf-split --merge FIRST_PART WHOLE', and export WHOLE"
)
_Number = np.dtype[Any]
_NUMBER_BY_KIND: dict[int, _Number] = {
    int(kind): np.dtype(number).newbyteorder("<")
    for kind, number in GGUFReader.gguf_scalar_to_np.items()
}
_U32, _U64 = (_NUMBER_BY_KIND[kind] for kind in (GGUFValueType.UINT32, GGUFValueType.UINT64))


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """Header of a GGUF file: everything before its weights."""

    file: Path
    # numbers, texts, lists of texts, and arrays (n,) of numbers, by their keys
    values: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]  # of the tensors by their names, in torch's order

    def of_architecture(self, name: str) -> Any:
        """Return a value of the architecture's metadata, such as ``block_count``, or None."""
        return self.values.get(f"{self.values.get('general.architecture')}.{name}")

    def token_id(self, name: str) -> int | None:
        """Return the token that the file names as ``bos``, ``eos`` and so on, or None.

        Ids beyond the vocabulary, as converters wrote them, are ignored or raise ExportError.
        """
        key = f"tokenizer.ggml.{name}_token_id"
        index, size = self.values.get(key), len(self.values.get("tokenizer.ggml.tokens") or ())
        if index is None or (isinstance(index, int) and 0 <= index < size):
            return index
        if name in _DISPENSABLE:
            return None
        raise ExportError(
            f"{self.file} names token {index!r} as {key}, and its tokenizer has {size} tokens; "
            "convert the model again"
        )

    @property
    def num_layers(self) -> int:
        """Return how many layers have tensors."""
        return len({match[1] for name in self.shapes if (match := _LAYER.search(name))})


def read_header(file: Path) -> GgufHeader:
    """Return the header of a file; raise ExportError if it is not one complete file."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Reader(file, data).header()


class _Reader:
    """A place in the bytes of a file."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self._file, self._data = file, data
        self._at = len(MAGIC)

    def header(self) -> GgufHeader:
        version = self._number(_U32, "its version")
        if version & 0xFFFF == 0:
            raise ExportError(
                f"{self._file} is big-endian, a little-endian file is needed; convert it with "
                f"'gguf-convert-endian {self._file} little' of the Python package gguf"
            )
        if version not in _VERSIONS:
            raise ExportError(
                f"{self._file} has version {version} of GGUF, versions 2 and 3 are read; "
                "convert the model again with a current llama.cpp"
            )
        num_tensors, num_values = (self._number(_U64, "its counts") for _ in range(2))
        values: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._text("the name of a value")
            if key in values:
                raise self._damaged(f"{key} is in it twice")
            values[key] = self._value(self._number(_U32, key), key)
        self._refuse_part(values)
        shapes, end = self._tensors(num_tensors, values)
        if self._data[end : end + len(MAGIC)] == MAGIC:
            raise ExportError(
                f"{self._file} is several GGUF files joined by cat, which no reader takes for one "
                f"model; {_MERGE}"
            )
        return GgufHeader(file=self._file, values=values, shapes=shapes)

    def _refuse_part(self, values: Mapping[str, Any]) -> None:
        count = values.get("split.count", 0)
        if not isinstance(count, int) or count <= 1:
            return
        number = values.get("split.no", 0) + 1
        raise ExportError(
            f"{self._file} begins as part {number} of the {count} parts of a model, a whole one is "
            f"needed; {_MERGE} (cat does not join them)"
        )

    def _tensors(
        self, number: int, values: Mapping[str, Any]
    ) -> tuple[dict[str, tuple[int, ...]], int]:
        """Return the shapes of the tensors, and the end of the last one in the file."""
        shapes: dict[str, tuple[int, ...]] = {}
        end = 0
        for _ in range(number):
            name = self._text("the name of a tensor")
            num_dimensions = self._number(_U32, name)
            if name in shapes or num_dimensions > _MOST_DIMENSIONS:
                raise self._damaged(f"{name} is in it twice or has {num_dimensions} dimensions")
            shapes[name] = tuple(self._numbers(_U64, num_dimensions, name).tolist())[::-1]
            kind, offset = self._number(_U32, name), self._number(_U64, name)
            end = max(end, offset + self._num_bytes(name, shapes[name], kind))
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r}, no power of two")
        whole = math.ceil(self._at / alignment) * alignment + end
        if whole > len(self._data):
            raise ExportError(
                f"{self._file} is cut: it has {len(self._data):,} bytes, and its header names "
                f"weights up to {whole:,}; {_COPY_AGAIN}, and join pieces such as .gguf-split-a "
                "with cat"
            )
        return shapes, math.ceil(whole / alignment) * alignment

    def _num_bytes(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        try:
            sizes: tuple[int, int] = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError) as error:
            raise ExportError(
                f"{self._file} stores {name} as type {kind} of ggml, which is not supported; "
                "choose another quantization of the model"
            ) from error
        values_per_block, bytes_per_block = sizes
        return math.prod(shape) // values_per_block * bytes_per_block

    def _value(self, kind: int, key: str) -> Any:
        if kind in _NUMBER_BY_KIND:
            return self._number(_NUMBER_BY_KIND[kind], key)
        if kind == GGUFValueType.STRING:
            return self._text(key)
        if kind != GGUFValueType.ARRAY:
            raise self._damaged(f"{key} has the unknown kind {kind}")
        inner, count = self._number(_U32, key), self._number(_U64, key)
        if inner in _NUMBER_BY_KIND:
            return self._numbers(_NUMBER_BY_KIND[inner], count, key)
        if inner != GGUFValueType.STRING:
            raise self._damaged(f"{key} is a list of the unknown kind {inner}")
        return [self._text(key) for _ in range(count)]  # the first one after the end raises

    def _text(self, what: str) -> str:
        try:
            length = int.from_bytes(self._bytes(_U64.itemsize, what), "little")
            return self._bytes(length, what).decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"{what} is not UTF-8") from error

    def _number(self, kind: _Number, what: str) -> Any:
        return self._numbers(kind, 1, what)[0].item()

    def _numbers(self, kind: _Number, count: int, what: str) -> NDArray[Any]:
        return np.frombuffer(self._bytes(count * kind.itemsize, what), kind)

    def _bytes(self, number: int, what: str) -> bytes:
        if self._at + number > len(self._data):
            raise self._damaged(f"{what} ends after the end of the file, {len(self._data):,} bytes")
        self._at += number
        return self._data[self._at - number : self._at]

    def _damaged(self, reason: str) -> ExportError:
        in_one_line = " ".join(reason.split())  # a damaged name has anything in it
        return ExportError(f"{self._file} is cut or damaged: {in_one_line}; {_COPY_AGAIN}")
