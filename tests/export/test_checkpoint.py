"""Files of a checkpoint: which are used, in which precision, what is missing or wrong; hub ids."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
)

from dsbd_export.checkpoints.checkpoint_files import (
    convert_weights,
    open_weights,
    safetensors_files,
    stored_dtype,
)
from dsbd_export.checkpoints.model_config import layer_masks, window_within
from dsbd_export.checkpoints.model_loading import load_model, reference_dtype
from dsbd_export.config import ExportConfig
from dsbd_export.demo import demo_pair
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_pair
from dsbd_export.parity_cases import forest_cases, text_case
from dsbd_export.tokenizers.tokenizer_files import load_tokenizer
from tests.export.conftest import SIZES, edit_json, opened, write_checkpoint

FULL, SLIDING = "attention_mask", "attention_mask_sliding"


def pair_of(folder, **options):
    config = ExportConfig(target=str(folder), draft=str(folder), output=Path("out"), **options)
    return open_pair(config)


@pytest.mark.parametrize("source", ["/no/such/folder", "./no-such", "~/no/such", "a/b/c"])
def test_a_folder_that_is_not_there(source):
    with pytest.raises(ExportError, match="no such folder; give a folder with config"):
        pair_of(source)


def test_a_revision_of_a_folder_has_no_meaning(llama_folder):
    with pytest.raises(ExportError, match="revision='main' has no meaning"):
        pair_of(llama_folder, revision="main")


class CountedPath(type(Path())):
    """A path that counts which files are read as text."""

    reads: ClassVar[Counter[str]] = Counter()

    def read_text(self, *args, **kwargs):
        self.reads[self.name] += 1
        return super().read_text(*args, **kwargs)


def test_each_file_is_read_once(llama_folder):
    checkpoint = opened(CountedPath(llama_folder))
    for each in (checkpoint, replace(checkpoint, context_length=64)):
        forest_cases(each)
        text_case(each)
    names = ("config.json", "generation_config.json", "tokenizer.json")
    assert {name: CountedPath.reads[name] for name in names} == dict.fromkeys(names, 1)


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
        edit_json(tmp_path / "checkpoint" / f"{name}.json", eos_token_id=value)
    assert pair_of(tmp_path / "checkpoint")[0].eos_token_ids == wanted


def written(file: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(content)


def with_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def indexed(index: str) -> Callable[[Path], object]:
    """An index instead of the weights."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(index)
        (folder / "model.safetensors").unlink()

    return change


DEEP = "[" * 100_000 + "]" * 100_000
UP_PROJ, COPY = (
    "model.layers.1.mlp.up_proj.weight",
    {"_orig_mod.model.norm.weight": torch.zeros(48)},
)
WRONG_GENERATION = [  # (content of generation_config.json, words)
    ("[]", r"generation_config\.json has a list, expected an object"),
    ("{", r"generation_config\.json cannot be read as JSON"),
    (DEEP, r"generation_config\.json cannot be read as JSON: RecursionError"),
    ('{"eos_token_id": "1"}', "has eos_token_id '1', expected a token id or a list of them"),
    ('{"eos_token_id": [1, "2"]}', r"has eos_token_id \[1, '2'\], expected a token id or a list"),
    ('{"eos_token_id": {"a": 1}}', r"has eos_token_id \{'a': 1\}, expected a token id or a list"),
    ('{"eos_token_id": true}', "has eos_token_id True, expected a token id"),
    ('{"eos_token_id": [1, 300]}', "has eos_token_id 300, expected a token of its vocabulary, 0"),
    ('{"bos_token_id": "0"}', "has bos_token_id '0', expected a token id; change it in"),
    ('{"bos_token_id": -1}', "has bos_token_id -1, expected a token of its vocabulary"),
]
WRONG: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: (f / "config.json").unlink(), r"the target at .* has no config\.json"),
    (written("config.json", "{"), r"config of the target at .* cannot be read"),
    (written("config.json", '{"x": ' + DEEP + "}"), "config of .* cannot be read: Recursion"),
    (written("config.json", "[]"), "config of the target at .* cannot be read"),
    (written("tokenizer.json", DEEP), r"tokenizer\.json is invalid JSON"),
    (written("tokenizer_config.json", DEEP), "cannot load the tokenizer of the target"),
    (indexed(DEEP), r"index\.json cannot be read as JSON"),
    (indexed('{"weight_map": [3]}'), "no weight_map from weights to files"),
    (with_weights(lambda w: w.pop(UP_PROJ)), r"lacks 1 weights, the first is .*up_proj"),
    (with_weights(lambda w: w.update(COPY)), r"has .*norm\.weight, which are one weight"),
    *((written("generation_config.json", content), words) for content, words in WRONG_GENERATION),
]


