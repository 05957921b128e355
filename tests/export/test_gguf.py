"""GGUF files are exported as transformers reads them; damaged ones are refused in one line."""

import json
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFReader
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from dsbd_export import progress
from dsbd_export.checkpoints.gguf_file import is_gguf, read_header
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import ExportConfig
from dsbd_export.demo import demo_pair
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_pair
from dsbd_export.pipeline import export_bundle
from dsbd_export.progress import silent
from dsbd_ort.pipeline import Pipeline
from scripts.family_checkpoints import write_family_checkpoint
from tests.export.adapters import lora, write_adapter
from tests.export.conftest import written_tokenizer
from tests.export.gguf_files import KINDS, close, write_gguf
from tests.export.gguf_vocabularies import byte_level, write_vocabulary

TEMPLATE = "{% for message in messages %}<|begin|>{{ message['content'] }}{% endfor %}"
PROMPT = "Once upon a time"
NEW_TOKENS = 12
TARGET, DRAFT = demo_pair()
SECONDS = 20.0  # the whole loading takes 1 to 3 where nothing is wrong


def config_of(file: Path, output: Path | None = None) -> ExportConfig:
    return ExportConfig(target=str(file), output=output or file.parent / "bundle")


def refusal(file: Path) -> str:
    begin = time.process_time()
    with pytest.raises(ExportError) as caught:
        load_model(open_pair(config_of(file))[0])
    assert time.process_time() - begin < SECONDS
    assert "\n" not in str(caught.value)
    return str(caught.value)


def check_tokens(file: Path) -> None:
    """Export a file; the most probable tokens must be those of transformers on the same file."""
    config = config_of(file)
    export_bundle(config, report=silent)
    checkpoint, _ = open_pair(config)
    model = load_model(checkpoint)
    with Pipeline.from_bundle(config.output) as pipeline:
        ids = pipeline.tokenizer.encode(PROMPT)
        found = pipeline.generate(PROMPT, strategy="greedy", max_new_tokens=NEW_TOKENS)
    wanted = model.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=[1]
    )[0, len(ids) :]
    assert list(found.sequences[0].token_ids) == wanted.tolist()
    assert (config.output / "chat_template.jinja").read_text() == TEMPLATE
    assert checkpoint.eos_token_ids == [1]


def test_a_quantized_file_gives_the_tokens_of_transformers(tmp_path):
    check_tokens(write_gguf(DRAFT, tmp_path / "m.gguf", "Q8_0", template=TEMPLATE))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_quantization_of_the_demo_target(tmp_path, kind):
    check_tokens(write_gguf(TARGET, tmp_path / "m.gguf", kind, template=TEMPLATE))


KIND_ERRORS = [("F32", 0.0), ("BF16", 0.004), ("Q4_K", 0.1), ("Q6_K", 0.025)]


@pytest.mark.parametrize(("kind", "error"), KIND_ERRORS)
def test_weights_are_those_of_the_folder_that_the_file_was_made_from(tmp_path, kind, error):
    checkpoint, _ = open_pair(config_of(write_gguf(TARGET, tmp_path / "m.gguf", kind)))
    model = load_model(checkpoint)
    assert isinstance(model, LlamaForCausalLM)
    weights = model.state_dict()
    for name, wanted in load_file(TARGET / "model.safetensors").items():
        difference = (weights[name] - wanted.float()).square().mean().sqrt()
        assert difference <= error * wanted.float().square().mean().sqrt(), name


