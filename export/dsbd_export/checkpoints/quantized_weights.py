"""Quantized weights: dequantized when read, or refused with the method's name.

An export is compared with the dequantized weights. transformers dequantizes mxfp4 and, with the
package of that name, compressed-tensors. This module reads FP8, GPTQ and AWQ: transformers' FP8 is
wrong for short blocks, and its GPTQ and AWQ need a GPU.

GPTQ and AWQ pack integers of a few bits into int32. A product has ``in`` inputs and ``out``
outputs, and each group of inputs has a scale and a zero point. Both methods store qweight, qzeros
and scales. GPTQ may also store the group of each input in g_idx.

    GPTQ    qweight (in * bits / 32, out)    a word has integers of consecutive inputs
    AWQ     qweight (in, out * bits / 32)    a word has outputs in the order 0 2 4 6 1 3 5 7
    both    qzeros  (groups, out * bits / 32), scales (groups, out)

weight[o, i] = (qweight[i, o] - qzeros[group of i, o]) * scales[group of i, o]
"""

import copy
import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from dsbd_export.checkpoints.checkpoint_files import ComputedWeight
from dsbd_export.errors import ExportError

PLAIN = "export the model that they were made from, with --quantize int4 or int8 for small weights"
_BY_TRANSFORMERS = ("mxfp4", "compressed-tensors")
_PACKAGE = "compressed-tensors"
_COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_FP8_SCALE = "_scale_inv"
_OF_INPUTS = (
    *("input_scale", "input_zero_point", "input_global_scale", "activation_scale"),
    *("output_scale", "output_zero_point", "k_scale", "v_scale"),
)

Weights = Mapping[str, Any]  # readers by name, as ``open_weights`` yields them


def quantization_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return the quantization in a config or in its text part's config; None: not quantized."""
    places = (config, config.get_text_config(decoder=True))
    quantizations = (getattr(place, "quantization_config", None) for place in places)
    content = next((each for each in quantizations if each is not None), None)
    if content is None or isinstance(content, dict):
        return content
    return dict(content.to_dict())


def is_installed(module: str) -> bool:
    """Return whether a module can be imported."""
    return importlib.util.find_spec(module) is not None


def refusal_of_quantization(
    config: PreTrainedConfig, is_installed: Callable[[str], bool] = is_installed
) -> str | None:
    """Return why weights cannot be dequantized; None if they can, or are not quantized."""
    content = quantization_of(config)
    if content is None:
        return None
    method = _method(content)
    if method == _PACKAGE and not is_installed("compressed_tensors"):
        return (
            f"its weights are already quantized ({method}); install the package {_PACKAGE}, with "
            f"which transformers reads them, or {PLAIN}"
        )
    refusal_of = {"mxfp4": lambda _: "", _PACKAGE: _compressed_refusal}.get(method)
    if method in _READERS:
        refusal_of = _READERS[method][0]
    why = f"{method}, which is not read" if refusal_of is None else refusal_of(content)
    return f"its weights are already quantized ({why}); {PLAIN}" if why else None


