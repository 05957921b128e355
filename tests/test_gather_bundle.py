"""The shipped pair with a gather head: under a trie the sequences of the dense engines."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsbd_export.parts.gather_head import append_gather_head
from dsbd_ort import Pipeline, TokenTrie
from dsbd_runtime.bundle_files.bundle import MODEL_FILE, ROLES, open_bundle, write_manifest

PROMPT = "def read_json(path):\n"


@pytest.fixture(scope="module")
def gather_bundle(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo bundle with the head put on: what the export makes, without another export."""
    folder = tmp_path_factory.mktemp("gather") / "bundle"
    shutil.copytree(demo_bundle, folder)
    manifest = open_bundle(folder).manifest
    for role in ROLES:
        append_gather_head(folder / role / MODEL_FILE)
    entries = {role: replace(getattr(manifest, role), logits="gather") for role in ROLES}
    write_manifest(folder, versions=manifest.versions, **entries)
    return folder


@pytest.fixture(scope="module")
def pipelines(demo_bundle: Path, gather_bundle: Path):
    with (
        Pipeline.from_bundle(demo_bundle, num_threads=1) as dense,
        Pipeline.from_bundle(gather_bundle, num_threads=1) as gather,
    ):
        yield dense, gather


TRIE = TokenTrie.from_array(np.random.default_rng(0).integers(4, 400, size=(20_000, 4)))
WIDE = {"num_beams": 64, "num_return_sequences": 64, "max_new_tokens": 4, "draft_length": 2}
REQUESTS = [
    {"strategy": "beam-search", **WIDE, "draft_length": None},
    {"strategy": "speculative-beam-search", **WIDE},
    {"strategy": "dsbd", **WIDE},
    {"strategy": "dsbd", "num_beams": 4, "max_new_tokens": 4},
]


@pytest.mark.parametrize("options", REQUESTS, ids=lambda o: f"{o['strategy']}-{o['num_beams']}")
def test_same_sequences_as_the_dense_engines(pipelines, options):
    dense, gather = pipelines
    given = {name: value for name, value in options.items() if value is not None}
    for seed in range(2):
        request = {"constraint": TRIE, "seed": seed, **given}
        expected, found = (p.generate(PROMPT, **request).sequences for p in (dense, gather))
        assert [s.token_ids for s in found] == [s.token_ids for s in expected]
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.token_logprobs == pytest.approx(theirs.token_logprobs, abs=1e-5)
            assert mine.score == pytest.approx(theirs.score, abs=1e-5)


def test_search_is_the_same_with_and_without_a_draft(pipelines):
    request = {"constraint": TRIE, **WIDE}
    del request["draft_length"]
    plain = pipelines[1].generate(PROMPT, strategy="beam-search", **request)
    drafted = pipelines[1].generate(PROMPT, strategy="speculative-beam-search", **request)
    assert [s.token_ids for s in drafted.sequences] == [s.token_ids for s in plain.sequences]


def test_a_request_without_a_trie_gets_the_text_of_the_dense_engines(pipelines):
    dense, gather = (p.generate(PROMPT, num_beams=2, max_new_tokens=12, seed=3) for p in pipelines)
    assert gather.sequences[0].token_ids == dense.sequences[0].token_ids
    assert gather.sequences[0].logprob == pytest.approx(dense.sequences[0].logprob, abs=1e-4)
