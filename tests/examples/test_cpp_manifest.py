"""The manifest reader of the host in C++, without ONNX Runtime."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.examples.test_cpp_algorithm import compiled
from tests.runtime.bundle_edits import as_version_2, edited, without_draft
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    has_json = subprocess.run(
        [compiler, "-fsyntax-only", "-x", "c++", "-"],
        input="#include <nlohmann/json.hpp>",
        capture_output=True,
        text=True,
    )
    if has_json.returncode:
        pytest.skip("nlohmann/json.hpp is not installed (docs/embedding.md)")
    return compiled("manifest_host.cpp", tmp_path_factory.mktemp("manifest"))


def read(reader, bundle):
    return subprocess.run([reader, bundle], capture_output=True, text=True, timeout=60)


def test_both_schema_versions_are_read(reader, tmp_path):
    for full_logits in (True, False):
        bundle = tmp_path / str(full_logits)
        target = TinyModel(logits="topk:8", full_logits=full_logits)
        write_tiny_bundle(bundle, target=target)
        if not full_logits:
            edited(bundle, as_version_2)
        assert read(reader, bundle).stdout == "258 8 draft\n"


def test_a_bundle_without_a_draft_is_read(reader, tmp_path):
    write_tiny_bundle(tmp_path / "bundle")
    without_draft(tmp_path / "bundle", TinyModel())
    assert read(reader, tmp_path / "bundle").stdout == "258 0 no draft\n"


HYBRID = {"kind": "convolution rows", "layer": 0, "width": 8, "num_ancestors": 2, "dtype": "fp32"}

REFUSED = [
    # fields of the manifest and of its draft, what is said
    ({"schema_version": 1}, {}, "schema_version 1, this host reads 2 to 4; export again"),
    ({"schema_version": 5}, {}, "schema_version 5, this host reads 2 to 4; export again"),
    ({"schema_version": "3"}, {}, 'schema_version "3", this host reads 2 to 4'),
    ({"schema_version": 3.0}, {}, "schema_version 3.0, this host reads 2 to 4"),
    ({"surprise": 1}, {}, "has surprise, which this host does not know; use the host of the"),
    ({}, {"caches": [HYBRID]}, 'kind "convolution rows": the model does not attend in all layers'),
    ({}, {"features": {}}, "draft has features, which this host does not know"),
    ({}, {"d2t": "draft/d2t.npy"}, "draft has d2t, which this host does not know"),
    ({"draft": 3}, {}, "is not what dsbd-export writes"),
]


@pytest.mark.parametrize(("fields", "of_draft", "said"), REFUSED)
def test_other_manifests_are_refused(reader, tiny_bundle, tmp_path, fields, of_draft, said):
    copy = Path(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    data = json.loads((copy / "dsbd.json").read_text())
    data["draft"] |= of_draft
    (copy / "dsbd.json").write_text(json.dumps(data | fields))
    done = read(reader, copy)
    assert done.returncode == 2 and said in done.stderr
