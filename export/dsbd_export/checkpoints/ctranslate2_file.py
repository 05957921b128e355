"""model.bin of CTranslate2: named arrays, mostly quantized, as the weights of transformers.

The file is little-endian and contains, in this order:

* its version (u32), the name of a specification, and the specification's revision (u32);
* the number of arrays (u32); for each array its name, number of dimensions (u8), dimensions (u32),
  type (u8), number of bytes (u32), and the bytes;
* the number of aliases (u32); for each alias its name and the name of an array.

A text is the number of its bytes (u16) and the bytes, of which the last is 0.

Queries, keys and values are rows of one array. Integers must be divided by the array
``NAME_scale``, which has one number for each row, or one for all rows.
"""

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from dsbd_export.checkpoints.checkpoint_files import ComputedWeight
from dsbd_export.errors import ExportError

WHISPER, TRANSFORMER = "WhisperSpec", "TransformerSpec"
_NEWEST_REVISIONS = {WHISPER: 3, TRANSFORMER: 7}
_VERSIONS = range(4, 7)
_TYPES = ("float32", "int8", "int16", "int32", "float16", "bfloat16")
_EXPORT_ITS_SOURCE = "export the transformers checkpoint that it was converted from"
EMBEDDINGS, PROJECTION = "decoder/embeddings/weight", "decoder/projection/weight"
_BIAS = "decoder/projection/bias"
_NAME = re.compile(r"(encoder|decoder)/(?:layer_(\d+)/)?(.+)/(weight|bias|gamma|beta|encodings)")
_LAST = {"gamma": "weight", "beta": "bias", "encodings": "weight"}
_MODULES = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
    "ffn/layer_norm": ("final_layer_norm",),
    **{name: (name,) for name in ("layer_norm", "conv1", "conv2")},
    "position_encodings": ("embed_positions",),
    **dict.fromkeys(("embeddings_0", "embeddings"), ("embed_tokens",)),
}


@dataclass(frozen=True)
class StoredArray:
    """An array in a file: its type, one of ``_TYPES``, and the place of its first byte."""

    shape: tuple[int, ...]
    dtype: str
    offset: int


@dataclass(frozen=True, kw_only=True)
class Ctranslate2File:
    """The arrays of a model.bin, read when needed."""

    file: Path
    specification: str  # ``WHISPER`` or ``TRANSFORMER``
    arrays: Mapping[str, StoredArray]  # an alias is the same array
    lacking: tuple[str, ...] = ()  # files missing in its folder, replaced by defaults

    def setting(self, name: str, default: float) -> Any:
        """Return a number of the model; older revisions have one number for encoder and decoder."""
        array = self.arrays.get(name) or self.arrays.get(name.rpartition("/")[2])
        return default if array is None else self._read(array).item()

    def array(self, name: str) -> StoredArray:
        """Return an array; raise ExportError if it is missing."""
        if name in self.arrays:
            return self.arrays[name]
        raise self.refusal(f"lacks {name}")

    @property
    def description(self) -> str:
        """Return a text for reports: how the weights are stored, and which files are defaults."""
        dtype = self.array(EMBEDDINGS).dtype
        how = f"{dtype}, dequantized" if dtype.startswith("int") else dtype
        missing = f"; defaults in place of {', '.join(self.lacking)}" if self.lacking else ""
        return f"weights of CTranslate2 ({how}), with which the export is compared{missing}"

    def refusal(self, reason: str) -> ExportError:
        """Return the error for a model that is not supported."""
        return ExportError(
            f"{self.file} {reason}: it is not laid out as Whisper, Marian (OPUS-MT), M2M100 or NLLB"
            f"; {_EXPORT_ITS_SOURCE}"
        )

    @property
    def starts_from_zeros(self) -> bool:
        """Return whether a target's first token is embedded as zeros, instead of by a row."""
        return bool(self.setting("decoder/start_from_zero_embedding", 0))

    def weights(self) -> dict[str, ComputedWeight]:
        """Return readers of the weights, in fp32, by transformers' names."""
        readers = {}
        for name, array in self.arrays.items():
            if not array.shape or name.endswith("_scale") or "/" not in name:
                continue
            modules, shape = self._modules(name), list(array.shape)
            is_by_token = "/embeddings" in name or name in (PROJECTION, _BIAS)
            more = int(is_by_token and self.starts_from_zeros)
            shape[0] = shape[0] // len(modules) + more
            shape = [1, *shape] if name == _BIAS else shape
            for part, module in enumerate(modules):
                compute = partial(self._rows, name, part, len(modules), more)
                readers[module] = ComputedWeight(shape, compute)
        if self.specification == TRANSFORMER:
            readers["model.shared.weight"] = readers["model.decoder.embed_tokens.weight"]
        return readers

    def _modules(self, name: str) -> list[str]:
        """Return transformers' names for the equal parts into which an array is split."""
        if name == PROJECTION:
            return ["proj_out.weight" if self.specification == WHISPER else "lm_head.weight"]
        if name == _BIAS and self.specification == TRANSFORMER:
            return ["final_logits_bias"]
        match = _NAME.fullmatch(name)
        if match is None or match[3] not in _MODULES:
            raise self.refusal(f"has {name}")
        stack, layer, module, last = match.groups()
        layers = "" if layer is None else f"layers.{layer}."
        return [f"model.{stack}.{layers}{m}.{_LAST.get(last, last)}" for m in _MODULES[module]]

    def _rows(self, name: str, part: int, num_parts: int, more: int) -> Tensor:
        """Return one of an array's equal parts in fp32, with ``more`` rows of zeros appended."""
        stored = self._read(self.arrays[name])
        values = stored.float()
        if not stored.is_floating_point():
            scale = self._read(self.arrays[f"{name}_scale"])
            values /= scale.reshape(-1, *[1] * (values.dim() - 1))
        rows = values.chunk(num_parts)[part]
        rows = torch.cat([rows, rows.new_zeros(more, *rows.shape[1:])])
        return rows[None] if name == _BIAS else rows

    def _read(self, array: StoredArray) -> Tensor:
        is_bfloat16 = array.dtype == "bfloat16"
        kind = np.dtype("int16" if is_bfloat16 else array.dtype).newbyteorder("<")
        numbers = np.fromfile(self.file, kind, math.prod(array.shape), offset=array.offset)
        tensor = torch.from_numpy(numbers).reshape(array.shape)
        return tensor.view(torch.bfloat16) if is_bfloat16 else tensor


