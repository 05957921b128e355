"""A target without a draft, and a draft for the target of a bundle that is there."""

import dataclasses
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, PhiConfig

from dsbd_export.config import DraftConfig, ExportConfig
from dsbd_export.draft_export import export_draft
from dsbd_export.errors import ExportError
from dsbd_export.model_source import SourceOf
from dsbd_export.opening import source_of
from dsbd_export.pipeline import export_bundle
from dsbd_export.progress import silent
from dsbd_export.tensorrt.tensorrt_build import add_engines
from dsbd_export.tensorrt.tensorrt_options import TensorrtOptions
from dsbd_ort import Pipeline
from dsbd_runtime.bundle_files.bundle import Bundle, open_bundle
from dsbd_runtime.errors import BundleError
from dsbd_runtime.tensorrt.trt_record import find_record
from scripts.family_checkpoints import VOCAB_SIZE, write_checkpoint
from tests.export.conftest import edit_json, export_process, swap_tokens
from tests.exports import export_quietly
from tests.runtime.bundle_edits import as_version_2, edited
from tests.runtime.fake_trt import add_fake_engines


def add_draft(bundle: Path, draft: Path, source: SourceOf, **options: Any) -> list[str]:
    """Add a draft; return the lines that were reported."""
    lines: list[str] = []
    config = DraftConfig(bundle=bundle, draft=str(draft), **options)
    export_draft(config, report=lines.append, source_of=source)
    return lines


def copied(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder))


@pytest.fixture
def copy(alone, tmp_path):
    return copied(alone, tmp_path / "bundle")


@pytest.fixture(scope="module")
def completed(alone, small_llama_folder, tmp_path_factory):
    folder = copied(alone, tmp_path_factory.mktemp("completed") / "bundle")
    add_draft(folder, small_llama_folder, source_of)
    return folder


def test_a_target_alone_is_the_target_of_the_pair(alone, exported):
    manifest = open_bundle(alone, verify=True).manifest
    pair = exported.result.manifest
    assert manifest.draft is None and json.loads((alone / "dsbd.json").read_text())["draft"] is None
    assert manifest.target == pair.target
    assert manifest.files == {
        name: entry for name, entry in pair.files.items() if not name.startswith("draft/")
    }


def test_a_draft_added_later_makes_the_bundle_of_the_pair(completed, exported):
    """Byte for byte: every file and every entry is that of one export of both."""
    manifest = open_bundle(completed, verify=True).manifest
    assert manifest == exported.result.manifest
    assert [file.name for file in completed.parent.iterdir()] == ["bundle"]


def test_a_draft_is_replaced_in_another_precision(completed, llama_folder, tmp_path, captures):
    copy = copied(completed, tmp_path / "bundle")
    before = open_bundle(copy).manifest
    lines = add_draft(copy, llama_folder, captures, dtype="fp16", logits="topk:8", max_context=64)
    now = open_bundle(copy, verify=True).manifest
    assert now.target == before.target
    draft = now.draft
    assert draft is not None and len(draft.caches) == 2
    assert (draft.dtype, draft.logits, draft.context_length) == ("fp16", "topk:8", 64)
    of_target = {name for name in before.files if not name.startswith("draft/")}
    assert all(now.files[name] == before.files[name] for name in of_target)
    assert not any("requests can use" in line for line in lines)
    options: dict[str, Any] = {"num_beams": 2, "top_k": 4, "seed": 1, "max_new_tokens": 6}
    with Pipeline.from_bundle(completed) as old, Pipeline.from_bundle(copy) as new:
        found, wanted = (each.generate("def path(", **options) for each in (new, old))
    assert found.sequences[0].token_ids == wanted.sequences[0].token_ids


def test_special_tokens_are_those_of_the_bundle(copy, small_llama_folder, tmp_path, captures):
    other = copied(small_llama_folder, tmp_path / "other")
    (other / "generation_config.json").unlink()
    edit_json(other / "config.json", eos_token_id=[1, 2], bos_token_id=3)
    lines = add_draft(copy, other, captures)
    draft = open_bundle(copy).entry("draft")
    assert (draft.bos_token_id, draft.eos_token_ids) == (0, [1])
    assert "draft: eos_token_ids is [1, 2] in the checkpoint, [1] here" in lines


SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
GPT2 = {**SMALL, "bos_token_id": 0, "eos_token_id": 1}
WIDTHS = {  # a draft that pads the vocabulary less, or more, than the target; ties and a bias
    "fewer, tied": GPT2Config(vocab_size=290, **GPT2),
    "fewer, biased": PhiConfig(vocab_size=290, **SMALL, intermediate_size=24),
    "more": GPT2Config(vocab_size=320, **GPT2),
}


@pytest.mark.parametrize("kind", WIDTHS)
def test_a_vocabulary_of_another_padding_is_that_of_the_bundle(copy, tmp_path, kind, captures):
    config = WIDTHS[kind]
    folder = write_checkpoint(tmp_path / "draft", config)
    line = f"draft: vocab_size is {config.vocab_size} in the checkpoint, {VOCAB_SIZE} here"
    assert line in add_draft(copy, folder, captures)
    assert open_bundle(copy, verify=True).entry("draft").vocab_size == VOCAB_SIZE
    with Pipeline.from_bundle(copy) as pipeline:  # also after a token that the draft had not
        result = pipeline.generate([5, VOCAB_SIZE - 1], seed=0, max_new_tokens=6, draft_length=2)
    assert result.stats.num_draft_tokens > 0