@pytest.mark.parametrize(("change", "words"), WRONG, ids=range(len(WRONG)))
def test_what_is_missing_or_wrong_is_named(llama_folder, tmp_path, change, words):
    folder = Path(shutil.copytree(llama_folder, tmp_path / "checkpoint"))
    change(folder)
    with pytest.raises(ExportError, match=words):
        target, _ = pair_of(folder)
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


MIXED = ["sliding_attention", "full_attention"]
MASKS = [
    (LlamaConfig(num_hidden_layers=2), (FULL, FULL)),
    (MistralConfig(num_hidden_layers=2, sliding_window=8), (SLIDING, SLIDING)),
    (MistralConfig(num_hidden_layers=2, sliding_window=None), (FULL, FULL)),
    (Gemma3TextConfig(num_hidden_layers=2, layer_types=MIXED), (SLIDING, FULL)),
]


def test_the_mask_of_each_layer():
    for config, wanted in MASKS:
        assert layer_masks(config, window_within(config, 128_000)) == wanted
    config = MistralConfig(num_hidden_layers=2, sliding_window=8)  # not below the context: none
    for context_length, wanted in ((8, FULL), (9, SLIDING)):
        assert layer_masks(config, window_within(config, context_length)) == (wanted, wanted)


def test_the_folders_of_the_demo_pair(tmp_path):
    with pytest.raises(
        ExportError, match=r"no .*config\.json; it is in a checkout .*run scripts/demo"
    ):
        demo_pair(tmp_path)
    for role in ("target", "draft"):
        (tmp_path / role).mkdir()
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (tmp_path / role / name).touch()
    assert demo_pair(tmp_path) == (tmp_path / "target", tmp_path / "draft")


TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
REFERENCE = [  # (stored, exported, loaded)
    ("fp16", "fp32", "fp32"),
    ("fp16", "fp16", "fp16"),
    ("bf16", "fp16", "bf16"),
    ("fp32", "fp16", "fp32"),
    ("fp32", "bf16", "fp32"),
]


