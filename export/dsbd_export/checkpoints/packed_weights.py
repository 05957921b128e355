"""GPTQ and AWQ: integers of a few bits packed into int32, read as plain weights.

For a product of ``in`` inputs and ``out`` outputs, with a scale and a zero point for each group of
inputs, both store qweight, qzeros and scales; GPTQ may store the group of each input in g_idx.

    GPTQ    qweight (in * bits / 32, out)    integers of consecutive inputs in one word
    AWQ     qweight (in, out * bits / 32)    of outputs, in the order 0 2 4 6 1 3 5 7
    both    qzeros  (groups, out * bits / 32), scales (groups, out)

weight[o, i] = (qweight[i, o] - qzeros[group of i, o]) * scales[group of i, o]
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dsbd_export.checkpoints.weights import ComputedWeight
from dsbd_export.errors import ExportError

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of outputs 0 to 7 in a word


def gptq_weights(weights: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """Return readers of plain weights; zero points of 0 in version 1 are refused as ambiguous."""
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
    """Return readers of plain weights for packed ones; nothing is read."""
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
            found = {each: weights.get(f"{module}.{each}") for each in _PARTS}
            parts = {each: reader for each, reader in found.items() if reader is not None}
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
    """Return the integers of (rows, columns) int32 words, those of a word along ``axis``."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    if places is not None:
        shifts = shifts[places]
    shape = (-1, 1) if axis == 0 else (-1,)
    integers: Tensor = (words.unsqueeze(axis + 1) >> shifts.reshape(shape)) & (2**bits - 1)
    return integers.flatten(axis, axis + 1)


def _weight(values: Tensor, zeros: Tensor, parts: Mapping[str, Any], group_size: int) -> Tensor:
    """Return the weight, (out, in) float32, of integers (in, out) and zero points (groups, out)."""
    scales = parts["scales"][...].float()
    num_inputs = len(values)
    if "g_idx" in parts:
        groups = parts["g_idx"][...].long()
    else:
        size = num_inputs if group_size == -1 else group_size
        groups = torch.arange(num_inputs) // size
    weight: Tensor = (values - zeros[groups]) * scales[groups]
    return weight.T.contiguous()
