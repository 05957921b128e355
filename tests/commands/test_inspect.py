"""dsbd-inspect as a person and as a script meet it."""

import dataclasses
import json
import re
import shutil
from dataclasses import replace
from functools import partial

import pytest

from dsbd_ort.cli import inspect
from dsbd_ort.commands.bundle_summary import summarize_bundle
from dsbd_ort.commands.inspect import providers_lines
from dsbd_ort.pipeline import Pipeline
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.errors import CapacityError
from tests.commands.calls import called, called_apart
from tests.runtime.bundle_edits import as_version_2, edited, put, with_files, without_draft
from tests.runtime.fake_trt import add_fake_engines
from tests.runtime.feature_pair import DRAFT as FEATURE_DRAFT
from tests.runtime.feature_pair import TARGET as FEATURE_TARGET
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle

dsbd_inspect = partial(called, inspect)
TARGET = TinyModel(num_layers=3, num_kv_heads=2, head_dim=8, context_length=512, sliding_window=16)
DRAFT = TinyModel(seed=1, num_layers=1, context_length=300, dtype="fp16", logits="topk:8")
TARGET_KV, DRAFT_KV = 2 * 3 * 2 * 8 * 4, 2 * 1 * 2 * 8 * 2  # parts, layers, heads, dims, bytes
WHOLE_KV = TARGET_KV * 512 + DRAFT_KV * 300


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect") / "bundle"
    return write_tiny_bundle(folder, target=TARGET, draft=DRAFT)


