"""dsbd-export as a person meets it."""

import shutil
from functools import partial

import pytest
from transformers import LlamaConfig

from dsbd_export.checkpoints.families import FAMILIES
from dsbd_export.demo import demo_pair
from dsbd_ort.cli import export
from dsbd_ort.commands import draft_precision
from dsbd_runtime.bundle_files.bundle import open_bundle
from scripts.family_checkpoints import VOCAB_SIZE, write_checkpoint
from tests.commands.calls import assert_one_error, called
from tests.export.conftest import swap_tokens
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle

dsbd_export = partial(called, export)
TINY = LlamaConfig(
    vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=2, bos_token_id=0, eos_token_id=1, max_position_embeddings=256,
)  # fmt: skip


@pytest.fixture
def judged(monkeypatch):
    """Judge drafts by their precision alone: gains by it."""
    gains = {"int8": 1.5, "int4": 1.5}

    def tried(folder, quantize, target=None):
        found = open_bundle(folder).manifest.draft.quantization
        assert found.startswith(quantize)
        return draft_precision.Tried(quantize, 1.0, 0.8, gains[quantize]), target

    monkeypatch.setattr(draft_precision, "_tried", tried)
    return gains


@pytest.mark.parametrize(("gain", "kept"), [(1.4, "int8"), (1.6, "int4")])
def test_the_draft_of_the_larger_gain_is_kept(gain, kept, judged, tmp_path):
    model, bundle = write_checkpoint(tmp_path / "model", TINY), tmp_path / "bundle"
    judged["int4"] = gain
    done = dsbd_export(
        "--target", model, "--draft", model, "--draft-quantize", "auto", "-o", bundle
    )
    assert done.exit_code == 0, done.stderr
    manifest = open_bundle(bundle, verify=True).manifest
    assert manifest.target.quantization == "none"
    assert manifest.draft.quantization.startswith(kept)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["bundle", "model"]
    table = done.stdout[done.stdout.index("draft by --draft-quantize") :]
    assert [line.split()[1] for line in table.splitlines() if "kept" in line] == [kept]


def test_auto_needs_a_draft_that_the_cpu_can_run(tmp_path):
    auto = ("--target", "x", "--draft-quantize", "auto", "-o", tmp_path / "bundle")
    assert_one_error(dsbd_export(*auto), "give --draft")
    assert_one_error(dsbd_export(*auto, "--draft", "x", "--engine", "tensorrt"), "on the CPU")


