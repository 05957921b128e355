"""Files of a tokenizer: which are written, and from which older ones tokenizer.json is built."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_checkpoint
from dsbd_export.tokenizers.tokenizer_files import (
    highest_token_id,
    read_tokenizer,
    write_tokenizer_files,
)

TEXT = "def read(path): return path"


def opened(folder):
    return open_checkpoint("target", folder, ExportConfig(target="", draft="", output=Path("out")))


@pytest.fixture
def checkpoint(llama_folder, tmp_path):
    """A copy that may be changed."""
    return opened(shutil.copytree(llama_folder, tmp_path / "checkpoint"))


@pytest.fixture
def slow_checkpoint(checkpoint):
    """The same tokenizer as vocab.json and merges.txt, as GPT-2 came."""
    file = checkpoint.folder / "tokenizer.json"
    model = json.loads(file.read_text())["model"]
    file.unlink()
    (checkpoint.folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(merge) for merge in model["merges"]]
    (checkpoint.folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>", "unk_token": "<|end|>"}
    (checkpoint.folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return checkpoint


def test_files_are_written(checkpoint, tmp_path):
    (checkpoint.folder / "chat_template.jinja").write_text("{{ messages }}é\n", encoding="utf-8")
    output = tmp_path / "bundle"
    output.mkdir()
    write_tokenizer_files(checkpoint, output, print)
    assert {file.name for file in output.iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    }
    for name in ("generation_config.json", "chat_template.jinja"):
        assert (output / name).read_bytes() == (checkpoint.folder / name).read_bytes()
    assert read_tokenizer(checkpoint) == json.loads((output / "tokenizer.json").read_text())


def test_a_slow_tokenizer_becomes_a_file(slow_checkpoint, llama_folder, tmp_path):
    output = tmp_path / "bundle"
    output.mkdir()
    write_tokenizer_files(slow_checkpoint, output, print)
    built = Tokenizer.from_file(str(output / "tokenizer.json"))
    wanted = Tokenizer.from_file(str(llama_folder / "tokenizer.json"))
    assert built.encode(TEXT).ids == wanted.encode(TEXT).ids
    assert built.decode(built.encode(TEXT).ids) == TEXT
    assert read_tokenizer(slow_checkpoint) == json.loads((output / "tokenizer.json").read_text())


def test_no_tokenizer_at_all(checkpoint):
    (checkpoint.folder / "tokenizer.json").unlink()
    with pytest.raises(ExportError, match=r"no .*tokenizer\.json and none of vocab\.json.*copy"):
        read_tokenizer(checkpoint)


def test_files_that_are_no_tokenizer(slow_checkpoint):
    (slow_checkpoint.folder / "vocab.json").write_text("[")
    with pytest.raises(ExportError, match="transformers cannot load the tokenizer of the target"):
        read_tokenizer(slow_checkpoint)


BROKEN = [
    ("{", "is invalid JSON"),
    ("[]", "no section 'model'"),
    ('{"model": 3}', "no section 'model'"),
]


@pytest.mark.parametrize(("text", "words"), BROKEN)
def test_a_broken_file(checkpoint, text, words):
    (checkpoint.folder / "tokenizer.json").write_text(text)
    with pytest.raises(ExportError, match=words):
        read_tokenizer(checkpoint)


HIGHEST = [  # (content of tokenizer.json, id)
    ({"model": {"vocab": {"a": 0, "b": 7}}}, 7),
    ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 9, "content": "<x>"}]}, 9),
    ({"model": {"vocab": [["a", 0.0], ["b", -1.5]]}}, 1),
    ({"model": {}}, -1),
]


@pytest.mark.parametrize(("content", "wanted"), HIGHEST)
def test_the_highest_token_id(content, wanted):
    assert highest_token_id(content) == wanted
