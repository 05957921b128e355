"""Folders of CTranslate2 of tiny checkpoints, as its converter writes them, and their checkpoints.

The converter itself is not needed: ``test_ctranslate2_itself`` compares both where it is installed.
"""

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    MarianConfig,
    PegasusConfig,
)

from dsbd_export.checkpoints.checkpoint import quiet_libraries
from scripts.family_checkpoints import write_checkpoint, write_family_checkpoint
from scripts.speech_checkpoint import TOKENS, generation_config, write_whisper
from tests.encoder_decoder_pair import with_languages
from tests.export.conftest import edit_json
from tests.export.test_marian_tokenizer import SOURCES, pieces_of, with_marian_files

KINDS = ("float32", "float16", "bfloat16", "int8", "int16")
WHISPER, TRANSFORMER, DECODER = "WhisperSpec", "TransformerSpec", "TransformerDecoderSpec"
REVISIONS = {WHISPER: 3, TRANSFORMER: 7, DECODER: 8, "Wav2Vec2Spec": 3}
_TYPES = ("float32", "int8", "int16", "int32", "float16", "bfloat16")
_NAMES = {
    "self_attn.out_proj": "self_attention/linear_1",
    "self_attn_layer_norm": "self_attention/layer_norm",
    "encoder_attn.q_proj": "attention/linear_0",
    "encoder_attn.out_proj": "attention/linear_2",
    "encoder_attn_layer_norm": "attention/layer_norm",
    "fc1": "ffn/linear_0",
    "fc2": "ffn/linear_1",
    "final_layer_norm": "ffn/layer_norm",
}
Arrays = dict[str, NDArray[Any]]


def checkpoint_of(family: str, folder: Path) -> Path:
    """Write the tiny checkpoint of a family."""
    if family == "whisper":
        return _without_times(with_empty_token(write_whisper(folder, deviation=0.4)))
    if family == "m2m_100":
        return _without_gaps(with_languages(write_family_checkpoint(family, folder)))
    with_marian_files(folder)
    size = len(json.loads((folder / "vocab.json").read_text()))
    sizes = {f"{stack}_{name}": n for stack in ("encoder", "decoder") for name, n in _SIZES.items()}
    config = MarianConfig(
        vocab_size=size,
        d_model=32,
        **sizes,
        max_position_embeddings=128,
        activation_function="swish",
        scale_embedding=True,
        pad_token_id=size - 1,
        decoder_start_token_id=size - 1,
        eos_token_id=0,
        forced_eos_token_id=None,
        bad_words_ids=[[size - 1]],
    )
    write_checkpoint(folder, config, deviation=0.17)
    with_marian_files(folder)
    return _with_zeros(folder)


_SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}


def _with_zeros(folder: Path) -> Path:
    """A Marian with biases of its logits, and zeros for the token that starts a target."""
    model = model_of(folder)
    with torch.no_grad():
        model.model.shared.weight[-1] = 0
        model.final_logits_bias.normal_()[..., -1] = 0
    model.save_pretrained(folder)
    return folder


def _without_gaps(folder: Path) -> Path:
    """A translator with a token for each id: CTranslate2 numbers tokens by their order."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    vocabulary |= {f"unused{i}": i for i in set(range(size)) - set(vocabulary.values())}
    file.write_text(json.dumps(content))
    settings = dict.fromkeys(("bos_token", "unk_token", "eos_token"), "<|begin|>")
    edit_json(folder / "tokenizer_config.json", **settings)
    # transformers counts positions from the padding on, the converter from that of M2M100, 1
    special = {"pad_token_id": 1, "eos_token_id": 0, "decoder_start_token_id": 0}
    for name in ("config.json", "generation_config.json"):
        edit_json(folder / name, **special)
    model_of(folder).save_pretrained(folder)  # in fp32: the converter rounds its positions too
    return folder


def with_empty_token(folder: Path) -> Path:
    """A Whisper with the token "", by which CTranslate2 sees that it has several languages."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.__getitem__)
    vocabulary[""] = vocabulary.pop(last)
    merges = [merge for merge in content["model"]["merges"] if "".join(merge) != last]
    content["model"]["merges"] = merges
    file.write_text(json.dumps(content))
    assert vocabulary[""] == TOKENS.end - 1
    return folder


