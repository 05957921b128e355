"""Damaged GGUF files are refused in one line, at once, for any numbers in their headers."""

import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from dsbd_export.checkpoints.gguf_file import read_header
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_pair
from tests.export.gguf_files import close
from tests.export.gguf_vocabularies import byte_level, write_vocabulary

SECONDS = 20.0  # the whole loading takes 1 to 3 where nothing is wrong


@pytest.fixture
def file(tmp_path):
    return write_vocabulary(tmp_path / "m.gguf", byte_level(pre="gpt-2"))


def refusal(file: Path) -> str:
    begin = time.process_time()
    with pytest.raises(ExportError) as caught:
        load_model(open_pair(ExportConfig(target=str(file), output=file.parent / "out"))[0])
    assert time.process_time() - begin < SECONDS
    assert "\n" not in str(caught.value)
    return str(caught.value)


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
