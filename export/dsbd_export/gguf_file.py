"""GGUF files: a checkpoint in one file, whose weights are mostly quantized.

transformers reads config, weights and tokenizer of the architectures that it knows, and turns the
weights into plain ones: what the file says in its own arithmetic is the checkpoint of an export.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from dsbd_export.errors import ExportError, reason_of

_MAGIC = b"GGUF"
_END_FIELDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
_FACTORS = "rope_freqs.weight"
_ROPE_TENSORS = ("rope_freqs", "rope_factors")


def is_gguf(file: Path) -> bool:
    """Return whether this is such a file, whatever its name."""
    if not file.is_file():
        return False
    with file.open("rb") as content:
        return content.read(len(_MAGIC)) == _MAGIC


@contextlib.contextmanager
def alone(file: Path) -> Iterator[Path]:
    """Yield a folder with the file and no other: transformers also reads what lies beside it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / file.name).symlink_to(file.resolve())
        yield Path(folder)


def read_gguf_config(role: str, file: Path) -> PreTrainedConfig:
    """Return the config that the metadata of a file say.

    Raises:
        ExportError: transformers does not know the architecture, or the file is damaged.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            file.parent, gguf_file=file.name, local_files_only=True
        )
        _take_rope_factors(config, GGUFReader(file))
        return config
    except Exception as error:
        raise ExportError(
            f"transformers cannot read the {role} in {file}: {reason_of(error)}; export the "
            "checkpoint folder that the file was made from, as the model's page names it, with "
            "--quantize int4 or int8-dynamic for small weights"
        ) from error


def _take_rope_factors(config: PreTrainedConfig, reader: GGUFReader) -> None:
    """Give a config what transformers leaves out: the numbers that divide rotary frequencies.

    Llama 3.1 and later store them as a tensor, whatever the rule that they come from. Rope of
    transformers divides by such numbers in its type "longrope"; here the same ones at all lengths.
    """
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if config.model_type != "llama" or _FACTORS not in tensors or _scaling(reader) is not None:
        return
    factors = tensors[_FACTORS].data.astype(float).tolist()
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": config.rope_parameters["rope_theta"],
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config.max_position_embeddings,
    }


def _scaling(reader: GGUFReader) -> str | None:
    """Return what metadata say of scaled frequencies, None where they say nothing."""
    for name, field in reader.fields.items():
        if name.endswith(".rope.scaling.type") and field.contents() != "none":
            return f"{name} = {field.contents()!r}"
    return None


def gguf_end_ids(file: Path) -> list[int] | None:
    """Return the tokens that end an answer, None where the file names none."""
    fields = GGUFReader(file).fields
    found = [int(fields[name].contents()) for name in _END_FIELDS if name in fields]
    return list(dict.fromkeys(found)) or None


def gguf_refusal(file: Path, config: PreTrainedConfig) -> str | None:
    """Return what changes the rotary frequencies and is left out by transformers; None: nothing."""
    if getattr(config, "rope_parameters", {}).get("rope_type", "default") != "default":
        return None
    reader = GGUFReader(file)
    if scaling := _scaling(reader):
        return scaling
    names = (tensor.name for tensor in reader.tensors)
    return next((name for name in names if name.startswith(_ROPE_TENSORS)), None)


def gguf_weights(file: Path, model_class: Any, config: PreTrainedConfig) -> dict[str, Tensor]:
    """Return the weights in fp32, by the names of ``model_class``."""
    with torch.device("meta"):
        model = model_class(config)  # its names alone
    content = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    weights: dict[str, Tensor] = content["tensors"]
    return weights
