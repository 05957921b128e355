"""GGUF files of Llama checkpoints, as people have them: quantized, with tokenizer and template."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file

from tests.export.k_quants import quantized

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K")
ARCHITECTURE = "llama"


def write_gguf(
    folder: Path,
    file: Path,
    kind: str,
    *,
    architecture: str = ARCHITECTURE,
    template: str | None = None,
    scaling: str | None = None,
    end_of_turn: int | None = None,
    rope_factors: NDArray[np.float32] | None = None,
) -> Path:
    """Write a Llama checkpoint with a byte-level BPE to ``file``; matrices as ``kind``."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, architecture)
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_rope_dimension_count(config["hidden_size"] // num_heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, folder, config["vocab_size"])
    if template is not None:
        writer.add_chat_template(template)
    if end_of_turn is not None:
        writer.add_eot_token_id(end_of_turn)
    if scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, weight in load_file(folder / "model.safetensors").items():
        values = weight.float().numpy()
        if name.endswith("q_proj.weight"):
            values = _interleaved(values, num_heads)
        elif name.endswith("k_proj.weight"):
            values = _interleaved(values, num_kv_heads)
        stored, stored_as = quantized(values, kind if values.ndim == 2 else "F32")
        new_name = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(new_name, stored, raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _interleaved(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Return the rows of a head in the order of rotary pairs that the format has for Llama."""
    heads = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(weight.shape)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, size: int) -> None:
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["id"]: token["content"] for token in content["added_tokens"]}
    token_by_id = {i: token for token, i in content["model"]["vocab"].items()} | added
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token_by_id.get(i, f"[PAD{i}]") for i in range(size)])
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if i in added else normal for i in range(size)])
    merges = content["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
