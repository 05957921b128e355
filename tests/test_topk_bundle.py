"""The shipped pair with a top-k head: the text of the dense engines, whatever the strategy."""

from __future__ import annotations

import shutil
from dataclasses import replace

import onnx
import pytest
from click.testing import CliRunner

from dsbd_export.parts.head import append_topk_head
from dsbd_ort import Pipeline
from dsbd_ort.cli import run
from dsbd_ort.decoding import ConfigError
from dsbd_runtime.bundle_files.bundle import MODEL_FILE, ROLES, open_bundle, write_manifest

NUM_CANDIDATES = 24
PROMPT = "def read_json(path):\n"


@pytest.fixture(scope="module")
def topk_bundle(demo_bundle, tmp_path_factory):
    """The demo bundle with the head put on: what the export makes, without another export."""
    folder = tmp_path_factory.mktemp("topk") / "bundle"
    shutil.copytree(demo_bundle, folder)
    manifest = open_bundle(folder).manifest
    for role in ROLES:
        append_topk_head(folder / role / MODEL_FILE, NUM_CANDIDATES)
    entries = {
        role: replace(getattr(manifest, role), logits=f"topk:{NUM_CANDIDATES}") for role in ROLES
    }
    write_manifest(folder, versions=manifest.versions, **entries)
    return folder


@pytest.fixture(scope="module")
def pipelines(demo_bundle, topk_bundle):
    with (
        Pipeline.from_bundle(demo_bundle, num_threads=1) as dense,
        Pipeline.from_bundle(topk_bundle, num_threads=1) as topk,
    ):
        yield dense, topk


REQUESTS = [
    {"strategy": "dsbd", "top_k": 20},
    {"strategy": "dsbd", "top_k": 24, "coupling": "rejection", "top_p": 0.9, "temperature": 0.8},
    {"strategy": "beam-sample", "top_k": 20},
    {"strategy": "speculative", "top_k": 24},
    {"strategy": "speculative", "top_k": 8, "coupling": "rejection"},
    {"strategy": "mjsd", "top_k": 20},
    {"strategy": "sample"},
    {"strategy": "dsbd", "num_beams": 2, "top_p": 0.9, "temperature": 0.7},
    {"strategy": "speculative", "top_k": 100},
    {"strategy": "dsbd", "min_p": 0.1},
    {"strategy": "beam-search", "num_beams": 4},
    {"strategy": "speculative-beam-search", "num_beams": 4},
]


@pytest.mark.parametrize("options", REQUESTS, ids=lambda o: "-".join(map(str, o.values())))
def test_same_tokens_as_the_dense_engines(pipelines, options):
    dense, topk = pipelines
    for seed in range(3):
        request = {"max_new_tokens": 16, "seed": seed, **options}
        expected, found = (p.generate(PROMPT, **request).sequences[0] for p in (dense, topk))
        assert found.token_ids == expected.token_ids
        assert found.token_logprobs == pytest.approx(expected.token_logprobs, abs=1e-5)


def test_more_than_the_engines_return_is_refused_where_no_others_are_kept(topk_bundle, tmp_path):
    """In one line, by the command."""
    folder = tmp_path / "bundle"
    shutil.copytree(topk_bundle, folder)
    model = onnx.load(folder / "target" / MODEL_FILE, load_external_data=False)
    kept = [output for output in model.graph.output if output.name != "logits"]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    onnx.save(model, folder / "target" / MODEL_FILE)
    manifest = open_bundle(topk_bundle).manifest
    entries = {"target": replace(manifest.target, full_logits=False), "draft": manifest.draft}
    write_manifest(folder, versions=manifest.versions, **entries)
    with Pipeline.from_bundle(folder, num_threads=1) as pipeline:
        with pytest.raises(ConfigError, match="use top_k 1 to 24"):
            pipeline.generate(PROMPT, top_k=25)
        assert pipeline.generate(PROMPT, max_new_tokens=2).sequences  # its default is K
    done = CliRunner().invoke(run, [str(folder), "--prompt", PROMPT, "--top-k", "25"])
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1
    assert "returns the 24 largest logits" in done.stderr
