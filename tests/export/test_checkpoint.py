"""Checkpoints that are not there, not whole, or of a family that cannot come out right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, MistralConfig

from dsbd_export.checkpoints.model_config import layer_masks, window_within
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_pair
from dsbd_export.tokenizers.tokenizer_files import load_tokenizer
from tests.export.conftest import write_checkpoint

FULL, SLIDING = "attention_mask", "attention_mask_sliding"


def pair_of(folder, **options):
    config = ExportConfig(target=str(folder), draft=str(folder), output=Path("out"), **options)
    return open_pair(config)


@pytest.mark.parametrize("source", ["/no/such/folder", "./no-such", "~/no/such", "a/b/c"])
def test_a_folder_that_is_not_there(source):
    with pytest.raises(ExportError, match="no such folder; give a folder with config"):
        pair_of(source)


def test_a_folder_without_config(tmp_path):
    with pytest.raises(ExportError, match=r"the target at .* has no config\.json"):
        pair_of(tmp_path)


def test_a_config_that_is_no_json(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ExportError, match=r"config of the target at .* cannot be read"):
        pair_of(tmp_path)


def test_a_revision_of_a_folder_has_no_meaning(llama_folder):
    with pytest.raises(ExportError, match="revision='main' has no meaning"):
        pair_of(llama_folder, revision="main")


def test_max_context_limits_the_context(llama_folder):
    assert pair_of(llama_folder)[0].context_length == 256
    assert pair_of(llama_folder, max_context=100)[0].context_length == 100
    assert pair_of(llama_folder, max_context=1000)[0].context_length == 256


EOS = [  # (in config.json, in generation_config.json, what counts)
    (1, None, [1]),
    (1, 2, [2]),
    (1, [3, 4], [3, 4]),
    ([5, 6], None, [5, 6]),
    (None, None, []),
    (None, 7, [7]),
]


@pytest.mark.parametrize(("in_config", "in_generation", "wanted"), EOS)
def test_end_tokens(llama_folder, tmp_path, in_config, in_generation, wanted):
    shutil.copytree(llama_folder, tmp_path / "checkpoint")
    for name, value in (("config", in_config), ("generation_config", in_generation)):
        file = tmp_path / "checkpoint" / f"{name}.json"
        content = json.loads(file.read_text())
        file.write_text(json.dumps(content | {"eos_token_id": value}))
    assert pair_of(tmp_path / "checkpoint")[0].eos_token_ids == wanted


DEEP = "[" * 100_000 + "]" * 100_000
WRONG_GENERATION = [  # (content of generation_config.json, words)
    ("[]", r"generation_config\.json has a list, expected an object"),
    ("{", r"generation_config\.json cannot be read as JSON"),
    (DEEP, r"generation_config\.json cannot be read as JSON: RecursionError"),
    ('{"eos_token_id": "1"}', "has eos_token_id '1', expected a token id or a list of them"),
    ('{"eos_token_id": [1, "2"]}', r"has eos_token_id \[1, '2'\], expected a token id or a list"),
    ('{"eos_token_id": {"a": 1}}', r"has eos_token_id \{'a': 1\}, expected a token id or a list"),
    ('{"eos_token_id": true}', "has eos_token_id True, expected a token id"),
    (
        '{"eos_token_id": [1, 300]}',
        "has eos_token_id 300, expected a token of its vocabulary, 0 to",
    ),
    ('{"bos_token_id": "0"}', "has bos_token_id '0', expected a token id; change it in"),
    ('{"bos_token_id": -1}', "has bos_token_id -1, expected a token of its vocabulary"),
]


@pytest.mark.parametrize(("content", "words"), WRONG_GENERATION, ids=range(len(WRONG_GENERATION)))
def test_a_wrong_generation_config_is_refused_at_once(llama_folder, tmp_path, content, words):
    folder = shutil.copytree(llama_folder, tmp_path / "checkpoint")
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ExportError, match=words):
        pair_of(folder)


WRONG_FILES = [  # (file, content, words)
    ("config.json", '{"x": ' + DEEP + "}", "config of the target at .* cannot be read: Recursion"),
    ("config.json", "[]", "config of the target at .* cannot be read"),
    ("tokenizer.json", DEEP, r"tokenizer\.json is invalid JSON"),
    ("tokenizer_config.json", DEEP, "cannot load the tokenizer of the target"),
    ("model.safetensors.index.json", DEEP, r"index\.json cannot be read as JSON"),
    ("model.safetensors.index.json", '{"weight_map": [3]}', "no weight_map from weights to files"),
]


@pytest.mark.parametrize(("file", "content", "words"), WRONG_FILES, ids=range(len(WRONG_FILES)))
def test_files_that_are_no_objects_are_refused(llama_folder, tmp_path, file, content, words):
    folder = shutil.copytree(llama_folder, tmp_path / "checkpoint")
    (folder / file).write_text(content)
    if "index" in file:
        (folder / "model.safetensors").unlink()
    with pytest.raises(ExportError, match=words):
        target = pair_of(folder)[0]
        load_tokenizer(target)
        load_model(target)


def test_default_ids_of_a_class_are_none_of_a_small_vocabulary(tmp_path):
    """GPT-2's 50256, which config.json does not state; one that it states is refused."""
    sizes = {"n_embd": 48, "n_layer": 1, "n_head": 4, "n_positions": 64, "vocab_size": 300}
    folder = write_checkpoint(tmp_path, GPT2Config(**sizes))
    target, _ = pair_of(folder)
    assert (target.bos_token_id, target.eos_token_ids) == (None, [])
    (folder / "generation_config.json").write_text('{"eos_token_id": 300}')
    with pytest.raises(ExportError, match="eos_token_id 300, expected a token of its vocabulary"):
        pair_of(folder)


def test_a_missing_weight_is_not_made_up(llama_folder, tmp_path):
    shutil.copytree(llama_folder, tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    target, _ = pair_of(tmp_path / "checkpoint")
    with pytest.raises(ExportError, match=r"lacks 1 weights, the first is .*up_proj"):
        load_model(target)


MASKS = [
    (LlamaConfig(num_hidden_layers=2), (FULL, FULL)),
    (MistralConfig(num_hidden_layers=2, sliding_window=8), (SLIDING, SLIDING)),
    (MistralConfig(num_hidden_layers=2, sliding_window=None), (FULL, FULL)),
    (
        Gemma3TextConfig(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]),
        (SLIDING, FULL),
    ),
]


@pytest.mark.parametrize(("config", "wanted"), MASKS)
def test_the_mask_of_each_layer(config, wanted):
    assert layer_masks(config, window_within(config, 128_000)) == wanted


@pytest.mark.parametrize(("window", "context_length", "wanted"), [(8, 8, FULL), (8, 9, SLIDING)])
def test_a_window_not_below_the_context_is_none(window, context_length, wanted):
    config = MistralConfig(num_hidden_layers=2, sliding_window=window)
    assert layer_masks(config, window_within(config, context_length)) == (wanted, wanted)