def _without_times(folder: Path) -> Path:
    """A Whisper that never writes times, which a random one writes without being asked."""
    times = range(TOKENS.number - len(TOKENS.times), TOKENS.number)
    suppressed = [*generation_config()["suppress_tokens"], *times]
    edit_json(folder / "generation_config.json", suppress_tokens=suppressed)
    return folder


def model_of(folder: Path) -> Any:
    """The model of transformers, in fp32."""
    is_whisper = (folder / "preprocessor_config.json").is_file()
    of = AutoModelForSpeechSeq2Seq if is_whisper else AutoModelForSeq2SeqLM
    with quiet_libraries():
        return of.from_pretrained(folder, dtype=torch.float32).eval()


def write_folder(checkpoint: Path, folder: Path, kind: str = "float32", **changes: Any) -> Path:
    """Write a checkpoint as CTranslate2's converter does; ``changes``: arrays, None for absent."""
    folder.mkdir(parents=True)
    model = model_of(checkpoint)
    is_whisper = model.config.model_type == "whisper"
    arrays = arrays_of(model) | changes
    quantized = quantized_arrays({n: a for n, a in arrays.items() if a is not None}, kind)
    specification = WHISPER if is_whisper else TRANSFORMER
    (folder / "model.bin").write_bytes(file_bytes(specification, quantized))
    for name in COPIED[model.config.model_type]:
        shutil.copyfile(checkpoint / name, folder / name)
    tokens = vocabulary_of(checkpoint)
    if model.config.model_type == "marian":
        tokens.remove("<pad>")
    name = "vocabulary" if is_whisper else "shared_vocabulary"
    (folder / f"{name}.json").write_text(json.dumps(tokens, indent=2))
    config = speech_settings(checkpoint) if is_whisper else token_settings(checkpoint)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return folder


def write_argos(folder: Path, kind: str = "int8", *, is_older: bool = False) -> Path:
    """Write a package of Argos: a folder of CTranslate2 and sentencepiece's model, in a zip.

    Older ones have no config.json, and names and settings of earlier revisions.
    """
    place = folder / "translate-en_de-1_0"
    (place / "model").mkdir(parents=True)
    known = pieces_of(place / "sentencepiece.model", SOURCES)[2:]
    tokens = ["<unk>", "<s>", "</s>", *known, "<blank>"]
    config = PegasusConfig(
        vocab_size=len(tokens),
        d_model=32,
        **{f"{stack}_{name}": n for stack in ("encoder", "decoder") for name, n in _SIZES.items()},
        max_position_embeddings=128,
        activation_function="relu",
        scale_embedding=True,
    )
    model = model_of(write_checkpoint(folder / "checkpoint", config, deviation=0.17))
    arrays = arrays_of(model)
    positions = np.random.default_rng(0).standard_normal((128, 32), np.float32)
    arrays |= {
        f"{stack}/position_encodings/encodings": positions for stack in ("encoder", "decoder")
    }
    versions = {"version": 5, "revision": 4} if is_older else {}
    arrays = older_names(arrays) if is_older else arrays
    content = file_bytes(TRANSFORMER, quantized_arrays(arrays, kind), **versions)
    (place / "model" / "model.bin").write_bytes(content)
    (place / "model" / "shared_vocabulary.txt").write_text("\n".join(tokens) + "\n")
    settings = dict.fromkeys(("add_source_bos", "add_source_eos"), False)
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    settings |= {**names, "decoder_start_token": "<s>"}
    if not is_older:
        (place / "model" / "config.json").write_text(json.dumps(settings))
    (place / "metadata.json").write_text("{}")
    made = shutil.make_archive(str(folder / "package"), "zip", folder, place.name)
    return Path(made).rename(folder / "translate-en_de-1_0.argosmodel")


def older_names(arrays: Arrays) -> Arrays:
    """Arrays by the names of revision 4: settings of both stacks are the same numbers."""
    both = ("num_heads", "pre_norm", "activation", "embeddings_merge", "alignment_layer")
    both = (*both, "alignment_heads")
    named: Arrays = {}
    for name, value in arrays.items():
        last = name.rpartition("/")[2]
        older = last if last in both else name.replace("embeddings_0", "embeddings")
        named[older] = value
    return named


