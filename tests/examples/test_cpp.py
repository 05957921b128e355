"""The host in C++: its tokens are Python's, for real engines and for every kind of them."""

import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from dsbd_ort import Pipeline
from tests.doc_blocks import blocks_of
from tests.examples.cpp_requests import arguments_of, of_python
from tests.runtime.bundle_edits import as_version_2, edited, without_draft
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "embedding.md"

TINY_KINDS = {
    "full logits": TinyModel(),
    "sliding window": TinyModel(sliding_window=5, num_layers=4),
    "top-k head": TinyModel(logits="topk:8"),
    "fp16": TinyModel(dtype="fp16"),
}
TINY_REQUESTS = [
    {"num_beams": 3, "draft_beams": 5, "top_k": 8, "top_p": 0.95},
    {"strategy": "beam-sample", "num_beams": 2, "top_k": 4, "temperature": 0.5},
    {"strategy": "speculative-beam-search", "num_beams": 1, "draft_beams": 2},
]
DEMO_REQUESTS = [
    {"num_beams": 4, "draft_length": 4, "top_k": 20},
    {"num_beams": 2, "draft_length": 6, "draft_beams": [4, 4, 2, 2, 2, 2], "temperature": 0.8},
    {"num_beams": 3, "draft_length": 2, "draft_beams": 6, "top_k": 50, "top_p": 0.9},
    {"strategy": "beam-sample", "num_beams": 4, "top_k": 20},
    {"strategy": "speculative", "draft_length": 5, "temperature": 1.3},
    {"strategy": "speculative-beam-search", "num_beams": 1, "draft_length": 4},
]


@pytest.fixture(scope="session")
def host(tmp_path_factory):
    """The example, built as documented."""
    if not os.environ.get("ONNXRUNTIME_ROOT"):
        pytest.skip(
            "ONNXRUNTIME_ROOT is not set: the folder with include/ and lib/ of ONNX Runtime, whose "
            "Python wheel has no headers (docs/embedding.md)"
        )
    folder = tmp_path_factory.mktemp("cpp")
    (folder / "examples").symlink_to(ROOT / "examples")
    run_documented("needs the headers of ONNX Runtime", folder)
    return folder / "build" / "cpp" / "dsbd_host"


def run_documented(reason, folder):
    """Run the block of docs/embedding.md that is skipped elsewhere; return what it printed."""
    blocks = blocks_of(DOCUMENT, DOCUMENT.read_text())
    (block,) = (block for block in blocks if (block.skip_reason or "").startswith(reason))
    command = ["bash", "-e", "-c", block.text]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_documented_commands(host, tiny_bundle):
    workspace = host.parents[2]
    (workspace / "bundle").symlink_to(tiny_bundle.path)
    (workspace / "ids.jsonl").write_text('{"ids": [1, 2, 3], "seed": 0}\n{"ids": [4]}')
    first, *answers = run_documented("needs the host", workspace).splitlines()
    assert 1 <= len(first.split(",")) <= 8
    assert [len(json.loads(answer)["sequences"]) for answer in answers] == [1, 1]


