"""GGUF files: a checkpoint in one file, whose weights are mostly quantized."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers import modeling_gguf_pytorch_utils as gguf_reading

from dsbd_export.checkpoints.gguf_header import MAGIC, GgufHeader, read_header
from dsbd_export.errors import ExportError, reason_of
from dsbd_export.progress import Counter, counted

_ENDS = ("eos", "eot", "eom")
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
    _check_layers(role, file, header)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            file.parent, gguf_file=file.name, local_files_only=True
        )
        _take_rope_factors(config, file, header)
        if header.token_id("padding") is None:  # else it may be beyond the vocabulary
            config.pad_token_id = None
        return config
    except Exception as error:
        raise ExportError(
            f"transformers cannot read the {role} in {file}: {reason_of(error)}; export the "
            "checkpoint folder that the file was made from, as the model's page names it, with "
            "--quantize int4 or int8 for small weights"
        ) from error


def _check_layers(role: str, file: Path, header: GgufHeader) -> None:
    """Raise ExportError unless a file has as many layers as its metadata say."""
    num_layers = header.of_architecture("block_count")
    if num_layers is not None and num_layers != header.num_layers:
        raise ExportError(
            f"the {role} in {file} has weights of {header.num_layers} layers, and its block_count "
            f"is {num_layers!r}; download the file again, or convert the model again"
        )


def _take_rope_factors(config: PreTrainedConfig, file: Path, header: GgufHeader) -> None:
    """Give a config the divisors of rotary frequencies that Llama 3.1 stores as a tensor."""
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


def gguf_end_ids(header: GgufHeader) -> list[int] | None:
    """Return the tokens that end an answer, None if the file names none."""
    found = (header.token_id(name) for name in _ENDS)
    return list(dict.fromkeys(index for index in found if index is not None)) or None


def gguf_refusal(header: GgufHeader, config: PreTrainedConfig) -> str | None:
    """Return the change of rotary frequencies that transformers ignores; None: no change."""
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
        model = model_class(config)  # its names and shapes alone
    wanted = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    has = sum(map(math.prod, read_header(file).shapes.values()))
    needs = sum(map(math.prod, wanted.values()))
    if needs > 2 * has:  # a head may be the embedding, which is in the file once
        raise ExportError(
            f"its metadata describe a model of {needs:,} weights, and it has {has:,}; download the "
            "file again, or convert the model again"
        )
    with _counted_by(counter):
        content = gguf_reading.load_gguf_checkpoint(
            str(file), return_tensors=True, model_to_load=model
        )
    weights: dict[str, Tensor] = content["tensors"]
    for name, weight in weights.items():
        if wanted.get(name) != tuple(weight.shape):
            raise ExportError(
                f"{name} has the shape {tuple(weight.shape)}, {wanted.get(name)} by the file's "
                "metadata; download the file again, or convert the model again"
            )
    return weights


@contextlib.contextmanager
def _counted_by(counter: Counter) -> Iterator[None]:
    """Count the weights that transformers dequantizes, instead of its progress bar."""
    bar = gguf_reading.tqdm
    gguf_reading.tqdm = lambda weights, **_: counted(weights, counter)
    try:
        yield
    finally:
        gguf_reading.tqdm = bar
