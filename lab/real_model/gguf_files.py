"""GGUF files for llama.cpp: the target in another precision, and a draft."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file

from dsbd_runtime.bundle_files.durable_files import put_in_place

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
_SIZES = (  # beginnings of keys that describe the target only
    "llama.",
    "general.size_label",
    "general.file_type",
    "GGUF.",
)


def requantized(source: Path, file: Path) -> None:
    """Write the weights of a file in Q8_0, with the same metadata."""
    reader = GGUFReader(source)
    tensors = (
        (tensor.name, dequantize(tensor.data, tensor.tensor_type)) for tensor in reader.tensors
    )
    _write(file, reader, tensors, added={}, left_out=("general.file_type", "GGUF."))


def draft_file(target: Path, draft: Path, file: Path) -> None:
    """Write a Llama draft in Hugging Face layout as Q8_0, with the tokenizer of the target's file.

    Its head is the whole embedding, because llama.cpp cannot restrict a draft to some tokens.
    """
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    sizes = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.rope.dimension_count": config["hidden_size"] // heads,
        "llama.vocab_size": config["vocab_size"],
        "llama.rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "llama.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
    }
    weights = load_file(draft / "model.safetensors")
    tensors = ((_gguf_name(name), _paired(name, weight, heads)) for name, weight in weights.items())
    _write(file, GGUFReader(target), tensors, added=sizes, left_out=_SIZES)


def _gguf_name(name: str) -> str:
    """Return a tensor's GGUF name: blk.2.ffn_up.weight for model.layers.2.mlp.up_proj.weight."""
    module, _, kind = name.rpartition(".")
    if module in _NAMES:
        return f"{_NAMES[module]}.{kind}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest]}.{kind}"


def _paired(name: str, weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder rows for llama.cpp's rotary embedding, in which paired dimensions are neighbours.

    In a head of 4 rows transformers rotates the pairs (0, 2) and (1, 3), so the order is 0, 2, 1,
    3.
    """
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _write(
    file: Path,
    source: GGUFReader,
    tensors: Iterator[tuple[str, NDArray[np.float32]]],
    *,
    added: dict[str, int | float],
    left_out: tuple[str, ...],
) -> None:
    """Write tensors, ``added``, and metadata of ``source`` without the prefixes ``left_out``."""
    partial = file.with_suffix(".partial")
    writer = GGUFWriter(partial, source.fields["general.architecture"].contents())
    for name, field in source.fields.items():
        if name != "general.architecture" and not name.startswith(left_out):
            kinds = field.types
            inner = kinds[1] if len(kinds) > 1 else None
            writer.add_key_value(name, field.contents(), kinds[0], inner)
    for name, value in added.items():
        add: Any = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(name, value)
    q8 = GGMLQuantizationType.Q8_0
    for name, weight in tensors:
        if weight.ndim == 1:
            writer.add_tensor(name, weight.astype(np.float32))
        else:
            writer.add_tensor(name, quantize(weight.astype(np.float32), q8), raw_dtype=q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    put_in_place(partial, file)