def inspected(*arguments):
    done = dsbd_inspect(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_json_tells_both_models_and_their_caches(bundle):
    summary = inspected(bundle)
    target, draft = summary["target"], summary["draft"]
    assert (target["dtype"], target["quantization"], target["logits"]) == ("fp32", "none", "full")
    assert (draft["dtype"], draft["logits"], draft["context_length"]) == ("fp16", "topk:8", 300)
    assert summary["schema_version"] == 4
    for model in (target, draft):
        assert (model["full_logits"], model["bit_exact"]) == (True, None)
    assert target["caches"] == [dataclasses.asdict(cache) for cache in TARGET.entry().caches]
    assert (target["kv_bytes_per_token"], draft["kv_bytes_per_token"]) == (TARGET_KV, DRAFT_KV)
    assert target["kv_bytes_full_context"] == TARGET_KV * 512
    assert summary["context_length"] == 512 and summary["vocab_size"] == 258
    assert summary["kv_bytes_per_token"] == TARGET_KV + DRAFT_KV
    assert summary["kv_bytes_full_context"] == WHOLE_KV
    assert target["masks"] == ["attention_mask", "attention_mask_sliding"]
    assert (target["sliding_window"], draft["sliding_window"]) == (16, None)
    assert set(target["parity"]) == {"measure", "value", "limit", "accepted"}


def test_an_adapter_and_what_is_not_read_are_named(bundle, tmp_path):
    plain = inspected(bundle)
    assert (plain["target"]["adapter"], plain["draft"]["unread_inputs"]) == (None, [])
    fields = {"adapter": "chat-lora", "unread_inputs": ["images", "video"]}
    copy = shutil.copytree(bundle, tmp_path / "bundle")
    changed = edited(copy, lambda manifest: manifest["target"].update(fields))
    target = inspected(changed)["target"]
    assert (target["adapter"], target["unread_inputs"]) == ("chat-lora", ["images", "video"])
    printed = dsbd_inspect(changed).stdout
    assert re.search(r"adapter .*chat-lora .*none", printed)
    assert re.search(r"inputs not read .*images, video .*none", printed)


def test_json_tells_the_files_on_disk(bundle):
    summary = inspected(bundle)
    sizes = {name: (bundle / name).stat().st_size for name in summary["files"]}
    assert summary["files"] == sizes and summary["total_bytes"] == sum(sizes.values())
    weights = sizes["target/model.onnx"] + sizes["target/model.onnx.data"]
    assert summary["target"]["weight_bytes"] == weights
    assert summary["versions"] and summary["verified"] is False
    assert inspected(bundle, "--verify")["verified"] is True


def test_help_names_every_field_of_the_json(bundle):
    text = dsbd_inspect("--help").stdout
    summary = inspected(bundle)
    for level in (
        summary,
        summary["target"],
        summary["target"]["caches"][0],
        summary["providers"][0],
    ):
        assert not [name for name in level if name not in text]


def test_the_tables_say_it_in_words(bundle):
    done = dsbd_inspect(bundle)
    assert done.exit_code == 0
    for words in (
        "topk:8, full to read",
        "not claimed",
        "schema version 4, made with onnx",
        "fp16, none, portable",
        "attention_mask_sliding",
        "max_abs_error",
        f"{TARGET_KV + DRAFT_KV:,} bytes a token, {WHOLE_KV:,} in a context",
        f"{TARGET_KV * 512:,}",
        "target/model.onnx.data",
        "sizes checked",
        "provider cpu: runs this bundle here",
    ):
        assert words in done.stdout, words


def test_what_a_gpu_lacks_takes_one_line_where_there_is_none(bundle):
    summary = summarize_bundle(open_bundle(bundle), verified=False)
    folded = list(providers_lines(summary, shows_all=False))
    assert folded[0] == ["provider cpu: runs this bundle here"]
    assert folded[1][0] == "provider webgpu: cannot run this bundle here"
    assert any("has the form portable, provider 'webgpu' runs" in line for line in folded[1])
    nvidia, plugins = folded[2:]
    assert nvidia[0].startswith("providers cuda, tensorrt, tensorrt-rtx: no NVIDIA driver")
    assert plugins == ["plug-ins of ONNX Runtime, not tried: nv-tensorrt-rtx, openvino, qnn, mlx"]
    whole = list(providers_lines(summary, shows_all=True))
    assert [lines[0].split(":")[0] for lines in whole[1:-1]] == [
        f"provider {name}" for name in ("cuda", "webgpu", "tensorrt", "tensorrt-rtx")
    ]
    assert all(
        len(lines) > 1 or lines[0].endswith(": runs this bundle here") for lines in whole[1:-1]
    )


def test_a_bundle_of_schema_version_2(tmp_path):
    draft = replace(DRAFT, full_logits=False)
    write_tiny_bundle(tmp_path / "bundle", target=TARGET, draft=draft)
    edited(tmp_path / "bundle", as_version_2)
    summary = inspected(tmp_path / "bundle")
    assert summary["schema_version"] == 2
    models = summary["target"], summary["draft"]
    assert [model["full_logits"] for model in models] == [True, False]
    text = dsbd_inspect(tmp_path / "bundle").stdout
    assert "schema version 2" in text and "full to read" not in text


MEASURED = {"encodes": True, "decodes": True, "renders": None, "reason": None}
NATIVE_TEXTS = [  # files, what the manifest says, what is printed
    ({"text_checks.json": "{}"}, None, "compares its text with Python's at opening"),
    ({}, None, "refuses text: no text_checks.json; export again"),
    ({}, MEASURED, "reads and writes the text of this bundle"),
    ({}, {**MEASURED, "encodes": False, "reason": "a -> b"}, "refuses some text: a -> b"),
]


@pytest.mark.parametrize(("files", "measured", "words"), NATIVE_TEXTS)
def test_text_without_python(bundle, tmp_path, files, measured, words):
    copy = with_files(bundle, tmp_path / "bundle", files)
    edited(copy, put(["target", "native_text"], measured))
    summary = inspected(copy)
    assert (summary["has_text_checks"], summary["native_text"]) == (bool(files), measured)
    assert f"the native library {words}" in dsbd_inspect(copy).stdout


def test_a_bundle_without_a_draft(tmp_path):
    write_tiny_bundle(tmp_path / "bundle", target=TARGET)
    without_draft(tmp_path / "bundle", TARGET)
    summary = inspected(tmp_path / "bundle")
    assert summary["draft"] is None
    assert (summary["context_length"], summary["kv_bytes_per_token"]) == (512, TARGET_KV)
    assert next(row for row in summary["providers"] if row["name"] == "cpu")["can_run"]
    text = dsbd_inspect(tmp_path / "bundle").stdout
    assert f"keys and values of the target: {TARGET_KV:,} bytes a token" in text


def test_a_type_that_the_provider_lacks_is_a_problem(bundle):
    opened = open_bundle(bundle)
    manifest = replace(opened.manifest, draft=replace(opened.manifest.draft, dtype="bf16"))
    summary = summarize_bundle(replace(opened, manifest=manifest), verified=False)
    cpu = next(provider for provider in summary.providers if provider.name == "cpu")
    assert not cpu.can_run and len(cpu.problems) == 1
    assert "is in bf16" in cpu.problems[0] and "export with --dtype fp32" in cpu.problems[0]


def test_engines_are_shown_with_what_they_were_built_for(tmp_path):
    write_tiny_bundle(tmp_path / "bundle")
    add_fake_engines(tmp_path / "bundle", tensorrt_version="1.2.3")
    summary = inspected(tmp_path / "bundle")
    [target, draft] = summary["engines"]
    assert (target["role"], draft["role"]) == ("target", "draft")
    assert (target["built"]["compute_capability"], target["built"]["capacity"]) == ("12.0", 320)
    assert "version 1.2.3, here is" in " ".join(target["problems"])
    rtx = next(row for row in summary["providers"] if row["name"] == "tensorrt-rtx")
    assert not rtx["can_run"] and "build it with: dsbd-export --bundle" in " ".join(rtx["problems"])
    text = dsbd_inspect(tmp_path / "bundle").stdout
    assert "engine of the draft: does not fit this machine" in text
    assert "for compute capability 12.0, 320 cache rows, calls of up to 1, 8, 32, 256 rows" in text


def test_without_engines_no_tensorrt_runs_the_bundle(bundle):
    summary = inspected(bundle)
    assert summary["engines"] == []
    for name in ("tensorrt", "tensorrt-rtx"):
        row = next(row for row in summary["providers"] if row["name"] == name)
        assert not row["can_run"] and f"has no {name} engine" in " ".join(row["problems"])


def test_without_onnxruntime_it_says_so(bundle):
    before = "import sys; sys.modules['onnxruntime'] = None"
    done = called_apart("inspect", bundle, "--json", before=before)
    assert done.returncode == 0, done.stderr
    cpu = json.loads(done.stdout)["providers"][0]
    assert cpu["name"] == "cpu" and not cpu["can_run"]
    mend = "in a checkout of dsbd-ort run: pip install -c constraints.txt -e '.[cpu]'"
    assert mend in cpu["problems"][0]


def test_user_errors_end_in_one_line(bundle, tmp_path):
    damaged = tmp_path / "bundle"
    write_tiny_bundle(damaged)
    weights = damaged / "draft" / "model.onnx.data"
    content = bytearray(weights.read_bytes())
    content[7] ^= 1
    weights.write_bytes(content)
    assert dsbd_inspect(damaged).exit_code == 0  # sizes are right
    for arguments, words in (
        ((tmp_path / "nothing",), "no bundle at"),
        ((damaged, "--verify"), "has sha256"),
        ((bundle, "--colour"), "--colour"),
    ):
        done = dsbd_inspect(*arguments)
        assert done.exit_code == 2 and done.stdout == ""
        assert len(done.stderr.splitlines()) == 1 and words in done.stderr


def test_a_draft_that_shortens_the_context_is_named(tmp_path):
    draft = replace(FEATURE_DRAFT, context_length=128)
    target = replace(FEATURE_TARGET, context_length=512)
    write_tiny_bundle(tmp_path / "bundle", target=target, draft=draft)
    text = dsbd_inspect(tmp_path / "bundle").stdout
    assert (
        "requests can use 128 tokens: the draft's context is shorter than the target's 512" in text
    )
    with (
        Pipeline.from_bundle(tmp_path / "bundle") as pipeline,
        pytest.raises(
            CapacityError, match=r"is 128 tokens \(the draft's; the target's has 512\), .*; use"
        ),
    ):
        pipeline.generate([1] * 100, max_new_tokens=64)


def test_a_draft_with_a_short_context_serves_long_requests(tmp_path):
    """It reads the end of the prompt, and begins again during the answer."""
    draft = replace(DRAFT, context_length=48)
    write_tiny_bundle(tmp_path / "bundle", target=TARGET, draft=draft)
    text = dsbd_inspect(tmp_path / "bundle").stdout
    assert "requests can use" not in text and "in a context of 512" in text
    prompt = [1 + i % 90 for i in range(300)]
    common = {"max_new_tokens": 100, "seed": 3, "eos_token_id": ()}
    with Pipeline.from_bundle(tmp_path / "bundle") as pipeline:
        for beams, plain in (({}, "sample"), ({"num_beams": 3}, "beam-sample")):
            drafted = "dsbd" if beams else "speculative"
            shape = {"strategy": drafted, "draft_length": 3, **beams, **common}
            found = pipeline.generate(prompt, **shape)
            wanted = pipeline.generate(prompt, strategy=plain, **beams, **common)
            ids = [[s.token_ids for s in each.sequences] for each in (found, wanted)]
            assert ids[0] == ids[1] and found.stats.draft_calls > 50


def test_features_that_are_returned_and_read(feature_bundle):
    done = dsbd_inspect(feature_bundle.path)
    assert done.exit_code == 0
    (line,) = [line for line in done.stdout.splitlines() if "layers 2, 0" in line]
    assert "features" in line and "returns what enters layers 2, 0" in line
    assert "reads 64, or 32 of its own" in line
    told = inspected(feature_bundle.path)
    assert told["target"]["features"] == {"width": 64, "layers": [2, 0], "own_width": None}
    assert told["draft"]["features"] == {"width": 64, "layers": None, "own_width": 32}