def read_ctranslate2_file(file: Path) -> Ctranslate2File:
    """Return the arrays of a model.bin; raise ExportError if it is not supported."""
    with file.open("rb") as content:
        reader = _Reader(file, content)
        specification = reader.specification()
        return Ctranslate2File(file=file, specification=specification, arrays=reader.arrays())


class _Reader:
    """Reads a file from its current position on."""

    def __init__(self, file: Path, content: BinaryIO) -> None:
        self._file, self._content = file, content

    def specification(self) -> str:
        """Return the name of the specification."""
        if (version := self._number("I")) not in _VERSIONS:
            raise ExportError(
                f"{self._file} has version {version} of CTranslate2's format, {_VERSIONS[0]} to "
                f"{_VERSIONS[-1]} are read; {_EXPORT_ITS_SOURCE}"
            )
        name, revision = self._text(), self._number("I")
        if revision > _NEWEST_REVISIONS.get(name, 0):
            supported = ", ".join(f"{name} up to {n}" for name, n in _NEWEST_REVISIONS.items())
            raise ExportError(
                f"{self._file} has revision {revision} of CTranslate2's {name}, {supported} are "
                "read (Whisper; Marian, M2M100 and NLLB); "
                f"{_EXPORT_ITS_SOURCE}, if it generates text"
            )
        return name

    def arrays(self) -> dict[str, StoredArray]:
        """Return the arrays and their aliases."""
        arrays = {}
        for _ in range(self._number("I")):
            name = self._text().replace(
                "encoder/embeddings/", "encoder/embeddings_0/"
            )  # older name
            shape = tuple(self._number("I") for _ in range(self._number("B")))
            kind, num_bytes = self._number("B"), self._number("I")
            item_size = (4, 1, 2, 4, 2, 2)[kind] if kind < len(_TYPES) else 0
            if num_bytes != math.prod(shape) * item_size:
                raise self._damaged(f"{name} has type {kind}, shape {shape} and {num_bytes} bytes")
            arrays[name] = StoredArray(shape, _TYPES[kind], self._content.tell())
            self._content.seek(num_bytes, 1)
        for _ in range(self._number("I")):
            alias, name = self._text(), self._text()
            alias = alias.replace("encoder/embeddings/", "encoder/embeddings_0/")
            of_alias = {f"{alias}{end}": arrays.get(f"{name}{end}") for end in ("", "_scale")}
            arrays |= {each: array for each, array in of_alias.items() if array is not None}
        return arrays

    def _text(self) -> str:
        content = self._bytes(self._number("H"))
        try:
            return content.removesuffix(b"\0").decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"{content[:40]!r} is not UTF-8") from error

    def _number(self, kind: str) -> int:
        [number] = struct.unpack(f"<{kind}", self._bytes(struct.calcsize(kind)))
        return int(number)

    def _bytes(self, number: int) -> bytes:
        content = self._content.read(number)
        if len(content) < number:
            size = self._file.stat().st_size
            raise self._damaged(f"it has {size:,} bytes, and names more of arrays and aliases")
        return content

    def _damaged(self, reason: str) -> ExportError:
        return ExportError(f"{self._file} is cut or damaged: {reason}; copy or download it again")