def run_host(host, bundle, *arguments):
    command = [host, bundle, *arguments, "--threads", "1"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def assert_answers_as_python(host, bundle, pipeline, prompts, options):
    """Compare every beam of every prompt; prompt number i has seed i."""
    file = host.parent / "prompts.jsonl"
    lines = [json.dumps({"ids": ids, "seed": seed}) for seed, ids in enumerate(prompts)]
    file.write_text("\n".join(lines))
    done = run_host(host, bundle, "--input", str(file), "--json", *arguments_of(options))
    assert done.returncode == 0, done.stderr
    answers = map(json.loads, done.stdout.splitlines())
    for seed, (ids, answer) in enumerate(zip(prompts, answers, strict=True)):
        expected = pipeline.generate(ids, **{**of_python(options), "seed": seed}).sequences
        found = answer["sequences"]
        assert [s["token_ids"] for s in found] == [s.token_ids for s in expected], (options, seed)
        logprobs = [s.logprob for s in expected]
        assert [s["logprob"] for s in found] == pytest.approx(logprobs, abs=1e-3)


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_every_kind_of_engine(host, tmp_path, kind):
    write_tiny_bundle(tmp_path / "bundle", target=TINY_KINDS[kind], draft=TinyModel(seed=1))
    prompts = [[256, *(40 + np.arange(size) % 200).tolist()] for size in (1, 12, 300)]
    with Pipeline.from_bundle(tmp_path / "bundle", num_threads=1) as pipeline:
        for options in TINY_REQUESTS:
            request = {"max_new_tokens": 24, **options}
            assert_answers_as_python(host, tmp_path / "bundle", pipeline, prompts, request)


@pytest.fixture(scope="module", params=["fp32", "int8-dynamic"])
def demo(request, demo_bundle, int8_bundle):
    bundle = {"fp32": demo_bundle, "int8-dynamic": int8_bundle}[request.param]
    with Pipeline.from_bundle(bundle, num_threads=1) as pipeline:
        yield pipeline


def library_prompts(pipeline, count):
    """Return the token ids of pieces of the Python standard library, 20 to 400 characters."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in folder.glob("*.py") if file.stat().st_size > 2000)
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files[:count]]
    assert len(texts) == count
    sizes = np.random.default_rng(0).integers(20, 400, count).tolist()
    return [
        pipeline.tokenizer.encode(text[size : 2 * size])
        for text, size in zip(texts, sizes, strict=True)
    ]


def test_tokens_of_the_demo_pair_are_those_of_python(host, demo):
    prompts = library_prompts(demo, 4)
    for options in DEMO_REQUESTS[::2]:
        request = {**options, "max_new_tokens": 16}
        assert_answers_as_python(host, demo.bundle.path, demo, prompts, request)


@pytest.mark.slow
@pytest.mark.parametrize("options", DEMO_REQUESTS, ids=str)
def test_tokens_of_the_demo_pair_on_50_prompts(host, demo, options):
    prompts = library_prompts(demo, 50)
    request = {**options, "max_new_tokens": 32}
    assert_answers_as_python(host, demo.bundle.path, demo, prompts, request)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ids", "258"], "token id 258; expected 0 to 257"),
        (["--ids", "1", "--max-new-tokens", "2049"], "2049 positions, the model was made for 2048"),
        (["--ids", "1", "--draft-beams", "2"], "a layer of 2; expected at least num_beams, 4"),
        (["--ids", "1", "--strategy", "mjsd"], "strategy is 'mjsd'; expected one of dsbd, "),
        (["--ids", "1", "--strategy", "greedy", "--top-k", "5"], "means nothing to strategy"),
        (["--ids", "1", "--temperature", "0"], "temperature is 0.000000; expected at least"),
        (["--ids", "1x"], "--ids is '1x'; expected a whole number"),
        (["--input", "no.jsonl"], "cannot read no.jsonl"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(host, tiny_bundle, arguments, words):
    done = run_host(host, tiny_bundle.path, *arguments)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert words in done.stderr


def test_a_request_beyond_a_top_k_head_is_refused(host, tmp_path):
    model = TinyModel(logits="topk:8")
    write_tiny_bundle(tmp_path / "bundle", target=model, draft=model)
    done = run_host(host, tmp_path / "bundle", "--ids", "1", "--top-k", "9")
    assert done.returncode == 2 and "looks at 9 tokens of a position, the engine" in done.stderr


def test_damaged_bundles_are_refused(host, tiny_bundle, tmp_path):
    copy = Path(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    manifest = json.loads((copy / "dsbd.json").read_text())
    damages = [
        ({"schema_version": 5}, "schema_version 5, this host reads 2 to 4"),
        ({"files": {**manifest["files"], "../x": {"size": 1}}}, "outside the bundle"),
        ({"target": {**manifest["target"], "logits": "topk:0"}}, "expected full or topk:K"),
        ({"target": {**manifest["target"], "vocab_size": 9}}, "target and draft differ in"),
        ({"draft": {**manifest["draft"], "masks": ["mask"]}}, "unknown mask"),
        ({"draft": 3}, "is not what dsbd-export writes"),
        ({"draft": None}, "this bundle has no draft, but strategy dsbd needs one; use sample"),
    ]
    for damage, words in damages:
        (copy / "dsbd.json").write_text(json.dumps({**manifest, **damage}))
        done = run_host(host, copy, "--ids", "1")
        assert done.returncode == 2 and words in done.stderr
    (copy / "dsbd.json").write_text(json.dumps(manifest))
    with (copy / "draft" / "model.onnx").open("r+b") as file:
        file.truncate(100)
    done = run_host(host, copy, "--ids", "1")
    assert done.returncode == 2 and "has 100 bytes, the manifest says" in done.stderr


def test_a_bundle_without_a_draft_samples(host, tmp_path):
    write_tiny_bundle(tmp_path / "bundle")
    options = {"strategy": "beam-sample", "num_beams": 2, "top_k": 4}
    command = ["--ids", "1,2,3", "--json", *arguments_of(options)]
    wanted = run_host(host, tmp_path / "bundle", *command)
    without_draft(tmp_path / "bundle", TinyModel())
    found = run_host(host, tmp_path / "bundle", *command)
    assert found.returncode == 0 and found.stdout == wanted.stdout


def test_a_bundle_of_schema_version_2_answers_alike(host, tmp_path):
    answers = []
    for full_logits in (True, False):
        model = TinyModel(logits="topk:8", full_logits=full_logits)
        bundle = tmp_path / str(full_logits)
        write_tiny_bundle(bundle, target=model, draft=model)
        if not full_logits:
            edited(bundle, as_version_2)
        answers.append(run_host(host, bundle, "--ids", "1,2,3", "--top-k", "8").stdout)
    assert answers[0] == answers[1] != ""