@pytest.mark.slow  # README.md's command runs in test_docs.py
def test_demo_makes_a_bundle_and_prints_what_is_in_it(tmp_path):
    done = dsbd_export("--demo", "-o", tmp_path / "bundle")
    assert done.exit_code == 0, done.stderr
    assert "target/model.onnx" in done.stdout and "e-0" in done.stdout
    assert (tmp_path / "bundle" / "dsbd.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_a_target_alone_and_a_draft_added_to_it(tmp_path):
    model, bundle = write_checkpoint(tmp_path / "model", TINY), tmp_path / "bundle"
    done = dsbd_export("--target", model, "-o", bundle)
    assert done.exit_code == 0, done.stderr
    assert f"add a draft with: dsbd-export --bundle {bundle} --draft DRAFT" in done.stderr
    assert "draft/model.onnx" not in done.stdout
    assert open_bundle(bundle, verify=True).roles == ("target",)
    before = open_bundle(bundle).manifest
    (texts := tmp_path / "texts.txt").write_text("def path(x):\n    return x\n")
    cheaper = ("--draft-quantize", "int4", "--draft-vocab", 64, "--draft-texts", texts)
    done = dsbd_export("--bundle", bundle, "--draft", model, "--dtype", "fp16", *cheaper)
    assert done.exit_code == 0, done.stderr
    assert "draft/model.onnx" in done.stdout and "add a draft with" not in done.stderr
    now = open_bundle(bundle, verify=True)
    assert now.manifest.target == before.target
    assert before.files.items() <= now.manifest.files.items()
    draft = now.entry("draft")
    assert (draft.dtype, draft.quantization) == ("fp16", "int4-symmetric")
    assert "draft: proposes 64 of" in " ".join(done.stderr.split())


def test_different_vocabularies_are_refused_and_leave_nothing(tmp_path):
    draft = shutil.copytree(demo_pair()[1], tmp_path / "draft")
    swap_tokens(draft, "return", "import")
    output = tmp_path / "out" / "bundle"
    done = dsbd_export("--target", demo_pair()[0], "--draft", draft, "-o", output)
    assert_one_error(done, "the vocabularies differ: token '")
    assert not output.parent.exists() or not list(output.parent.iterdir())


USER_ERRORS = [  # (arguments, words of the message)
    ([], "either --demo or --target, with or without --draft"),
    (["--demo", "--target", "x"], "either --demo or --target"),
    (["--demo", "--draft", "x"], "either --demo or --target"),
    (["--draft", "x"], "--target is missing; give a checkpoint folder or hub id, or with --bundle"),
    (["--target", "/no/such"], "/no/such"),
    (["--target", "/no/such", "--draft", "/no/such"], "/no/such"),
    (["--demo", "--dtype", "fp8"], "fp8"),
    (["--demo", "--quantize", "int3"], "int3"),
    (["--demo", "--atol", "0"], "atol"),
    (["--demo", "--draft-vocab", "4096"], "draft_vocab=4096 leaves out none of 4096 tokens"),
    (
        ["--demo", "--draft-vocab", "64", "--draft-texts", "/no/such"],
        "draft_texts: data='/no/such'",
    ),
    (
        ["--demo", "--quantize", "int8-dynamic", "--calibration-texts", "/no/such"],
        "calibration_texts: data='/no/such'",
    ),
    (["--demo", "--draft-quantize", "int3"], "draft_quantize, of the draft: quantize='int3'"),
    (["--demo", "--adapter", "/no/such"], "no adapter at /no/such"),
    (["--demo", "--draft-adapter", "/no/such"], "no adapter at /no/such"),
    (["--demo", "--engine", "openvino"], "openvino"),
    (["--demo", "--engine", "tensorrt-rtx", "--compute-capability", "9.9"], "knows 7.5, 8.0"),
]
BUNDLE_ERRORS = [  # (arguments besides --bundle, words of the message)
    (["--engine", "tensorrt-rtx", "--dtype", "fp16"], "leave out --dtype"),
    (["--engine", "tensorrt-rtx", "--demo"], "leave out --demo"),
    (["--engine", "tensorrt-rtx", "-o", "other"], "leave out --output"),
    ([], "give --draft to add or replace its draft, or --engine tensorrt or"),
    (["--capacity", "256"], "give --draft to add or replace its draft, or --engine"),
    (["--engine", "onnx"], "engine='onnx' is no TensorRT"),
    (["--draft", "/no/such"], "/no/such"),
    (
        ["--draft", "x", "--target", "y"],
        "changes the draft of a bundle and keeps its target; leave out --target",
    ),
    (["--draft", "x", "-o", "other"], "keeps its target; leave out --output"),
    (["--draft", "x", "--demo"], "leave out --demo"),
    (["--draft", "x", "--adapter", "y"], "keeps its target; leave out --adapter"),
    (["--draft", "x", "--draft-quantize", "int3"], "draft_quantize, of the draft: quantize='int3'"),
    (["--draft", "x", "--quantize", "int8", "--engine", "tensorrt-rtx"], "not in engine='tensor"),
    (["--engine", "tensorrt-rtx", "--capacity", "300"], "capacity=300"),
]


@pytest.mark.parametrize(("arguments", "words"), USER_ERRORS)
def test_user_errors_end_in_one_line_and_leave_nothing(tmp_path, arguments, words):
    assert_one_error(dsbd_export("-o", tmp_path / "bundle", *arguments), words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("arguments", "words"), BUNDLE_ERRORS)
def test_engines_for_a_bundle_take_no_options_of_checkpoints(tiny_bundle, arguments, words):
    assert_one_error(dsbd_export("--bundle", tiny_bundle.path, *arguments), words)
    assert open_bundle(tiny_bundle.path).manifest == tiny_bundle.manifest


def test_a_draft_for_a_folder_that_is_no_bundle(tmp_path):
    done = dsbd_export("--bundle", tmp_path, "--draft", demo_pair()[1])
    assert_one_error(done, "is not a bundle: it has no dsbd.json")
    assert not list(tmp_path.iterdir())


def test_an_export_needs_an_output():
    assert_one_error(dsbd_export("--demo"), "-o is missing")


def test_engines_are_built_for_a_bundle(tmp_path):
    small = TinyModel(num_layers=1, dtype="fp16", head_dim=16, context_length=256)
    write_tiny_bundle(tmp_path / "bundle", target=small, draft=small)
    wanted = ("--engine", "tensorrt-rtx", "--compute-capability", "12.0")
    done = dsbd_export("--bundle", tmp_path / "bundle", *wanted)
    assert done.exit_code == 0, done.stderr
    assert "target/engine.plan" in done.stdout and "draft/prune.plan" in done.stdout
    assert "compute capability 12.0, 256 cache rows" in " ".join(done.stderr.split())


@pytest.fixture(scope="module")
def rows():
    """The table as printed: family -> its first line."""
    done = dsbd_export("--list-families")  # no --target, no --output
    assert done.exit_code == 0 and done.stderr == ""
    lines = [line.split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    return {cells[1].strip(): cells for cells in lines if cells[1].strip()}


def test_every_family_is_a_row(rows):
    assert list(rows) == list(FAMILIES)


ROWS = [  # (family, status, attention)
    ("llama", "supported", "Attention node"),
    ("gemma2", "supported", "decomposed"),
    ("gptj", "supported", "Attention node"),
    ("bloom", "refused", ""),
]


@pytest.mark.parametrize(("family", "status", "attention"), ROWS)
def test_status_and_attention(rows, family, status, attention):
    assert [cell.strip() for cell in rows[family][2:4]] == [status, attention]
