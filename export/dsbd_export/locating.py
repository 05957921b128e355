"""Locating of checkpoints: folders, files and ids of the hub; folders whose weights are refused.

Adapters and quantized weights without a config, which transformers would accept silently, are
refused.
"""

import contextlib
import shlex
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import snapshot_download

from dsbd_errors.git_lfs import pointer_refusal
from dsbd_export.checkpoints.adapter_files import CONFIG_FILE
from dsbd_export.checkpoints.checkpoint_files import (
    json_object_or_none,
    open_weights,
    pointer_in,
)
from dsbd_export.checkpoints.gguf_file import is_gguf
from dsbd_export.checkpoints.model_config import CheckpointFiles
from dsbd_export.config import ModelOptions
from dsbd_export.encoder_decoder.ctranslate2_folder import is_ctranslate2
from dsbd_export.errors import ExportError, reason_of
from dsbd_export.given_prompt.checkpoint import carries_adapter

_HUB_FILES = "*.json *.jinja *.safetensors *vocab*.txt merges.txt *.model *.spm *.tiktoken".split()
_HUB_CODE = ["*.py"]
_HUB_OLD_WEIGHTS = ["pytorch_model*.bin", "model.bin"]  # the latter of CTranslate2
_HUB_OLD_ADAPTERS = ["adapter_model.bin"]


def located(source: str, options: ModelOptions) -> Path:
    """Return a checkpoint's folder, downloaded from the hub if it is not local, or GGUF file."""
    folder = Path(source).expanduser()
    if folder.is_dir() or is_gguf(folder) or is_ctranslate2(folder):
        return folder
    if reason := pointer_refusal(folder):
        raise ExportError(f"the file {source} is not a GGUF file: {reason}")
    if folder.is_file() or source.endswith(".gguf"):
        what = "is not a GGUF file" if folder.is_file() else "does not exist"
        raise ExportError(
            f"the file {source} {what}; give a folder with config.json, a hub id, or a GGUF file "
            "on this machine"
        )
    _check_hub_id("checkpoint", source, "config.json")
    wanted = [*_HUB_FILES, *(_HUB_CODE if options.trust_remote_code else [])]
    return _downloaded(source, options.revision, wanted, _HUB_OLD_WEIGHTS)


def located_adapter(source: str) -> Path:
    """Return an adapter's folder, downloaded from the hub if it is not local."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    _check_hub_id("adapter", source, "adapter_config.json")
    return _downloaded(source, None, _HUB_FILES, _HUB_OLD_ADAPTERS)


def _check_hub_id(what: str, source: str, file: str) -> None:
    """Raise ExportError for a path, which cannot be an id on the hub."""
    is_path = source.startswith(("/", ".", "~")) or Path(source).is_absolute()
    if is_path or source.count("/") > 1:
        raise ExportError(
            f"no {what} at {source}: no such folder; give a folder with {file} or a hub id"
        )


def _downloaded(
    source: str, revision: str | None, wanted: list[str], old_weights: list[str]
) -> Path:
    """Return the folder of a hub id's files; old weights only if there are no others."""
    try:
        folder = Path(snapshot_download(source, revision=revision, allow_patterns=wanted))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(source, revision=revision, allow_patterns=old_weights)
    except Exception as error:
        raise ExportError(
            f"{source} is no local folder and cannot be downloaded from the hub: "
            f"{reason_of(error)}; check the name and the network, or give a folder"
        ) from error
    return folder


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


def refusal_of_files(files: CheckpointFiles) -> str | None:
    """Return why the weights of a checkpoint cannot be used, and the fix; None if they can."""
    role, folder = files.role, files.folder
    if reason := pointer_in(folder):
        return f"cannot be read: {reason}"
    adapter = _first_file(folder, _ADAPTER_FILES)
    if adapter and not carries_adapter(files):
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
    if how := _quantized(files):
        return (
            f"has weights that are already quantized ({how}); a checkpoint in fp32, fp16 or bf16 "
            "is needed: export the model that they were made from, with --quantize int4 or "
            "int8 for small weights"
        )
    return None


def _first_file(folder: Path, patterns: Iterable[str]) -> str | None:
    found = (file.name for pattern in patterns for file in sorted(folder.glob(pattern)))
    return next(found, None)


def _quantized(files: CheckpointFiles) -> str | None:
    """Return how the weights are quantized, and the file that shows it; None if they are not."""
    config, folder = files.config_json, files.folder
    parts = (config, *(part for part in config.values() if isinstance(part, dict)))
    if any(part.get("quantization_config") is not None for part in parts):
        return None
    names: list[str] = []
    with contextlib.suppress(Exception), open_weights(folder) as weights:
        names = list(weights)  # errors are reported when the weights are loaded
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