def stored_as(source: Path, folder: Path, dtype: torch.dtype) -> Path:
    """A copy of a checkpoint in two shards of another precision; one small weight in fp32."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    converted = {name: weight.to(dtype) for name, weight in weights.items()}
    converted["model.norm.weight"] = weights["model.norm.weight"].float()
    names = sorted(converted)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in shards.items():
        save_file({name: converted[name] for name in own}, folder / file, metadata={"format": "pt"})
    file_by_weight = {name: file for file, own in shards.items() for name in own}
    index = {"metadata": {}, "weight_map": file_by_weight}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(("stored", "exported", "loaded"), REFERENCE)
def test_references_come_from_the_stored_values(llama_folder, tmp_path, stored, exported, loaded):
    folder = stored_as(llama_folder, tmp_path / "checkpoint", TORCH_DTYPES[stored])
    assert stored_dtype(folder) == stored
    assert reference_dtype(opened(folder), exported) == loaded


def test_shards_load_as_one_file_does(llama_folder, tmp_path):
    folder = stored_as(llama_folder, tmp_path / "checkpoint", torch.float16)
    (folder / "consolidated.safetensors").write_bytes(b"the same weights in another layout")
    assert [file.name for file in safetensors_files(folder)] == ["a.safetensors", "b.safetensors"]
    single = load_model(opened(llama_folder)).state_dict()
    sharded = load_model(opened(folder)).state_dict()
    assert set(single) == set(sharded)
    assert all(torch.equal(single[name], sharded[name]) for name in single)


def test_weights_are_read_not_mapped(llama_folder):
    with open_weights(llama_folder) as readers:
        weight = readers["model.norm.weight"][:]
        # By its whole path: what other tests of this process opened may still be mapped.
        assert str(llama_folder / "model.safetensors") not in Path("/proc/self/maps").read_text()
    assert torch.equal(weight, load_file(llama_folder / "model.safetensors")["model.norm.weight"])


WRAPPED = [  # (in a name, instead): as training frameworks write them
    ("", ""),
    ("^", "_orig_mod."),
    ("^", "module._orig_mod."),
    ("^", "base_model.model."),
    (r"layers\.0\.", "layers.0._orig_mod."),
    (r"^|layers\.0\.(?=mlp)", r"\g<0>_fsdp_wrapped_module._checkpoint_wrapped_module."),
]


@pytest.mark.parametrize("is_old", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize(("place", "wrapped"), WRAPPED)
def test_names_that_training_wraps_are_those_of_the_model(
    llama_folder, tmp_path, place, wrapped, is_old
):
    folder = shutil.copytree(llama_folder, tmp_path / "checkpoint")
    weights = load_file(folder / "model.safetensors")
    renamed = {re.sub(place, wrapped, name): weight for name, weight in weights.items()}
    (folder / "model.safetensors").unlink()
    if is_old:
        torch.save(renamed, folder / "pytorch_model.bin")
    else:
        save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    assert stored_dtype(folder) == (None if is_old else "fp16")
    assert reference_dtype(opened(folder), "fp16") == ("fp32" if is_old else "fp16")
    loaded = load_model(opened(folder)).state_dict()
    assert all(torch.equal(loaded[name], weight.float()) for name, weight in weights.items())


def test_a_shard_that_is_missing(llama_folder, tmp_path):
    folder = stored_as(llama_folder, tmp_path / "checkpoint", torch.float16)
    (folder / "b.safetensors").unlink()
    checkpoint = opened(folder)
    for dtype in ("fp16", "fp32"):
        with pytest.raises(ExportError, match=r"cannot be loaded: .*b\.safetensors"):
            load_model(checkpoint, reference_dtype(checkpoint, dtype))


def tiny_model(tied: bool):
    config = LlamaConfig(**SIZES, num_hidden_layers=1, tie_word_embeddings=tied)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_converted_in_place(tied):
    model = tiny_model(tied)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    convert_weights(model, "fp16")
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name].half())
    is_tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert is_tied == tied


def test_a_weight_beyond_the_range_is_named():
    model = tiny_model(tied=False)
    model.model.norm.weight.data[3] = -1e6
    with pytest.raises(ExportError, match=r"model\.norm\.weight holds 1e\+06.*fp16 \(up to 6"):
        convert_weights(model, "fp16")
    convert_weights(model, "bf16")


COMMIT = "0123456789abcdef0123456789abcdef01234567"
OPEN_PAIR = """
import sys
from pathlib import Path
from dsbd_export.opening import open_pair
from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError

for revision in (None, "v1", "v2"):
    try:
        options = {"target": "someone/tiny", "draft": "someone/tiny", "output": Path("out")}
        target, _ = open_pair(ExportConfig(**options, revision=revision))
        print(target.folder.name, target.family)
    except ExportError as error:
        print(error)
"""


@pytest.fixture
def hub_cache(llama_folder, tmp_path):
    """A cache as huggingface_hub lays it out, holding someone/tiny at "main" and "v1"."""
    repository = tmp_path / "hub" / "models--someone--tiny"
    shutil.copytree(llama_folder, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    for name in ("main", "v1"):
        (repository / "refs" / name).write_text(COMMIT)
    return tmp_path / "hub"


def test_a_hub_id_is_found_in_the_cache_without_network(hub_cache):
    environment = {
        **os.environ,
        "HF_HUB_CACHE": str(hub_cache),
        "HF_HUB_OFFLINE": "1",  # read when huggingface_hub is imported, hence the new process
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", OPEN_PAIR], env=environment, capture_output=True, text=True
    )
    newest, tagged, missing = done.stdout.splitlines()
    assert newest == tagged == f"{COMMIT} llama"
    words = "someone/tiny is no local folder and cannot be downloaded from the hub"
    assert missing.startswith(words)


@pytest.fixture
def checkpoint_with_code(llama_folder, tmp_path):
    """A family of its own, whose code leaves a trace when it runs."""
    folder = shutil.copytree(llama_folder, tmp_path / "with_code")
    auto_map = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
    edit_json(folder / "config.json", model_type="own_family", auto_map=auto_map)
    (folder / "own_code.py").write_text(
        f"open({str(tmp_path / 'trace')!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_family'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    return folder


def test_code_of_a_checkpoint_runs_only_when_it_is_trusted(checkpoint_with_code, tmp_path):
    with pytest.raises(ExportError, match=r"cannot be read.*trust_remote_code"):
        opened(checkpoint_with_code)
    assert not (tmp_path / "trace").exists()
    checkpoint = opened(checkpoint_with_code, trust_remote_code=True)
    assert (checkpoint.family, checkpoint.vocab_size) == ("own_family", 300)
    assert (tmp_path / "trace").exists()
