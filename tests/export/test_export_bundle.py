"""From two folders to a bundle, and what is left behind when that fails."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.pipeline import export_bundle
from dsbd_runtime.bundle import open_bundle

FILES = {
    f"{role}/{file}"
    for role in ("target", "draft")
    for file in ("model.onnx", "model.onnx.data", "prune.onnx")
} | {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
STAGES = ("loading", "reference", "capturing", "optimizing", "saving", "prune", "comparing")


def silent(_line: str) -> None:
    pass


def test_the_manifest(exported):
    manifest = open_bundle(exported.config.output, verify=True).manifest
    assert manifest == exported.result.manifest
    assert set(manifest.files) == FILES
    assert {"dsbd-ort", "torch", "transformers", "optimum", "onnxruntime"} <= set(manifest.versions)
    target = manifest.target
    assert (target.family, target.vocab_size, target.context_length) == ("llama", 300, 256)
    assert (target.bos_token_id, target.eos_token_ids) == (0, [1])
    assert (target.dtype, target.quantization, target.logits) == ("fp32", "none", "full")
    assert (target.kv.num_layers, target.kv.num_heads, target.kv.head_dim) == (2, 2, 12)
    assert (target.masks, target.sliding_window) == (["attention_mask"], None)


def test_the_manifest_of_sliding_layers(exported_others):
    manifest = exported_others.result.manifest
    assert manifest.target.masks == ["attention_mask", "attention_mask_sliding"]
    assert manifest.draft.masks == ["attention_mask_sliding"]
    assert manifest.target.sliding_window == manifest.draft.sliding_window == 8


def test_every_stage_is_reported(exported):
    for role in ("target", "draft"):
        lines = [line for line in exported.report if line.startswith(f"{role}: ")]
        assert [stage in line for stage, line in zip(STAGES, lines, strict=True)] == [True] * 7


def test_a_failed_gate_leaves_nothing_behind(small_llama_folder, tmp_path):
    output = tmp_path / "bundle"
    config = config_of(small_llama_folder, small_llama_folder, output, atol=1e-12)
    with pytest.raises(ExportError, match="parity failed: the target"):
        export_bundle(config, report=silent)
    assert not list(tmp_path.iterdir())


def test_a_failed_export_keeps_the_old_bundle(exported, tmp_path):
    output = tmp_path / "bundle"
    shutil.copytree(exported.config.output, output)
    config = replace(exported.config, output=output, target=str(broken_target(exported, tmp_path)))
    with pytest.raises(ExportError, match="cannot be loaded"):
        export_bundle(config, report=silent)
    assert open_bundle(output, verify=True).manifest == exported.result.manifest
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "target"}


def broken_target(exported, tmp_path):
    folder = copy_of(exported.config.target, tmp_path / "target")
    (folder / "model.safetensors").write_bytes(b"no weights")
    return folder


DIFFERENT = [  # (file, field, value, words of the message)
    ("config.json", "eos_token_id", 2, r"eos_token_ids is \[1\] in the target and \[2\]"),
    ("generation_config.json", "eos_token_id", [1, 2], r"eos_token_ids is \[1\] .* \[1, 2\]"),
    ("config.json", "bos_token_id", 3, "bos_token_id is 0 in the target and 3 in the draft"),
    ("config.json", "vocab_size", 301, "vocab_size is 300 in the target and 301 in the draft"),
]


@pytest.mark.parametrize(("file", "field", "value", "words"), DIFFERENT)
def test_a_pair_that_does_not_agree(llama_folder, tmp_path, file, field, value, words):
    draft = copy_of(llama_folder, tmp_path / "draft")
    if file == "config.json":  # generation_config.json would win
        (draft / "generation_config.json").unlink()
    content = json.loads((draft / file).read_text()) | {field: value}
    (draft / file).write_text(json.dumps(content))
    with pytest.raises(ExportError, match=words):
        export_bundle(config_of(llama_folder, draft, tmp_path / "out"), report=silent)
    assert not (tmp_path / "out").exists()


def other_vocabulary(content):
    vocab = content["model"]["vocab"]
    vocab["def"], vocab["path"] = vocab["path"], vocab["def"]


def shorter_vocabulary(content):
    del content["model"]["vocab"]["path"]


def other_merges(content):
    content["model"]["merges"].reverse()


def other_special_token(content):
    content["added_tokens"][1]["normalized"] = True


DIFFERENT_TOKENIZERS = [
    (other_vocabulary, r"vocabularies differ: token '\w+' is"),
    (shorter_vocabulary, r"vocabularies differ: \d+ tokens in the target's tokenizer, \d+"),
    (other_merges, "merge 0 is"),
    (other_special_token, "differ in section 'added_tokens'"),
]


@pytest.mark.parametrize(("change", "words"), DIFFERENT_TOKENIZERS)
def test_tokenizers_that_do_not_agree(llama_folder, tmp_path, change, words):
    draft = copy_of(llama_folder, tmp_path / "draft")
    content = json.loads((draft / "tokenizer.json").read_text())
    change(content)
    (draft / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ExportError, match=words):
        export_bundle(config_of(llama_folder, draft, tmp_path / "out"), report=silent)


def test_a_checkpoint_without_tokenizer(llama_folder, tmp_path):
    target = copy_of(llama_folder, tmp_path / "target")
    (target / "tokenizer.json").unlink()
    with pytest.raises(ExportError, match=r"the target has no .*tokenizer\.json; make it with"):
        export_bundle(config_of(target, llama_folder, tmp_path / "out"), report=silent)


def copy_of(source, folder):
    shutil.copytree(source, folder)
    return folder


def config_of(target, draft, output, **options):
    return ExportConfig(target=str(target), draft=str(draft), output=output, **options)
