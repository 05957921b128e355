"""From two folders to a bundle, and what is left after when that fails."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from transformers import GPT2Config, PhiConfig

from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.pipeline import export_bundle
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.parts.cache_entries import equal_caches
from scripts.family_checkpoints import write_checkpoint
from tests.export.conftest import swap_tokens

FILES = {
    f"{role}/{file}"
    for role in ("target", "draft")
    for file in ("model.onnx", "model.onnx.data", "prune.onnx")
} | {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
STAGES = (
    "loading",
    "reference",
    "capturing",
    "optimizing",
    "merging",
    "merged",
    "saving",
    "prune",
    "comparing",
)


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
    assert target.caches == equal_caches(2, num_heads=2, head_dim=12, dtype="fp32")
    assert (target.masks, target.sliding_window) == (["attention_mask"], None)


def test_the_manifest_of_sliding_layers(exported_others):
    manifest = exported_others.result.manifest
    assert manifest.target.masks == ["attention_mask", "attention_mask_sliding"]
    assert manifest.draft.masks == ["attention_mask_sliding"]
    assert manifest.target.sliding_window == manifest.draft.sliding_window == 8


def test_every_stage_is_reported(exported):
    for role in ("target", "draft"):
        lines = [
            line
            for line in exported.report
            if line.startswith(f"{role}: ") and not line.endswith(" left")  # of a slow machine
        ]
        found = [stage in line for stage, line in zip(STAGES, lines, strict=True)]
        assert found == [True] * len(STAGES)


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


def test_a_pair_that_does_not_agree_leaves_nothing(llama_folder, tmp_path):
    draft = copy_of(llama_folder, tmp_path / "draft")
    swap_tokens(draft, "def", "path")
    with pytest.raises(ExportError, match="vocabularies differ"):
        export_bundle(config_of(llama_folder, draft, tmp_path / "out"), report=silent)
    assert not (tmp_path / "out").exists()


def test_a_pair_of_two_families_with_vocabularies_of_different_size(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    special = {"bos_token_id": 0, "pad_token_id": 0}
    phi = PhiConfig(vocab_size=320, intermediate_size=24, eos_token_id=[1, 2], **special, **sizes)
    gpt2 = GPT2Config(vocab_size=300, eos_token_id=1, **special, **sizes)
    target, draft = (
        write_checkpoint(tmp_path / config.model_type, config) for config in (phi, gpt2)
    )
    lines: list[str] = []
    config = config_of(target, draft, tmp_path / "out")
    manifest = export_bundle(config, report=lines.append).manifest
    entries = (manifest.target, manifest.draft)
    assert [entry.family for entry in entries] == ["phi", "gpt2"]
    assert [(entry.vocab_size, entry.eos_token_ids) for entry in entries] == [(300, [1, 2])] * 2
    assert "draft: eos_token_ids is [1] in the checkpoint, [1, 2] here" in lines
    assert open_bundle(tmp_path / "out", verify=True).manifest == manifest


def copy_of(source, folder):
    shutil.copytree(source, folder)
    return folder


def config_of(target, draft, output, **options):
    return ExportConfig(target=str(target), draft=str(draft), output=output, **options)
