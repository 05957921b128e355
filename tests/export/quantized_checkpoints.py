"""Checkpoints whose weights are quantized, as their tools write them, and the same in fp32."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Quantize = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]
"""From a weight's name and values to what is stored for it, and the values that this stands for."""

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # output of each nibble of a word, the lowest first
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How a checkpoint is quantized: what its config says, and its weights."""

    config: dict[str, Any]
    quantize: Quantize
    weights: tuple[str, ...] = ("_proj.weight",)


def write_quantized(base: Path, folder: Path, kind: Kind) -> tuple[Path, Path]:
    """Return the folders of the quantized checkpoint and of its plain twin."""
    quantized, plain = folder / "quantized", folder / "plain"
    for each in (quantized, plain):
        shutil.copytree(base, each)
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        meant[name] = weight.float()
        stored[name] = weight
        if name.endswith(kind.weights):
            del stored[name]
            parts, meant[name] = kind.quantize(name, weight.float())
            stored |= parts
    for each, weights in ((quantized, stored), (plain, meant)):
        contiguous = {name: weight.contiguous() for name, weight in weights.items()}
        save_file(contiguous, each / "model.safetensors", metadata={"format": "pt"})
    set_config(quantized, quantization_config=kind.config)
    return quantized, plain


def set_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def drawn(*shape: int, low: float, high: float) -> Tensor:
    generator = torch.Generator().manual_seed(math.prod(shape))
    return torch.rand(shape, generator=generator) * (high - low) + low


def integers(*shape: int, most: int) -> Tensor:
    generator = torch.Generator().manual_seed(most + math.prod(shape))
    return torch.randint(0, most + 1, shape, generator=generator)


def fp8_blocks(rows: int, columns: int) -> Quantize:
    """Blocks with a scale each; those at the end may be smaller."""

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        values = weight.to(torch.float8_e4m3fn)
        num = [math.ceil(n / size) for n, size in zip(weight.shape, (rows, columns), strict=True)]
        scale = drawn(*num, low=0.5, high=1.5)
        meant = values.float()
        for i in range(num[0]):
            for j in range(num[1]):
                tile = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                meant[tile] *= scale[i, j]
        return {name: values, name + "_scale_inv": scale}, meant

    return quantize


def fp8_of_a_tensor(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    values, scale = weight.to(torch.float8_e4m3fn), torch.tensor(0.75, dtype=torch.bfloat16)
    module = name.removesuffix(".weight")
    static = {f"{module}.activation_scale": torch.tensor(0.1)}
    return {name: values, name + "_scale_inv": scale} | static, values.float() * 0.75


def gptq(bits: int, group_size: int, *, adds: int = 1, shuffled: bool = False) -> Quantize:
    """Words of consecutive inputs; ``adds`` is what the format leaves off a zero point."""

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        num_outputs, num_inputs = weight.shape
        num_groups = num_inputs // group_size
        values = integers(num_inputs, num_outputs, most=2**bits - 1)
        zeros = integers(num_groups, num_outputs, most=2**bits - 2) + adds
        scales = drawn(num_groups, num_outputs, low=0.005, high=0.02).half()
        groups = torch.arange(num_inputs) // group_size
        if shuffled:
            groups = groups[torch.randperm(num_inputs, generator=torch.Generator().manual_seed(1))]
        module = name.removesuffix(".weight")
        meant = torch.empty(num_outputs, num_inputs)
        for i, group in enumerate(groups.tolist()):
            meant[:, i] = (values[i] - zeros[group]) * scales[group].float()
        return {
            f"{module}.qweight": packed(values.T, bits).T,
            f"{module}.qzeros": packed(zeros - adds, bits),
            f"{module}.scales": scales,
            f"{module}.g_idx": groups.int(),
        }, meant

    return quantize


def awq(group_size: int) -> Quantize:
    """Words of eight outputs, in an order of their own."""

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        num_outputs, num_inputs = weight.shape
        num_groups = num_inputs // group_size
        values = integers(num_inputs, num_outputs, most=15)
        zeros = integers(num_groups, num_outputs, most=15)
        scales = drawn(num_groups, num_outputs, low=0.005, high=0.02).half()
        module = name.removesuffix(".weight")
        meant = (values - zeros.repeat_interleave(group_size, 0)).float()
        meant = meant * scales.float().repeat_interleave(group_size, 0)
        return {
            f"{module}.qweight": packed(in_awq_order(values), 4),
            f"{module}.qzeros": packed(in_awq_order(zeros), 4),
            f"{module}.scales": scales,
        }, meant.T

    return quantize


def in_awq_order(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1, 8)[..., AWQ_ORDER].flatten(1)


def packed(values: Tensor, bits: int) -> Tensor:
    """Return rows of numbers as words of 32 bits, the first number lowest."""
    per_word = 32 // bits
    words = torch.zeros(len(values), values.shape[1] // per_word, dtype=torch.int64)
    for i in range(per_word):
        words |= values[:, i::per_word].long() << (bits * i)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def mxfp4(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Experts of gpt-oss, (experts, inputs, outputs): 32 inputs of an output share an exponent."""
    experts, num_inputs, num_outputs = weight.shape
    nibbles = integers(experts, num_outputs, num_inputs // 32, 32, most=15)
    exponents = integers(experts, num_outputs, num_inputs // 32, most=3) + 121
    values = torch.tensor(FP4 + [-each for each in FP4])[nibbles]
    meant = values * 2.0 ** (exponents - 127).unsqueeze(-1)
    return {
        name + "_blocks": (nibbles[..., ::2] | nibbles[..., 1::2] << 4).to(torch.uint8),
        name + "_scales": exponents.to(torch.uint8),
    }, meant.reshape(experts, num_outputs, num_inputs).transpose(1, 2)


def compressed_int4(group_size: int) -> Quantize:
    """Words of eight inputs of an output, as compressed-tensors packs them."""

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        num_outputs, num_inputs = weight.shape
        values = integers(num_outputs, num_inputs, most=15)  # 8 stands for 0
        scales = drawn(num_outputs, num_inputs // group_size, low=0.005, high=0.02)
        meant = (values - 8).float() * scales.repeat_interleave(group_size, 1)
        return {
            name + "_packed": packed(values, 4),
            name + "_scale": scales,
            name + "_shape": torch.tensor([num_outputs, num_inputs]),
        }, meant

    return quantize


def compressed_int4_zeros(group_size: int) -> Quantize:
    """The same with zero points, of which words hold those of eight outputs."""

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        parts, meant = compressed_int4(group_size)(name, weight)
        scales = parts[name + "_scale"]
        zeros = integers(*scales.shape, most=14)
        meant -= ((zeros - 8) * scales).repeat_interleave(group_size, 1)
        return parts | {name + "_zero_point": packed(zeros.T, 4).T}, meant

    return quantize


def compressed_blocks(rows: int, columns: int) -> Quantize:
    """FP8 with a scale for each block."""

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        parts, meant = fp8_blocks(rows, columns)(name, weight)
        return {name: parts[name], name + "_scale": parts[name + "_scale_inv"]}, meant

    return quantize


def compressed_channels(dtype: torch.dtype) -> Quantize:
    """Numbers of 8 bits with a scale for each output."""

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        values = (weight * (1 if dtype.is_floating_point else 100)).to(dtype)
        scales = drawn(len(weight), 1, low=0.005, high=0.02)
        return {name: values, name + "_scale": scales}, values.float() * scales

    return quantize


def compressed(form: str, num_bits: int, kind: str, **weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": num_bits, "type": kind, "symmetric": True, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
    }


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
KINDS = {
    "fp8-blocks": Kind(config=FP8 | {"weight_block_size": [16, 8]}, quantize=fp8_blocks(16, 8)),
    "fp8-blocks-that-end-early": Kind(
        config=FP8 | {"weight_block_size": [48, 48]}, quantize=fp8_blocks(48, 48)
    ),
    "fp8-tensor": Kind(
        config=FP8 | {"weight_block_size": None, "activation_scheme": "static"},
        quantize=fp8_of_a_tensor,
    ),
    "gptq": Kind(config=GPTQ, quantize=gptq(4, 16)),
    "gptq-8-bits-in-order": Kind(
        config=GPTQ | {"bits": 8, "desc_act": True}, quantize=gptq(8, 16, shuffled=True)
    ),
    "gptq-v2": Kind(config=GPTQ | {"checkpoint_format": "gptq_v2"}, quantize=gptq(4, 16, adds=0)),
    "awq": Kind(config=AWQ, quantize=awq(16)),
}
COMPRESSED = {
    "int4": Kind(
        config=compressed("pack-quantized", 4, "int", strategy="group", group_size=16),
        quantize=compressed_int4(16),
    ),
    "int4-zero-points": Kind(
        config=compressed("pack-quantized", 4, "int", group_size=16, symmetric=False),
        quantize=compressed_int4_zeros(16),
    ),
    "fp8-blocks": Kind(
        config=compressed(
            "float-quantized", 8, "float", strategy="block", block_structure=[48, 48]
        ),
        quantize=compressed_blocks(48, 48),
    ),
    "int8": Kind(
        config=compressed("int-quantized", 8, "int", strategy="channel"),
        quantize=compressed_channels(torch.int8),
    ),
    "fp8": Kind(
        config=compressed("float-quantized", 8, "float", strategy="channel"),
        quantize=compressed_channels(torch.float8_e4m3fn),
    ),
}
MXFP4 = Kind(
    config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    quantize=mxfp4,
    weights=("experts.gate_up_proj", "experts.down_proj"),
)
