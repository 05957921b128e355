"""The host in JavaScript: its tokens are Python's, for real engines and for every kind of them."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from dsbd_ort import Pipeline, TokenTrie
from tests.runtime.bundle_edits import as_version_2, edited, without_draft
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle

ROOT = Path(__file__).parents[2]
HOST = ROOT / "examples" / "node"
OLDEST_NODE = 20
UNREACHABLE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH")

PROMPTS = [
    "def read_json(path):\n",
    "class Reader:\n    def __init__(self, path):\n        self.path = ",
    "# caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{SNOWMAN}\n",
    "",
]
TINY_KINDS = {
    "full logits": TinyModel(),
    "sliding window": TinyModel(sliding_window=5, num_layers=4),
    "top-k head": TinyModel(logits="topk:8"),
    "fp16": TinyModel(dtype="fp16"),
}


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with its packages, which are installed once for a lock file."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.removeprefix("v").split(".")[0]) < OLDEST_NODE:
        pytest.skip(f"node is {version.strip()}, the example needs {OLDEST_NODE} or newer")
    folder = tmp_path_factory.mktemp("node") / "host"
    shutil.copytree(HOST, folder, ignore=shutil.ignore_patterns("node_modules"))
    (folder / "node_modules").symlink_to(_installed_packages(npm))
    return folder


def _installed_packages(npm: str) -> Path:
    of_lock = hashlib.sha256((HOST / "package-lock.json").read_bytes()).hexdigest()[:12]
    folder = ROOT / "build" / "node_host" / of_lock
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / "installed").exists():
            for name in ("package.json", "package-lock.json", ".npmrc"):
                shutil.copy(HOST / name, folder)
            command = [npm, "ci", "--prefer-offline", "--no-audit", "--no-fund"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if done.returncode and any(code in done.stderr for code in UNREACHABLE):
                pytest.skip(f"the npm registry cannot be reached: {done.stderr[-200:]}")
            assert done.returncode == 0, done.stderr
            (folder / "installed").touch()
    return folder / "node_modules"


def run_host(host: Path, bundle: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["node", "main.mjs", str(bundle), *arguments]
    return subprocess.run(command, cwd=host, capture_output=True, text=True, timeout=60)


def answer_of(host: Path, bundle: Path, *arguments: str) -> dict[str, Any]:
    done = run_host(host, bundle, "--json", *arguments)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def python(demo_bundle):
    with Pipeline.from_bundle(demo_bundle, num_threads=1) as pipeline:
        yield pipeline


def search(pipeline: Pipeline, prompt: Any, max_new_tokens: int) -> Any:
    result = pipeline.generate(
        prompt,
        strategy="speculative-beam-search",
        num_beams=1,
        draft_length=4,
        draft_beams=2,
        max_new_tokens=max_new_tokens,
    )
    return result.sequences[0]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokens_of_the_demo_pair_are_those_of_python(host, demo_bundle, python, prompt):
    found = answer_of(host, demo_bundle, "--prompt", prompt, "--max-new-tokens", "48")
    expected = search(python, prompt, 48)
    assert found["prompt_ids"] == python.tokenizer.encode(prompt)
    assert found["token_ids"] == expected.token_ids
    assert found["text"] == expected.text
    assert found["finish_reason"] == expected.finish_reason
    assert found["num_iterations"] < len(expected.token_ids) / 1.5


@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokens_of_the_pair_in_int8_are_those_of_python(host, int8_bundle, prompt):
    found = answer_of(host, int8_bundle, "--prompt", prompt, "--max-new-tokens", "48")
    with Pipeline.from_bundle(int8_bundle, num_threads=1) as pipeline:
        expected = search(pipeline, prompt, 48)
        greedy = pipeline.generate(prompt, strategy="greedy", max_new_tokens=48).sequences[0]
    assert found["token_ids"] == expected.token_ids == greedy.token_ids


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_every_kind_of_engine(host, tmp_path, kind):
    answer_as_python(host, tmp_path / "bundle", TINY_KINDS[kind], TinyModel(seed=1))


def test_a_draft_that_is_the_target(host, tmp_path):
    found = answer_as_python(host, tmp_path / "bundle", TinyModel(), TinyModel())
    # every iteration accepts the four drafted tokens and adds one
    assert found["num_iterations"] == -(-len(found["token_ids"]) // 5)


def test_a_bundle_without_a_draft_is_decoded_token_by_token(host, tmp_path):
    write_tiny_bundle(tmp_path / "pair")
    wanted = answer_of(host, tmp_path / "pair", "--ids", "256,40,41")
    alone = without_draft(tmp_path / "pair", TinyModel()).path
    found = answer_of(host, alone, "--ids", "256,40,41")
    assert found["token_ids"] == wanted["token_ids"]
    assert found["num_iterations"] == len(found["token_ids"])
    done = run_host(host, alone, "--ids", "256", "--draft-length", "2")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "--draft-length is given, but the bundle" in done.stderr
    assert f"has no draft; leave it out, or add a draft with: dsbd-export --bundle {alone}" in (
        done.stderr
    )


def answer_as_python(
    host: Path, bundle: Path, target: TinyModel, draft: TinyModel
) -> dict[str, Any]:
    write_tiny_bundle(bundle, target=target, draft=draft)
    ids = [256, *range(40, 52)]
    found = answer_of(host, bundle, "--ids", ",".join(map(str, ids)))
    with Pipeline.from_bundle(bundle, num_threads=1) as pipeline:
        expected = search(pipeline, ids, 32)
    assert found["token_ids"] == expected.token_ids
    assert found["finish_reason"] == expected.finish_reason
    return found


def test_a_forest_in_one_call_gives_the_logits_of_its_paths(host, demo_bundle):
    done = run_host(host, demo_bundle, "--prompt", PROMPTS[0], "--check-forest")
    assert done.returncode == 0
    assert float(done.stderr.rsplit(" ", 1)[1]) < 1e-3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ids", "258"], "token id 258; expected one or more from 0 to 257"),
        (["--ids", "1", "--max-new-tokens", "2048"], "2049 positions, the models were made for"),
        (["--ids", "1", "--draft-length", "0"], "--draft-length is 0; expected a whole number"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(host, tiny_bundle, arguments, words):
    done = run_host(host, tiny_bundle.path, *arguments)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert words in done.stderr


def test_a_bundle_of_schema_version_2_answers_alike(host, tmp_path):
    answers = []
    for full_logits in (True, False):
        model = TinyModel(logits="topk:8", full_logits=full_logits)
        bundle = tmp_path / str(full_logits)
        write_tiny_bundle(bundle, target=model, draft=replace(model, seed=1))
        if not full_logits:
            edited(bundle, as_version_2)
        answers.append(answer_of(host, bundle, "--ids", "256,40,41"))
    assert answers[0] == answers[1]


HYBRID = {"kind": "convolution rows", "layer": 0, "width": 8, "num_ancestors": 2, "dtype": "fp32"}

REFUSED = [
    ({"schema_version": 1}, {}, "has schema_version 1, this host reads 4, 3, 2; export again"),
    ({"schema_version": "3"}, {}, 'has schema_version "3", this host reads 4, 3, 2'),
    ({"surprise": 1}, {}, "has surprise, which this host does not know; use the host of the"),
    ({}, {"caches": [HYBRID]}, 'kind "convolution rows": the model does not attend in all layers'),
    ({}, {"features": {}}, "draft has features, which this host does not know"),
    ({"draft": 3}, {}, "dsbd.json: draft is 3, expected an entry; export again"),
    ({"target": None}, {}, "dsbd.json: target is null, expected an entry; export again"),
]


@pytest.mark.parametrize(("fields", "of_draft", "said"), REFUSED)
def test_other_manifests_are_refused(host, tiny_bundle, tmp_path, fields, of_draft, said):
    copy = Path(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    data = json.loads((copy / "dsbd.json").read_text())
    data["draft"] |= of_draft
    (copy / "dsbd.json").write_text(json.dumps(data | fields))
    done = run_host(host, copy, "--ids", "1")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert said in done.stderr


def test_a_manifest_that_does_not_say_whether_there_is_a_draft(host, tiny_bundle, tmp_path):
    copy = Path(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    done = run_host(host, edited(copy, lambda data: data.pop("draft")), "--ids", "1")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "dsbd.json: draft is undefined, expected an entry; export again" in done.stderr


def test_a_cut_bundle_is_refused(host, tiny_bundle, tmp_path):
    copy = Path(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    with (copy / "draft" / "model.onnx").open("r+b") as file:
        file.truncate(100)
    done = run_host(host, copy, "--ids", "1")
    assert done.returncode == 2 and "has 100 bytes, the manifest says" in done.stderr


SEQUENCES = {
    "words": ["import os", "import re", "import os.path", "return None", "return"],
    "one": ["x"],
}


@pytest.mark.parametrize("end", ["leaf", "eos"])
@pytest.mark.parametrize("texts", SEQUENCES.values(), ids=SEQUENCES)
def test_tokens_under_a_trie_are_those_of_python(host, demo_bundle, python, tmp_path, texts, end):
    trie = TokenTrie.from_texts(texts, python.tokenizer.encode, end=end)
    trie.save(tmp_path / "words.trie")
    for prompt in ["def f():\n    ", "", "import"]:
        found = answer_of(
            host, demo_bundle, "--prompt", prompt, "--trie", str(tmp_path / "words.trie")
        )
        expected = python.generate(
            prompt,
            strategy="speculative-beam-search",
            num_beams=1,
            draft_length=4,
            draft_beams=2,
            max_new_tokens=32,
            constraint=trie,
        ).sequences[0]
        assert found["token_ids"] == expected.token_ids
        assert found["finish_reason"] == expected.finish_reason
        assert found["text"] in texts


def test_many_sequences_on_every_kind_of_head(host, tmp_path):
    sequences = np.random.default_rng(0).integers(0, 250, (400, 5))
    TokenTrie.from_array(sequences).save(tmp_path / "items.trie")
    for name in ("full logits", "fp16"):
        bundle = tmp_path / name
        write_tiny_bundle(bundle, target=TINY_KINDS[name], draft=TinyModel(seed=1))
        found = answer_of(host, bundle, "--ids", "256,40", "--trie", str(tmp_path / "items.trie"))
        with Pipeline.from_bundle(bundle, num_threads=1) as pipeline:
            expected = pipeline.generate(
                [256, 40],
                strategy="beam-search",
                num_beams=1,
                max_new_tokens=32,
                constraint={"trie": str(tmp_path / "items.trie")},
            ).sequences[0]
        assert found["token_ids"] == expected.token_ids in sequences.tolist()
        assert found["finish_reason"] == "stop"


def test_a_trie_that_cannot_be_used_is_refused(host, tiny_bundle, tmp_path):
    whole, wide = tmp_path / "whole.trie", tmp_path / "wide.trie"
    TokenTrie.from_sequences([[1, 2], [3]]).save(whole)
    TokenTrie.from_sequences([[1, 258]]).save(wide)
    content = whole.read_bytes()
    (tmp_path / "cut.trie").write_bytes(content[:-1])
    last = content.rindex(b"\x03\0\0\0")  # the token id 3
    (tmp_path / "flipped.trie").write_bytes(content[:last] + b"\x07" + content[last + 1 :])
    for name, words in {
        "wide": "has the token id 258; expected 0 to 257",
        "cut": "is no saved trie, or not whole",
        "flipped": "is no saved trie, or not whole",
        "none": "cannot read",
    }.items():
        done = run_host(
            host, tiny_bundle.path, "--ids", "1", "--trie", str(tmp_path / f"{name}.trie")
        )
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
        assert words in done.stderr