def test_dequantizing_is_counted_and_no_bar_is_drawn(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN", 0.0)
    file, lines = write_gguf(DRAFT, tmp_path / "m.gguf", "Q8_0"), []
    load_model(open_pair(config_of(file))[0], report=lines.append)
    sizes = np.cumsum([tensor.n_bytes for tensor in GGUFReader(file).tensors]) / 10**6
    phase = "target: dequantizing m.gguf"
    said = [line.split(", about ")[0] for line in lines]
    assert said == [phase, *(f"{phase}: {n:.1f} of {sizes[-1]:.1f} MB" for n in sizes[:-1])]
    assert len(set(said)) > 5
    assert capfd.readouterr().err == ""


def test_a_weight_of_another_shape_is_named(tmp_path):
    file = write_gguf(DRAFT, tmp_path / "m.gguf", "F16", end_of_turn=7)
    data = file.read_bytes()
    at = data.index(b"llama.attention.head_count_kv") + len("llama.attention.head_count_kv") + 4
    file.write_bytes(data[:at] + (1).to_bytes(4, "little") + data[at + 4 :])
    assert "k_proj.weight has the shape (160, 160), (32, 160)" in refusal(file)


def test_an_answer_also_ends_at_the_end_of_a_turn(tmp_path):
    file = write_gguf(DRAFT, tmp_path / "m.gguf", "F16", end_of_turn=7)
    assert open_pair(config_of(file))[0].eos_token_ids == [1, 7]
    write_gguf(DRAFT, file, "F16", end_of_turn=99999)
    assert "names token 99999 as tokenizer.ggml.eot_token_id" in refusal(file)


def test_an_adapter_is_merged_into_the_weights_of_a_file(tmp_path):
    file = write_gguf(DRAFT, tmp_path / "m.gguf", "F32")
    adapter = write_adapter(DRAFT, tmp_path / "adapter", lora())
    both = [
        ExportConfig(target=str(base), adapter=str(adapter), output=tmp_path)
        for base in (file, DRAFT)
    ]
    found, wanted = (load_model(open_pair(config)[0]).state_dict() for config in both)
    for name, weight in wanted.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


def test_other_files_of_the_folder_are_not_read(tmp_path):
    file = write_gguf(DRAFT, tmp_path / "m.gguf", "F16")
    for name in ("tokenizer.json", "generation_config.json", "config.json"):
        (tmp_path / name).write_text("of another model")
    checkpoint, _ = open_pair(config_of(file))
    written_tokenizer(checkpoint, tmp_path / "files")
    assert not (tmp_path / "files" / "generation_config.json").exists()


def test_an_unknown_architecture_and_changed_frequencies_are_refused(tmp_path):
    file = write_gguf(DRAFT, tmp_path / "m.gguf", "F16", architecture="rwkv99")
    assert "rwkv99" in refusal(file) and "checkpoint folder" in refusal(file)
    file = write_gguf(DRAFT, tmp_path / "m.gguf", "F16", scaling="yarn")
    assert "llama.rope.scaling.type = 'yarn'" in refusal(file)


def llama3_factors(rope: dict[str, float], head_dim: int) -> NDArray[np.float32]:
    """Return what converters store for Llama 3.1: by how much they divide each frequency."""
    frequencies = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def test_rotary_frequencies_of_llama_3_1_are_divided_as_in_its_folder(tmp_path):
    folder = write_family_checkpoint("llama-llama3", tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    factors = llama3_factors(config["rope_parameters"], head_dim)
    assert factors.min() == 1 < factors.max()
    file = write_gguf(folder, tmp_path / "m.gguf", "F32", rope_factors=factors)
    ids = torch.randint(300, (1, 250), generator=torch.Generator().manual_seed(0))
    models = [load_model(open_pair(config_of(each, tmp_path))[0]) for each in (file, folder)]
    with torch.inference_mode():
        found, wanted = (model(input_ids=ids).logits.numpy() for model in models)
    np.testing.assert_allclose(found, wanted, atol=2e-4)
    plain = write_gguf(folder, tmp_path / "plain.gguf", "F32")
    with torch.inference_mode():
        without = load_model(open_pair(config_of(plain))[0])(input_ids=ids).logits.numpy()
    assert np.abs(without - wanted).max() > 1e-2


def test_a_file_of_another_kind_and_a_folder_are_refused(tmp_path):
    file = tmp_path / "model.gguf"
    assert "does not exist" in refusal(file)
    file.write_bytes(b"version https://git-lfs")
    assert not is_gguf(file) and "is not a GGUF file" in refusal(file)
    file.rename(tmp_path / "model-Q8_0.gguf")
    assert "model-Q8_0.gguf" in refusal(tmp_path)  # the one to name


@pytest.fixture
def file(tmp_path):
    return write_vocabulary(tmp_path / "m.gguf", byte_level(pre="gpt-2"))


def changed(file: Path, at: int, content: bytes) -> Path:
    data = file.read_bytes()
    file.write_bytes(data[:at] + content + data[at + len(content) :])
    return file


def place_of(file: Path, key: str) -> int:
    """Return where the kind of a value lies; 4 bytes after it the value begins."""
    return file.read_bytes().index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key)


def test_a_header_says_what_was_written(file):
    vocabulary, header = byte_level(pre="gpt-2"), read_header(file)
    assert header.values["tokenizer.ggml.tokens"] == vocabulary.tokens
    assert header.values["tokenizer.ggml.token_type"].tolist() == vocabulary.kinds
    assert header.of_architecture("context_length") == 64
    assert header.values["llama.attention.layer_norm_rms_epsilon"] == np.float32(1e-5)
    assert header.shapes["token_embd.weight"] == (len(vocabulary.tokens), 32)
    assert header.num_layers == 1


def test_every_beginning_of_a_file_is_called_cut(file, tmp_path):
    data, part = file.read_bytes(), tmp_path / "part.gguf"
    lengths = [*range(4, 400, 13), *np.linspace(400, len(data) - 1, 40, dtype=int)]
    for length in lengths:
        part.write_bytes(data[:length])
        with pytest.raises(ExportError, match=r"part\.gguf is cut"):
            read_header(part)
    assert "is cut: it has" in refusal(part) and ".gguf-split-a" in refusal(part)


def test_a_big_endian_file_is_called_that(tmp_path):
    file = tmp_path / "big.gguf"
    writer = gguf.GGUFWriter(file, "llama", endianess=gguf.GGUFEndian.BIG)
    close(writer)
    assert "is big-endian" in refusal(file) and "gguf-convert-endian" in refusal(file)


def parts(folder: Path) -> list[Path]:
    """Write a model in two parts, as llama.cpp's tools do."""
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=1)
    for name in ("token_embd.weight", "output_norm.weight"):
        writer.add_tensor(name, np.zeros((64, 32), np.float32))
    close(writer)
    return sorted(folder.glob("m-*.gguf"))