def refused(bundle, draft, captures, words, **options):
    before = contents(bundle)
    with pytest.raises((ExportError, BundleError), match=words):
        add_draft(bundle, draft, captures, **options)
    assert contents(bundle) == before
    assert not [file for file in bundle.parent.iterdir() if file.name.startswith(".")]


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_other_tokens_are_refused(copy, small_llama_folder, tmp_path, captures):
    other = copied(small_llama_folder, tmp_path / "other")
    swap_tokens(other, "def", "path")
    words = "vocabularies differ: token '(def|path)' is .* in the target's tokenizer"
    refused(copy, other, captures, words)


RTX: dict[str, Any] = {"engine": "tensorrt-rtx", "compute_capability": "12.0"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"logits": "topk:301"}, "301"),
    ({"revision": "main"}, "revision='main' has no meaning: draft is local"),
    ({"engine": "tensorrt-rtx", "compute_capability": "9.9"}, "knows 7.5, 8.0"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_a_failed_export_changes_no_bundle(completed, small_llama_folder, options, words, captures):
    refused(completed, small_llama_folder, captures, words, **options)


def test_a_damaged_target_is_not_taken_for_a_right_one(copy, small_llama_folder, captures):
    weights = copy / "target" / "model.onnx.data"
    content = bytearray(weights.read_bytes())
    content[100] ^= 1  # the size stays
    weights.write_bytes(content)
    refused(copy, small_llama_folder, captures, "model.onnx.data is not the file of the manifest")
    with pytest.raises(BundleError, match="is not the file of the manifest"):
        add_engines(copy, TensorrtOptions(**RTX), report=silent)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_changes_no_bundle(copy, small_llama_folder, number, captures):
    before = contents(copy)
    command = ["--bundle", copy, "--draft", small_llama_folder]
    code, _ = export_process(*command, ended_at="draft: comparing", number=number)
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    assert contents(copy) == before
    add_draft(copy, small_llama_folder, captures)  # which removes what SIGKILL left
    assert [file.name for file in copy.parent.iterdir()] == ["bundle"]
    assert open_bundle(copy, verify=True).roles == ("target", "draft")


def test_a_bundle_of_schema_version_2_gets_a_draft(completed, small_llama_folder, tmp_path):
    old = copied(completed, tmp_path / "bundle")
    edited(old, as_version_2)
    edited(old, lambda manifest: manifest["files"].pop("text_checks.json"))
    (old / "text_checks.json").unlink()  # it gets what versions did not write then
    add_draft(old, small_llama_folder, source_of)
    manifest, new = open_bundle(old, verify=True).manifest, open_bundle(completed).manifest
    unclaimed = dataclasses.replace(new.target, bit_exact=None)  # which schema 2 cannot say
    assert manifest == dataclasses.replace(new, target=unclaimed)


def test_engines_stay_and_a_line_says_how_the_draft_gets_its_own(
    copy, small_llama_folder, captures
):
    add_fake_engines(copy)
    engine = (copy / "target" / "engine.plan").read_bytes()
    lines = add_draft(copy, small_llama_folder, captures)
    assert (copy / "target" / "engine.plan").read_bytes() == engine
    (warning,) = (line for line in lines if line.startswith("warning"))
    assert f"engines, the draft has none; build both with: dsbd-export --bundle {copy}" in warning
    assert roles_with_engines(open_bundle(copy)) == ["target"]
    options: dict[str, Any] = {"quantize": "int8-dynamic", "max_kl": 1.0}
    (warning,) = add_draft(copy, small_llama_folder, captures, **options)[-2:-1]
    assert "because it is quantized (int8); for tensorrt-rtx export it with" in warning


def roles_with_engines(bundle: Bundle) -> list[str]:
    return [role for role in bundle.roles if find_record(bundle, role) is not None]


@pytest.mark.slow
def test_engines_are_built_for_any_role(llama_folder, small_llama_folder, tmp_path, captures):
    output = tmp_path / "bundle"
    export_bundle(ExportConfig(target=str(llama_folder), output=output, **RTX), report=silent)
    before = open_bundle(output)
    assert roles_with_engines(before) == ["target"]
    add_draft(output, small_llama_folder, captures, **RTX)
    now = open_bundle(output, verify=True)
    assert roles_with_engines(now) == ["target", "draft"]
    assert dataclasses.asdict(now.entry("target")) == dataclasses.asdict(before.entry("target"))


def test_a_quantized_target_gets_no_engines(llama_folder, small_llama_folder, tmp_path, captures):
    options = {"quantize": "int8-dynamic", "max_kl": 1.0}
    bundle = export_quietly(captures, tmp_path / "bundle", llama_folder, **options)
    words = "the target is quantized .int8., which only ONNX Runtime runs"
    refused(bundle, small_llama_folder, captures, words, **RTX)
