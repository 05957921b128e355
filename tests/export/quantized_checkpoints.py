"""Checkpoints whose weights are quantized, as their tools write them, and the same in fp32."""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.export.conftest import edit_json

Stored = tuple[dict[str, Tensor], Tensor]
"""Parts that are stored for a weight, by name, and the values that they stand for."""

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # output of each nibble of a word, the lowest first
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@dataclass(frozen=True)
class Kind:
    config: dict[str, Any]
    quantize: Callable[[str, Tensor], Stored]
    weights: tuple[str, ...] = ("_proj.weight",)


def write_quantized(base: Path, folder: Path, kind: Kind) -> tuple[Path, Path]:
    """Return the folders of the quantized checkpoint and of its plain twin."""
    quantized, plain = folder / "quantized", folder / "plain"
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
        shutil.copytree(base, each)
        contiguous = {name: weight.contiguous() for name, weight in weights.items()}
        save_file(contiguous, each / "model.safetensors", metadata={"format": "pt"})
    edit_json(quantized / "config.json", quantization_config=kind.config)
    return quantized, plain


def drawn(*shape: int, low: float, high: float) -> Tensor:
    generator = torch.Generator().manual_seed(math.prod(shape))
    return torch.rand(shape, generator=generator) * (high - low) + low


def integers(*shape: int, most: int) -> Tensor:
    generator = torch.Generator().manual_seed(most + math.prod(shape))
    return torch.randint(0, most + 1, shape, generator=generator)


def fp8_blocks(name: str, weight: Tensor, size: tuple[int, int]) -> Stored:
    """Blocks with a scale each; those at the end may be smaller."""
    values = weight.to(torch.float8_e4m3fn)
    rows, columns = size
    num = [math.ceil(n / of_block) for n, of_block in zip(weight.shape, size, strict=True)]
    scale = drawn(*num, low=0.5, high=1.5)
    meant = values.float()
    for i in range(num[0]):
        for j in range(num[1]):
            tile = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            meant[tile] *= scale[i, j]
    return {name: values, name + "_scale_inv": scale}, meant


def fp8_of_a_tensor(name: str, weight: Tensor) -> Stored:
    values, scale = weight.to(torch.float8_e4m3fn), torch.tensor(0.75, dtype=torch.bfloat16)
    module = name.removesuffix(".weight")
    static = {f"{module}.activation_scale": torch.tensor(0.1)}
    return {name: values, name + "_scale_inv": scale} | static, values.float() * 0.75


def gptq(
    name: str, weight: Tensor, bits: int, group_size: int, adds: int = 1, shuffled: bool = False
) -> Stored:
    """Words of consecutive inputs; ``adds`` is what the format leaves off a zero point."""
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


def awq(name: str, weight: Tensor, group_size: int) -> Stored:
    """Words of eight outputs, in an order of their own."""
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


def in_awq_order(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1, 8)[..., AWQ_ORDER].flatten(1)


def packed(values: Tensor, bits: int) -> Tensor:
    """Return rows of numbers as words of 32 bits, the first number lowest."""
    per_word = 32 // bits
    words = torch.zeros(len(values), values.shape[1] // per_word, dtype=torch.int64)
    for i in range(per_word):
        words |= values[:, i::per_word].long() << (bits * i)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def mxfp4(name: str, weight: Tensor) -> Stored:
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


def compressed_int4(name: str, weight: Tensor, group_size: int) -> Stored:
    """Words of eight inputs of an output, as compressed-tensors packs them."""
    num_outputs, num_inputs = weight.shape
    values = integers(num_outputs, num_inputs, most=15)  # 8 stands for 0
    scales = drawn(num_outputs, num_inputs // group_size, low=0.005, high=0.02)
    meant = (values - 8).float() * scales.repeat_interleave(group_size, 1)
    return {
        name + "_packed": packed(values, 4),
        name + "_scale": scales,
        name + "_shape": torch.tensor([num_outputs, num_inputs]),
    }, meant


def compressed_int4_zeros(name: str, weight: Tensor, group_size: int) -> Stored:
    """The same with zero points, of which words hold those of eight outputs."""
    parts, meant = compressed_int4(name, weight, group_size)
    scales = parts[name + "_scale"]
    zeros = integers(*scales.shape, most=14)
    meant -= ((zeros - 8) * scales).repeat_interleave(group_size, 1)
    return parts | {name + "_zero_point": packed(zeros.T, 4).T}, meant


def compressed_blocks(name: str, weight: Tensor, size: tuple[int, int]) -> Stored:
    parts, meant = fp8_blocks(name, weight, size)
    return {name: parts[name], name + "_scale": parts[name + "_scale_inv"]}, meant


def compressed_channels(name: str, weight: Tensor, dtype: torch.dtype) -> Stored:
    values = (weight * (1 if dtype.is_floating_point else 100)).to(dtype)
    scales = drawn(len(weight), 1, low=0.005, high=0.02)
    return {name: values, name + "_scale": scales}, values.float() * scales


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
GPTQ_4 = partial(gptq, bits=4, group_size=16)
IN_ORDER = GPTQ | {"bits": 8, "desc_act": True}
KINDS = {
    "fp8-blocks": Kind(FP8 | {"weight_block_size": [16, 8]}, partial(fp8_blocks, size=(16, 8))),
    "fp8-blocks-that-end-early": Kind(
        FP8 | {"weight_block_size": [48, 48]}, partial(fp8_blocks, size=(48, 48))
    ),
    "fp8-tensor": Kind(
        FP8 | {"weight_block_size": None, "activation_scheme": "static"}, fp8_of_a_tensor
    ),
    "gptq": Kind(GPTQ, GPTQ_4),
    "gptq-8-bits-in-order": Kind(IN_ORDER, partial(gptq, bits=8, group_size=16, shuffled=True)),
    "gptq-v2": Kind(GPTQ | {"checkpoint_format": "gptq_v2"}, partial(GPTQ_4, adds=0)),
    "awq": Kind(AWQ, partial(awq, group_size=16)),
}
COMPRESSED = {
    "int4": Kind(
        compressed("pack-quantized", 4, "int", strategy="group", group_size=16),
        partial(compressed_int4, group_size=16),
    ),
    "int4-zero-points": Kind(
        compressed("pack-quantized", 4, "int", group_size=16, symmetric=False),
        partial(compressed_int4_zeros, group_size=16),
    ),
    "fp8-of-blocks": Kind(
        compressed("float-quantized", 8, "float", strategy="block", block_structure=[48, 48]),
        partial(compressed_blocks, size=(48, 48)),
    ),
    "int8": Kind(
        compressed("int-quantized", 8, "int", strategy="channel"),
        partial(compressed_channels, dtype=torch.int8),
    ),
    "fp8": Kind(
        compressed("float-quantized", 8, "float", strategy="channel"),
        partial(compressed_channels, dtype=torch.float8_e4m3fn),
    ),
}
MXFP4 = Kind(
    {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    mxfp4,
    ("experts.gate_up_proj", "experts.down_proj"),
)
