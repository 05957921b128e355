"""GGUF files of Llama checkpoints, as people have them: quantized, with tokenizer and template."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.torch import load_file

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
    writer = llama_writer(file, architecture, config)
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
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
    close(writer)
    return file


def llama_writer(file: Path, architecture: str, config: dict[str, Any]) -> gguf.GGUFWriter:
    """Return the writer of a file that has the sizes of a config."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    return writer


def close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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


SIZE = 256  # numbers of a block
Bytes = NDArray[np.uint8]


def quantized(values: NDArray[np.float32], kind: str) -> tuple[NDArray[np.generic], Kind]:
    """Return a matrix as it is stored, and how; blocks that do not fit are 8 bits, as usual."""
    if kind not in _K_QUANTS:
        return gguf.quants.quantize(values, Kind[kind]), Kind[kind]
    if values.shape[-1] % SIZE:
        return gguf.quants.quantize(values, Kind.Q8_0), Kind.Q8_0
    blocks = _K_QUANTS[kind](values.reshape(-1, SIZE).astype(np.float64))
    return blocks.reshape(len(values), -1), Kind[kind]


def _q4_k(blocks: NDArray[np.float64]) -> Bytes:
    """Eight groups of 32 numbers of 4 bits, each with a scale and a least number of 6 bits."""
    groups = blocks.reshape(-1, 8, 32)
    least = np.minimum(groups.min(axis=2), 0)
    d, scales = _scaled((groups.max(axis=2) - least) / 15, 63)
    d_least, mins = _scaled(-least, 63)
    step = np.maximum(d.astype(float) * scales, 1e-30)[..., None]
    offset = (d_least.astype(float) * mins)[..., None]
    q = np.clip(np.rint((groups + offset) / step), 0, 15).astype(np.uint8)
    packed = np.empty((len(blocks), 12), np.uint8)
    packed[:, :4] = scales[:, :4] | scales[:, 4:] >> 4 << 6
    packed[:, 4:8] = mins[:, :4] | mins[:, 4:] >> 4 << 6
    packed[:, 8:] = scales[:, 4:] & 15 | (mins[:, 4:] & 15) << 4
    nibbles = (q[:, ::2] | q[:, 1::2] << 4).reshape(-1, 128)
    return np.concatenate([_bytes(d), _bytes(d_least), packed, nibbles], axis=1)


def _q6_k(blocks: NDArray[np.float64]) -> Bytes:
    """Sixteen groups of 16 numbers of 6 bits, each with a scale of 8 bits."""
    groups = blocks.reshape(-1, 16, 16)
    d, scales = _scaled(np.abs(groups).max(axis=2) / 31, 127)
    step = np.maximum(d.astype(float) * scales, 1e-30)[..., None]
    q = (np.clip(np.rint(groups / step), -32, 31) + 32).astype(np.uint8)
    q = q.reshape(-1, 2, 4, 32)  # halves of four rows, whose high bits share a byte
    low = np.concatenate([q[:, :, :2] & 15 | (q[:, :, 2:] & 15) << 4], axis=2).reshape(-1, 128)
    high = (q >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(axis=2, dtype=np.uint8)
    return np.concatenate([low, high.reshape(-1, 64), scales, _bytes(d)], axis=1)


def _scaled(steps: NDArray[np.float64], most: int) -> tuple[NDArray[np.float16], Bytes]:
    """Return for each block one number, and integers that times it are the steps."""
    d = (steps.max(axis=1, keepdims=True) / most).astype(np.float16)
    return d, np.clip(np.rint(steps / np.maximum(d.astype(float), 1e-30)), 0, most).astype(np.uint8)


def _bytes(numbers: NDArray[np.float16]) -> Bytes:
    return numbers.view(np.uint8).reshape(len(numbers), -1)


_K_QUANTS = {"Q4_K": _q4_k, "Q6_K": _q6_k}