def plain_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config for loading the plain weights."""
    content = quantization_of(config)
    if content is None:
        return config
    changed = copy.deepcopy(config)
    for each in (changed, changed.get_text_config(decoder=True)):
        if hasattr(each, "quantization_config"):
            del each.quantization_config
    if _method(content) in _BY_TRANSFORMERS:
        others = {name: value for name, value in content.items() if name != "run_compressed"}
        changed.quantization_config = others | {"dequantize": True}
    return changed


def plain_weights(weights: Weights, config: PreTrainedConfig) -> Weights:
    """Return readers of dequantized weights; ExportError if a weight does not fit the method."""
    content = quantization_of(config)
    if content is None:
        return weights
    method = _method(content)
    if method in _READERS:
        return _READERS[method][1](weights, content)
    if ordered := next((name for name in weights if name.endswith("weight_g_idx")), None):
        raise ExportError(
            f"its weights are quantized in reordered groups ({ordered}), which transformers "
            f"ignores when it dequantizes them; {PLAIN}"
        )
    return weights


def check_plain(
    model: nn.Module, config: PreTrainedConfig, weights: Weights, unexpected: Iterable[str]
) -> None:
    """Raise ExportError if a loaded model ignored ``unexpected`` parts of quantized weights."""
    content = quantization_of(config)
    if content is None:
        return
    modules = dict(model.named_modules())
    for name in sorted(unexpected):
        module, _, last = name.rpartition(".")
        if module not in modules or last in _OF_INPUTS:
            continue
        if last == "bias" and name in weights and not bool(weights[name][...].any()):
            continue
        raise ExportError(
            f"{name} has no place in the model, so the weights of {module} may not be those that "
            f"{_method(content)} stores; {PLAIN}"
        )
    if _method(content) in ("gptq", "awq"):
        for name, module_there in modules.items():
            if isinstance(module_there, Conv1D):
                raise ExportError(
                    f"{name} has its weight transposed, unlike {_method(content)}; {PLAIN}"
                )


def _method(content: Mapping[str, Any]) -> str:
    if content.get("load_in_4bit") or content.get("load_in_8bit"):
        return "bitsandbytes"
    return str(content.get("quant_method", "a method that is not named"))


def _compressed_refusal(content: Mapping[str, Any]) -> str:
    """Return why compressed-tensors of this kind are not supported, "" if they are."""
    groups = content.get("config_groups") or {}
    formats = {str(group.get("format") or content.get("format")) for group in groups.values()}
    if len(groups) != 1 or not formats <= set(_COMPRESSED_FORMATS):
        return (
            f"{_PACKAGE}, {len(groups)} groups of the formats {', '.join(sorted(formats))}, but "
            f"one of {', '.join(_COMPRESSED_FORMATS)} is read"
        )
    for name in ("transform_config", "sparsity_config"):
        if content.get(name):
            return f"{_PACKAGE} with a {name}, which is not read"
    return ""


def _fp8_refusal(content: Mapping[str, Any]) -> str:
    if content.get("scale_fmt", "float") == "float" and content.get("expert_dtype", "fp8") == "fp8":
        return ""
    return "fp8 with scales or experts of another type, which is not read"


def _fp8_weights(weights: Weights, content: Mapping[str, Any]) -> Weights:
    """Return plain weights for weights in FP8, which have a scale for each block of a matrix."""
    block = content.get("weight_block_size")
    plain: dict[str, Any] = {}
    for name, reader in weights.items():
        if name.endswith(("_scale_inv", *_OF_INPUTS)):
            continue
        if not reader.get_dtype().startswith("F8"):
            plain[name] = reader
            continue
        scale = weights.get(name + _FP8_SCALE)
        shape = list(reader.get_shape())
        tiles = _num_tiles(shape, block)
        if scale is None or list(scale.get_shape()) not in tiles:
            given_scale = "no scale" if scale is None else f"a scale of shape {scale.get_shape()}"
            raise ExportError(
                f"{name} of shape {shape} is in FP8 with {given_scale}, expected is "
                f"{name + _FP8_SCALE} of shape {' or '.join(map(str, tiles))}; copy the "
                f"checkpoint again, or {PLAIN}"
            )
        plain[name] = ComputedWeight(shape, _scaled(reader, scale, block))
    return plain


def _num_tiles(shape: list[int], block: list[int] | None) -> list[list[int]]:
    """Return the shapes that a weight's scale may have."""
    if block is not None:
        *others, rows, columns = shape
        return [[*others, math.ceil(rows / block[0]), math.ceil(columns / block[1])]]
    return [[], [1], [1, 1], [shape[0], 1]]


def _scaled(reader: Any, scale: Any, block: list[int] | None) -> Callable[[], Tensor]:
    def compute() -> Tensor:
        values, factors = reader[...].float(), scale[...].float()
        if block is not None:
            rows, columns = values.shape[-2:]
            factors = factors.repeat_interleave(block[0], -2)[..., :rows, :]
            factors = factors.repeat_interleave(block[1], -1)[..., :columns]
        return torch.mul(values, factors, out=values)

    return compute


def _gptq_refusal(content: Mapping[str, Any]) -> str:
    form = content.get("checkpoint_format", "gptq")
    bits = content.get("bits")
    is_read = form in ("gptq", "gptq_v2") and bits in (2, 4, 8)
    return "" if is_read else f"gptq in the format {form} with {bits} bits, which is not read"


def _awq_refusal(content: Mapping[str, Any]) -> str:
    form = str(content.get("version", "gemm")).lower()
    bits = content.get("bits", content.get("w_bit"))
    is_read = form == "gemm" and bits == 4 and content.get("zero_point", True)
    return "" if is_read else f"awq in the version {form} with {bits} bits, which is not read"


_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # places of outputs 0 to 7 in a word