COPIED = {
    "whisper": ("tokenizer.json", "preprocessor_config.json"),
    "marian": ("source.spm", "target.spm"),
    "m2m_100": ("tokenizer.json",),
}


def vocabulary_of(checkpoint: Path) -> list[str]:
    """The tokens in the order of their ids."""
    if (checkpoint / "vocab.json").is_file():
        ids = json.loads((checkpoint / "vocab.json").read_text())
    else:
        content = json.loads((checkpoint / "tokenizer.json").read_text())
        ids = content["model"]["vocab"] | {t["content"]: t["id"] for t in content["added_tokens"]}
    return sorted(ids, key=ids.__getitem__)


def speech_settings(checkpoint: Path) -> dict[str, Any]:
    """config.json of CTranslate2 of a Whisper."""
    said = json.loads((checkpoint / "generation_config.json").read_text())
    return {
        "alignment_heads": said["alignment_heads"],
        "lang_ids": sorted(said["lang_to_id"].values()),
        "suppress_ids": said["suppress_tokens"],
        "suppress_ids_begin": said["begin_suppress_tokens"],
    }


def token_settings(checkpoint: Path) -> dict[str, Any]:
    """config.json of CTranslate2 of a translator."""
    said = json.loads((checkpoint / "tokenizer_config.json").read_text())
    end = said.get("eos_token", "</s>")
    return {
        "add_source_bos": False,
        "add_source_eos": False,
        "bos_token": said.get("bos_token", "<s>"),
        "decoder_start_token": end,
        "eos_token": end,
        "layer_norm_epsilon": None,
        "multi_query_attention": False,
        "unk_token": said.get("unk_token", "<unk>"),
    }


def arrays_of(model: Any) -> Arrays:
    """The arrays of a model by CTranslate2's names; integers are its settings."""
    config, is_whisper = model.config, model.config.model_type == "whisper"
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    arrays: Arrays = {}
    for stack in ("encoder", "decoder"):
        arrays |= _stack(weights, stack, getattr(config, f"{stack}_layers"))
        part = model.get_encoder() if stack == "encoder" else model.get_decoder()
        if config.model_type == "m2m_100":
            encodings = part.embed_positions.weights[part.embed_positions.offset :].numpy()
            arrays[f"{stack}/position_encodings/encodings"] = encodings
        arrays[f"{stack}/num_heads"] = np.int16(config.encoder_attention_heads)
        if stack == "decoder" or not is_whisper:
            arrays |= _settings(stack, config)
    if is_whisper:
        for conv in ("conv1", "conv2"):
            for last in ("weight", "bias"):
                arrays[f"encoder/{conv}/{last}"] = weights[f"model.encoder.{conv}.{last}"]
    arrays["decoder/projection/weight"] = arrays["decoder/embeddings/weight"]
    if config.model_type == "marian":
        arrays["decoder/projection/bias"] = weights["final_logits_bias"][0]
        for name in ("encoder/embeddings_0", "decoder/embeddings", "decoder/projection"):
            arrays[f"{name}/weight"] = arrays[f"{name}/weight"][:-1]
        arrays["decoder/projection/bias"] = arrays["decoder/projection/bias"][:-1]
    return arrays


def _settings(stack: str, config: Any) -> Arrays:
    is_whisper, is_marian = (config.model_type == each for each in ("whisper", "marian"))
    scale = np.int8(0) if is_whisper else np.float32(config.d_model**0.5)
    activation = ("relu", "gelu_new", "swish", "gelu").index(config.activation_function)
    of_stack = {"multi_query_attention": np.int8(0), "embeddings_merge": np.int8(0)}
    if stack == "decoder":
        of_stack = {
            "alignment_layer": np.int16(-1),
            "alignment_heads": np.int16(1),
            "start_from_zero_embedding": np.int8(is_marian),
            **dict.fromkeys(("alibi", "alibi_use_positive_positions", "scale_alibi"), np.int8(0)),
        }
    both = {
        "pre_norm": np.int8(not is_marian),
        "activation": np.int8(activation),
        "scale_embeddings": scale,
    }
    return {f"{stack}/{name}": np.asarray(value) for name, value in {**of_stack, **both}.items()}


