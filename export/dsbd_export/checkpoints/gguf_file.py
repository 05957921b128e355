"""GGUF files: a checkpoint in one file, whose weights are mostly quantized.

Every count and length in the header is checked against the file's size before anything is read or
allocated. A file that passes is little-endian, has one part, and contains all bytes of all tensors.
"""

import math
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers import modeling_gguf_pytorch_utils as gguf_reading

from dsbd_export.errors import ExportError, reason_of
from dsbd_export.progress import Counter, counted

MAGIC = b"GGUF"
SENTENCEPIECE = "llama"  # its name in ``tokenizer.ggml.model``
_VERSIONS = (2, 3)
_DISPENSABLE = ("padding", "mask", "unknown", "fim_pad", "fim_rep", "fim_sep")  # special tokens
_DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # sentencepiece's ids, for files without ids
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
    # by key: numbers, texts, lists of texts, and arrays (n,) of numbers
    values: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]  # of tensors by name, in torch's order

    def of_architecture(self, name: str) -> Any:
        """Return a value of the architecture's metadata, such as ``block_count``, or None."""
        return self.values.get(f"{self.values.get('general.architecture')}.{name}")

    def token_id(self, name: str) -> int | None:
        """Return the token that the file names as ``bos``, ``eos`` and so on, or None.

        Some converters wrote ids beyond the vocabulary: such an id is ignored if the token is
        dispensable, otherwise ExportError is raised.
        """
        key = f"tokenizer.ggml.{name}_token_id"
        index, size = self.values.get(key), len(self.values.get("tokenizer.ggml.tokens") or ())
        if isinstance(index, int) and 0 <= index < size:
            return index
        if index is None or name in _DISPENSABLE:
            is_sentencepiece = self.values.get("tokenizer.ggml.model") == SENTENCEPIECE
            return _DEFAULT_IDS.get(name) if is_sentencepiece and size > len(_DEFAULT_IDS) else None
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
    """Reads the bytes of a file from its current position on."""

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
        count, number = values.get("split.count", 0), values.get("split.no", 0)
        if isinstance(count, int) and count > 1:
            raise ExportError(
                f"{self._file} begins as part {number + 1} of the {count} parts of a model, a "
                f"whole one is needed; {_MERGE} (cat does not join them)"
            )
        shapes, end = self._tensors(num_tensors, values)
        if self._data[end : end + len(MAGIC)] == MAGIC:
            raise ExportError(
                f"{self._file} is several GGUF files joined by cat, which no reader takes for one "
                f"model; {_MERGE}"
            )
        return GgufHeader(file=self._file, values=values, shapes=shapes)

    def _tensors(
        self, number: int, values: Mapping[str, Any]
    ) -> tuple[dict[str, tuple[int, ...]], int]:
        """Return the shapes of the tensors, and the position in the file after the last one."""
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
        return [
            self._text(key) for _ in range(count)
        ]  # the first text beyond the file's end raises

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
        in_one_line = " ".join(reason.split())  # a damaged name may contain anything
        return ExportError(f"{self._file} is cut or damaged: {in_one_line}; {_COPY_AGAIN}")


_FACTORS = "rope_freqs.weight"
_ROPE_TENSORS = ("rope_freqs", "rope_factors")


def is_gguf(file: Path) -> bool:
    """Return whether this is a GGUF file, whatever its name."""
    if not file.is_file():
        return False
    with file.open("rb") as content:
        return content.read(len(MAGIC)) == MAGIC


def read_gguf_config(role: str, file: Path, header: GgufHeader) -> PreTrainedConfig:
    """Return the config of a file; raise ExportError if transformers does not support it."""
    num_layers = header.of_architecture("block_count")
    if num_layers is not None and num_layers != header.num_layers:
        raise ExportError(
            f"the {role} in {file} has weights of {header.num_layers} layers, and its block_count "
            f"is {num_layers!r}; download the file again, or convert the model again"
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            file.parent, gguf_file=file.name, local_files_only=True
        )
        _take_rope_factors(config, file, header)
        if header.token_id("padding") is None:  # its id in the config may be beyond the vocabulary
            config.pad_token_id = None
        return config
    except Exception as error:
        raise ExportError(
            f"transformers cannot read the {role} in {file}: {reason_of(error)}; export the "
            "checkpoint folder that the file was made from, as the model's page names it, with "
            "--quantize int4 or int8 for small weights"
        ) from error


def _take_rope_factors(config: PreTrainedConfig, file: Path, header: GgufHeader) -> None:
    """Add to a config the divisors of rotary frequencies that Llama 3.1 stores as a tensor."""
    is_left_out = config.model_type == "llama" and _FACTORS in header.shapes
    if not is_left_out or _scaling(header) is not None:
        return
    tensors = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    factors = tensors[_FACTORS].data.astype(float).tolist()
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": config.rope_parameters["rope_theta"],
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config.max_position_embeddings,
    }


def _scaling(header: GgufHeader) -> str | None:
    for name, value in header.values.items():
        if name.endswith(".rope.scaling.type") and value != "none":
            return f"{name} = {value!r}"
    return None


def gguf_refusal(header: GgufHeader, config: PreTrainedConfig) -> str | None:
    """Return the change of rotary frequencies that transformers ignores, None if there is none."""
    if getattr(config, "rope_parameters", {}).get("rope_type", "default") != "default":
        return None
    if scaling := _scaling(header):
        return scaling
    return next((name for name in header.shapes if name.startswith(_ROPE_TENSORS)), None)


def gguf_weights(
    file: Path, model_class: Any, config: PreTrainedConfig, counter: Counter
) -> dict[str, Tensor]:
    """Return the weights in fp32, by the names of ``model_class``."""
    with torch.device("meta"):
        model = model_class(config)  # only names and shapes, no numbers
    wanted = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    has = sum(map(math.prod, read_header(file).shapes.values()))
    needs = sum(map(math.prod, wanted.values()))
    if needs > 2 * has:  # twice: a head may be the embedding, which is stored once
        raise ExportError(
            f"its metadata describe a model of {needs:,} weights, and it has {has:,}; download the "
            "file again, or convert the model again"
        )
    bar = gguf_reading.tqdm  # replaced, to count the weights that transformers dequantizes
    gguf_reading.tqdm = lambda weights, **_: counted(
        weights, counter, lambda weight: int(weight.n_bytes)
    )
    try:
        content = gguf_reading.load_gguf_checkpoint(
            str(file), return_tensors=True, model_to_load=model
        )
    finally:
        gguf_reading.tqdm = bar
    weights: dict[str, Tensor] = content["tensors"]
    for name, weight in weights.items():
        if wanted.get(name) != tuple(weight.shape):
            raise ExportError(
                f"{name} has the shape {tuple(weight.shape)}, {wanted.get(name)} by the file's "
                "metadata; download the file again, or convert the model again"
            )
    return weights
