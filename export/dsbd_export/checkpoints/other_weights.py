"""Adapters and quantized weights without a config, which transformers would accept silently."""

import shlex
from collections.abc import Iterable
from pathlib import Path

from dsbd_export.checkpoints.adapter_files import CONFIG_FILE
from dsbd_export.checkpoints.json_files import json_object_or_none
from dsbd_export.checkpoints.weights import open_weights

_ADAPTER_FILES = (CONFIG_FILE, "adapter_model*.safetensors", "adapter_model*.bin")
_FLAG_BY_ROLE = {"target": "--adapter", "draft": "--draft-adapter"}
_QUANTIZED_FILES = ("gptq_model*.safetensors", "gptq_model*.bin", "gptq_model*.pt")
_QUANTIZED_CONFIGS = {"quantize_config.json": "GPTQ", "quant_config.json": "AWQ"}
_KIND_BY_ENDING = {
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".weight_scale": "FP8 or 8 bits",
    ".weight_scale_inv": "FP8",
    ".weight_scale_2": "FP4",
    "_blocks": "mxfp4",
}


def refusal_of_files(role: str, folder: Path) -> str | None:
    """Return why the weights of a checkpoint cannot be used, and the fix; None if they can."""
    if adapter := _first_file(folder, _ADAPTER_FILES):
        content = json_object_or_none(folder / CONFIG_FILE) or {}
        kind = f", {content['peft_type']}" if "peft_type" in content else ""
        if (folder / "config.json").is_file():
            return (
                f"has an adapter next to its own weights ({adapter}{kind}); to merge it, move "
                f"{', '.join(_ADAPTER_FILES)} to another folder and give that with "
                f"{_FLAG_BY_ROLE[role]}; if it is merged already, remove {adapter}"
            )
        base = content.get("base_model_name_or_path") or "BASE_MODEL"
        command = shlex.join([f"--{role}", str(base), _FLAG_BY_ROLE[role], str(folder)])
        return (
            f"is an adapter alone ({adapter}{kind}); give the model that it was trained for, into "
            f"which it is merged: dsbd-export {command}"
        )
    if how := _quantized(folder):
        return (
            f"has weights that are already quantized ({how}); a checkpoint in fp32, fp16 or bf16 "
            "is needed: export the model that they were made from, with --quantize int4 or "
            "int8 for small weights"
        )
    return None


def _first_file(folder: Path, patterns: Iterable[str]) -> str | None:
    found = (file.name for pattern in patterns for file in sorted(folder.glob(pattern)))
    return next(found, None)


def _quantized(folder: Path) -> str | None:
    """Return how the weights are quantized, and the file that shows it; None if they are not."""
    config = json_object_or_none(folder / "config.json") or {}
    parts = (config, *(part for part in config.values() if isinstance(part, dict)))
    if any(part.get("quantization_config") is not None for part in parts):
        return None
    names = _weight_names(folder)
    kinds = (f"{kind}: {n}" for n in names for e, kind in _KIND_BY_ENDING.items() if n.endswith(e))
    kind = next(kinds, None)
    if names and kind is None:
        return None  # a config may be left over next to restored weights
    for name, method in _QUANTIZED_CONFIGS.items():
        if (folder / name).is_file():
            content = json_object_or_none(folder / name) or {}
            bits = content.get("bits", content.get("w_bit"))
            return f"{method}{f', {bits} bits' if isinstance(bits, int) else ''}: {name}"
    file = _first_file(folder, _QUANTIZED_FILES)
    return kind if file is None else f"GPTQ: {file}"


def _weight_names(folder: Path) -> list[str]:
    """Return the names of the stored weights, [] if they cannot be read."""
    try:
        with open_weights(folder) as weights:
            return list(weights)
    except Exception:  # reported when the weights are loaded
        return []