def _stack(weights: Mapping[str, NDArray[Any]], stack: str, num_layers: int) -> Arrays:
    place, arrays = f"model.{stack}", {}

    def take(name: str, *modules: str) -> None:
        is_norm = name.endswith("layer_norm")
        for last, ours in (("weight", "gamma"), ("bias", "beta")):
            found = [weights.get(f"{place}.{module}.{last}") for module in modules]
            if any(each is not None for each in found):
                width = len(weights[f"{place}.{modules[0]}.weight"])
                whole = [np.zeros(width, np.float32) if each is None else each for each in found]
                arrays[f"{stack}/{name}/{ours if is_norm else last}"] = np.concatenate(whole)

    embeddings = "embeddings_0" if stack == "encoder" else "embeddings"
    take(embeddings, "embed_tokens")
    take("layer_norm", "layer_norm")
    if f"{place}.embed_positions.weight" in weights:
        encodings = weights[f"{place}.embed_positions.weight"]
        arrays[f"{stack}/position_encodings/encodings"] = encodings
    for layer in range(num_layers):
        ours, theirs = f"layer_{layer}", f"layers.{layer}"
        for theirs_of, ours_of in _NAMES.items():
            take(f"{ours}/{ours_of}", f"{theirs}.{theirs_of}")
        for name, module, parts in (
            ("self_attention/linear_0", "self_attn", "qkv"),
            ("attention/linear_1", "encoder_attn", "kv"),
        ):
            if f"{place}.{theirs}.{module}.k_proj.weight" in weights:
                take(f"{ours}/{name}", *(f"{theirs}.{module}.{part}_proj" for part in parts))
    return arrays


def quantized_arrays(arrays: Arrays, kind: str) -> Arrays:
    """Arrays whose weights are of a kind, with scales; an alias is the name of its array."""
    found: dict[str, Any] = {}
    for name in sorted(arrays):
        value = np.asarray(arrays[name])
        same = (n for n, a in arrays.items() if n < name and np.array_equal(a, value))
        first = min(same, default=None) if value.shape else None
        if first is not None:
            found[name] = first
        elif not value.shape or kind == "float32":
            found[name] = value
        elif name.endswith("/weight") and kind.startswith("int"):
            found |= _integers(name, value, kind)
        else:
            found[name] = value if kind.startswith("int") else _rounded(value, kind)
    return found


def _integers(name: str, value: NDArray[Any], kind: str) -> Arrays:
    if kind == "int16":
        scale = np.float32(2**10 / np.abs(value).max())
        return {name: np.rint(value * scale).astype(np.int16), f"{name}_scale": np.asarray(scale)}
    rows = value.reshape(len(value), -1)
    scale = 127 / np.abs(rows).max(1)
    integers = np.rint(rows * scale[:, None]).astype(np.int8).reshape(value.shape)
    return {name: integers, f"{name}_scale": scale}


def _rounded(value: NDArray[Any], kind: str) -> NDArray[Any]:
    if kind == "float16":
        return value.astype(np.float16)
    bits = torch.from_numpy(value).to(torch.bfloat16).view(torch.int16).numpy()
    return bits.view(np.dtype(np.uint16))


def file_bytes(
    specification: str, arrays: Arrays, *, version: int = 6, revision: int | None = None
) -> bytes:
    """The bytes of model.bin; texts among the arrays are aliases."""
    aliases = {name: array for name, array in arrays.items() if isinstance(array, str)}
    stored = {name: array for name, array in sorted(arrays.items()) if name not in aliases}
    revision = REVISIONS[specification] if revision is None else revision
    content = [struct.pack("<I", version), _text(specification), struct.pack("<I", revision)]
    content.append(struct.pack("<I", len(stored)))
    for name, array in stored.items():
        kind = _TYPES.index("bfloat16" if array.dtype == np.uint16 else array.dtype.name)
        content.append(_text(name))
        content.append(struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape))
        content.append(struct.pack("<BI", kind, array.nbytes) + array.tobytes())
    content.append(struct.pack("<I", len(aliases)))
    content += [_text(alias) + _text(name) for alias, name in sorted(aliases.items())]
    return b"".join(content)


def _text(text: str) -> bytes:
    return struct.pack("<H", len(text.encode()) + 1) + text.encode() + b"\0"