def gptq_weights(weights: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """Return readers of plain weights; ExportError for ambiguous zero points of 0 in version 1."""
    bits, is_old = content["bits"], content.get("checkpoint_format", "gptq") == "gptq"

    def product(parts: Mapping[str, Any], name: str) -> tuple[list[int], Callable[[], Tensor]]:
        num_inputs, num_outputs = parts["qweight"].get_shape()
        num_inputs = num_inputs * 32 // bits
        if is_old and bool((_unpacked(parts["qzeros"][...], bits, 1) == 2**bits - 1).any()):
            raise ExportError(
                f"{name}.qzeros has zero points of 0, which its format (gptq) cannot store; export "
                "the model that it was made from, with --quantize int4 for small weights"
            )

        def compute() -> Tensor:
            values = _unpacked(parts["qweight"][...], bits, 0)
            zeros = _unpacked(parts["qzeros"][...], bits, 1) + is_old
            return _weight(values, zeros, parts, content.get("group_size", 128))

        return [num_outputs, num_inputs], compute

    return _plain(weights, product, bits, packs_inputs=True)


def awq_weights(weights: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """Return readers that unpack weights; no weight is read yet."""
    size = content.get("group_size", content.get("q_group_size", 128))

    def product(parts: Mapping[str, Any], name: str) -> tuple[list[int], Callable[[], Tensor]]:
        num_inputs, num_words = parts["qweight"].get_shape()

        def compute() -> Tensor:
            values = _unpacked(parts["qweight"][...], 4, 1, _AWQ_PLACES)
            zeros = _unpacked(parts["qzeros"][...], 4, 1, _AWQ_PLACES)
            return _weight(values, zeros, parts, size)

        return [num_words * 8, num_inputs], compute

    return _plain(weights, product, 4, packs_inputs=False)


_Product = Callable[[Mapping[str, Any], str], tuple[list[int], Callable[[], Tensor]]]


def _plain(
    weights: Mapping[str, Any], product: _Product, bits: int, *, packs_inputs: bool
) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, reader in weights.items():
        module, _, last = name.rpartition(".")
        if last not in _PARTS or f"{module}.qweight" not in weights:
            plain[name] = reader
        elif last == "qweight":
            readers = {each: weights.get(f"{module}.{each}") for each in _PARTS}
            parts = {each: reader for each, reader in readers.items() if reader is not None}
            shapes = {each: list(part.get_shape()) for each, part in parts.items()}
            if not _are_alike(parts, shapes, 32 // bits, packs_inputs=packs_inputs):
                raise ExportError(
                    f"{module} has quantized parts of shapes {shapes}, which are not those of a "
                    f"product with {bits} bits; copy the checkpoint again"
                )
            plain[f"{module}.weight"] = ComputedWeight(*product(parts, module))
    return plain


def _are_alike(
    parts: Mapping[str, Any], shapes: Mapping[str, list[int]], per_word: int, *, packs_inputs: bool
) -> bool:
    if not {"qweight", "qzeros", "scales"} <= parts.keys():
        return False
    if {parts[each].get_dtype() for each in ("qweight", "qzeros")} != {"I32"}:
        return False
    rows, columns = shapes["qweight"]
    num_inputs, num_outputs = (
        (rows * per_word, columns) if packs_inputs else (rows, columns * per_word)
    )
    num_groups = shapes["scales"][0]
    return (
        shapes["scales"] == [num_groups, num_outputs]
        and shapes["qzeros"] == [num_groups, num_outputs // per_word]
        and shapes.get("g_idx", [num_inputs]) == [num_inputs]
    )


def _unpacked(words: Tensor, bits: int, axis: int, places: list[int] | None = None) -> Tensor:
    """Return the integers packed in int32 words (rows, columns); a word extends along ``axis``."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    if places is not None:
        shifts = shifts[places]
    shape = (-1, 1) if axis == 0 else (-1,)
    integers: Tensor = (words.unsqueeze(axis + 1) >> shifts.reshape(shape)) & (2**bits - 1)
    return integers.flatten(axis, axis + 1)


def _weight(values: Tensor, zeros: Tensor, parts: Mapping[str, Any], group_size: int) -> Tensor:
    """Return the weight (out, in) float32 from integers (in, out), zero points (groups, out)."""
    scales = parts["scales"][...].float()
    num_inputs = len(values)
    if "g_idx" in parts:
        groups = parts["g_idx"][...].long()
    else:
        size = num_inputs if group_size == -1 else group_size
        groups = torch.arange(num_inputs) // size
    weight: Tensor = (values - zeros[groups]) * scales[groups]
    return weight.T.contiguous()


_READERS: dict[str, tuple[Callable[..., str], Callable[..., Weights]]] = {
    "fp8": (_fp8_refusal, _fp8_weights),
    "gptq": (_gptq_refusal, gptq_weights),
    "awq": (_awq_refusal, awq_weights),
}