def test_a_part_of_a_model_is_refused_with_the_command_that_joins(tmp_path):
    first, second = parts(tmp_path)
    assert "part 1 of the 2 parts" in refusal(first)
    assert "part 2 of the 2 parts" in refusal(second)
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(first.read_bytes() + second.read_bytes())
    for each in (first, second, joined):
        assert "llama-gguf-split --merge" in refusal(each)


def test_whole_files_joined_by_cat_are_refused(file):
    assert read_header(file)
    file.write_bytes(file.read_bytes() * 2)
    assert "joined by cat" in refusal(file)


HOSTILE = (0, 10**6, 2**31, 2**32 - 1)
REFUSED_NUMBERS = (
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count_kv",
    "rope.dimension_count",
    "vocab_size",
)


@pytest.mark.parametrize("name", REFUSED_NUMBERS)
def test_a_number_that_the_weights_contradict_is_refused_at_once(file, name):
    for number in HOSTILE:
        at = place_of(file, f"llama.{name}") + 4
        refusal(changed(file, at, struct.pack("<I", number)))


def test_a_context_that_is_too_large_is_named(file):
    at = place_of(file, "llama.context_length") + 4
    message = refusal(changed(file, at, struct.pack("<I", 2**31)))
    assert "context of 2147483648 tokens" in message and "give max_context" in message


COUNTS = [  # (key, bytes after the key)
    ("tokenizer.ggml.tokens", 8),  # tokens
    ("tokenizer.ggml.tokens", 16),  # bytes of the first token
    ("tokenizer.ggml.token_type", 8),  # numbers
    ("tokenizer.ggml.merges", 8),  # merges
    ("tokenizer.ggml.pre", 4),  # bytes of a text
    ("token_embd.weight", 4),  # columns
    ("token_embd.weight", 12),  # rows
    ("token_embd.weight", 24),  # bytes before it
]
DAMAGE = [  # (key or None, bytes after it, content, reason)
    (None, 4, struct.pack("<I", 1), "version 1 of GGUF"),
    *(  # values and tensors
        (None, at, struct.pack("<Q", number), "is cut or damaged")
        for at in (8, 16)
        for number in (10**6, 2**31, 2**63)
    ),
    *(
        (*count, struct.pack("<Q", number), "is cut")
        for count in COUNTS
        for number in (2**31, 2**63, 2**64 - 1)
    ),
    (
        *("llama.block_count", 4, struct.pack("<I", 2**31)),
        "weights of 1 layers, and its block_count is 2147483648",
    ),
    ("llama.block_count", 0, struct.pack("<I", 99), "llama.block_count has the unknown kind 99"),
    ("tokenizer.ggml.tokens", 4, struct.pack("<I", 9), "a list of the unknown kind 9"),
    ("token_embd.weight", 0, struct.pack("<I", 2**31), "has 2147483648 dimensions"),
    ("token_embd.weight", 20, struct.pack("<I", 4), "stores token_embd.weight as type 4 of ggml"),
    ("tokenizer.ggml.pre", 12, b"\xff", "tokenizer.ggml.pre is not UTF-8"),
]


@pytest.mark.parametrize(("key", "after", "content", "reason"), DAMAGE, ids=range(len(DAMAGE)))
def test_damage_is_named(file, key, after, content, reason):
    at = after + (place_of(file, key) if key else 0)
    assert reason in refusal(changed(file, at, content))


def test_random_damage_of_a_header_ends_in_one_line(file):
    """Bytes of the header become others: it is read, or refused, and nothing else happens."""
    data, random = file.read_bytes(), np.random.default_rng(0)
    for _ in range(300):
        at = int(random.integers(4, 1200))
        file.write_bytes(data[:at] + random.bytes(int(random.integers(1, 9))) + data[at + 8 :])
        try:
            read_header(file)
        except ExportError as error:
            assert "\n" not in str(error)
