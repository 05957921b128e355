"""From two folders to a bundle, and what is left after when that fails."""

import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import GPT2Config, PhiConfig

from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.pipeline import export_bundle
from dsbd_export.progress import silent
from dsbd_ort.requests.option_defaults import check_defaults
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.parts.attention.cache_entries import equal_caches
from scripts.family_checkpoints import write_checkpoint
from tests.export.conftest import edit_json, export_process

FILES = {
    f"{role}/{file}"
    for role in ("target", "draft")
    for file in ("model.onnx", "model.onnx.data", "prune.onnx")
} | {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "text_checks.json"}
STAGES = (
    *("loading", "reference", "capturing", "optimizing"),
    *("merging", "merged", "saving", "prune", "comparing"),
)


def test_the_manifest(exported, exported_others):
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
    manifest = exported_others.result.manifest
    assert manifest.target.masks == ["attention_mask", "attention_mask_sliding"]
    assert manifest.draft.masks == ["attention_mask_sliding"]
    assert manifest.target.sliding_window == manifest.draft.sliding_window == 8


WRONG_DEFAULTS = [
    *({"top_p": value} for value in (0, -1, 1.5, "0.9", [])),
    *({"temperature": value} for value in (-0.1, "hot", True)),
    *({"top_k": value} for value in (0.5, "3")),
    {"min_p": 2},
    {"typical_p": 0},
    {"repetition_penalty": 0},
    {"no_repeat_ngram_size": -1},
    {"max_new_tokens": 0},
    {"min_new_tokens": -1},
    {"bad_words_ids": [[]]},
    {"bad_words_ids": [[1, 5000]]},
    {"suppress_tokens": [5000]},
    {"begin_suppress_tokens": [-1]},
]


@pytest.mark.parametrize("wrong", WRONG_DEFAULTS, ids=str)
def test_defaults_that_no_request_could_use_are_refused(llama_folder, tmp_path, wrong):
    folder = shutil.copytree(llama_folder, tmp_path / "checkpoint")
    edit_json(folder / "generation_config.json", **wrong)
    with pytest.raises(ExportError) as caught:
        config = ExportConfig(target=str(folder), output=tmp_path / "bundle")
        export_bundle(config, report=silent, check_defaults=check_defaults)
    assert f"{folder}/generation_config.json has a default that no request" in str(caught.value)
    assert next(iter(wrong)) in str(caught.value).partition("use: ")[2]
    assert not (tmp_path / "bundle").exists()


def test_every_stage_is_reported(exported):
    for role in ("target", "draft"):
        lines = [line for line in exported.report if line.startswith(f"{role}: ")]
        lines = [line for line in lines if not line.endswith(" left")]  # of a slow machine
        stages = (*STAGES, "agreement with the target") if role == "draft" else STAGES
        assert all(stage in line for stage, line in zip(stages, lines, strict=True))


def test_a_failed_export_keeps_the_old_bundle(exported, tmp_path):
    output = shutil.copytree(exported.config.output, tmp_path / "bundle")
    target = shutil.copytree(exported.config.target, tmp_path / "target")
    (target / "model.safetensors").write_bytes(b"no weights")
    config = replace(exported.config, output=output, target=str(target))
    with pytest.raises(ExportError, match="cannot be loaded"):
        export_bundle(config, report=silent)
    assert open_bundle(output, verify=True).manifest == exported.result.manifest
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "target"}


def test_a_pair_of_two_families_with_vocabularies_of_different_size(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    special = {"bos_token_id": 0, "pad_token_id": 0}
    phi = PhiConfig(vocab_size=320, intermediate_size=24, eos_token_id=[1, 2], **special, **sizes)
    gpt2 = GPT2Config(vocab_size=300, eos_token_id=1, **special, **sizes)
    target, draft = (
        write_checkpoint(tmp_path / config.model_type, config) for config in (phi, gpt2)
    )
    lines: list[str] = []
    config = ExportConfig(target=str(target), draft=str(draft), output=tmp_path / "out")
    manifest = export_bundle(config, report=lines.append).manifest
    entries = (manifest.target, manifest.draft)
    assert [entry.family for entry in entries] == ["phi", "gpt2"]
    assert [(entry.vocab_size, entry.eos_token_ids) for entry in entries] == [(300, [1, 2])] * 2
    assert "draft: eos_token_ids is [1] in the checkpoint, [1, 2] here" in lines
    assert open_bundle(tmp_path / "out", verify=True).manifest == manifest


LIMIT = 50_000  # bytes; the weights of the tiny pair are larger
LIMITED = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({LIMIT}, {LIMIT}))"


def pair_of(checkpoint, output):
    return ("--target", checkpoint, "--draft", checkpoint, "-o", output)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_weights_that_do_not_fit(small_llama_folder, tmp_path):
    pair = pair_of(small_llama_folder, tmp_path / "bundle")
    code, lines = export_process(*pair, first=LIMITED)
    assert code == 2, lines
    assert "saving the graph" in lines[-2]
    last = lines[-1]
    assert last.startswith(f"Error: cannot write {tmp_path / 'bundle'}: ")
    assert last.endswith("; free some space or choose another output")
    assert names_in(tmp_path) == []


@pytest.mark.slow
def test_an_export_that_is_ended(small_llama_folder, tmp_path):
    """SIGTERM leaves nothing; files that SIGKILL leaves are gone after the next export."""
    output = tmp_path / "bundle"
    pair = pair_of(small_llama_folder, output)
    code, _ = export_process(*pair, ended_at="draft: capturing", number=signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert names_in(tmp_path) == []
    code, _ = export_process(*pair, ended_at="draft: capturing", number=signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert names_in(tmp_path) != [] and not output.exists()
    folder = str(small_llama_folder)
    export_bundle(ExportConfig(target=folder, draft=folder, output=output), report=silent)
    assert names_in(tmp_path) == ["bundle"]
    open_bundle(output, verify=True)
