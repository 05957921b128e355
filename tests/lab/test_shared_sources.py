"""The calls that are timed of sources together and apart, and the table of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.loading import load_causal_lm
from lab.shared_sources import Setting, SourceCalls
from tests.lab.lab_run import lab_run
from tests.runtime.tiny_graph import write_tiny_bundle


@pytest.fixture(scope="session")
def bundle(source_pair) -> Path:
    return source_pair / "bundle"


def test_both_ways_compute_the_same_rows_and_drop_them(bundle):
    with load_causal_lm(
        open_bundle(bundle), "target", settings=EngineSettings(num_threads=1)
    ) as model:
        found = {}
        for way in ("together", "apart"):
            calls = SourceCalls(model, Setting((40, 7, 9), rows=3, behind=5), 300)
            results = []
            own = model.forward

            def kept(forward, own=own, results=results):
                result = own(forward)
                results.append(result.logits.values)
                return result

            model.forward = kept
            getattr(calls, way)()
            del model.forward
            assert model.num_rows == 15
            found[way] = results
    assert [len(rows) for rows in found["together"]] == [9]
    assert [len(rows) for rows in found["apart"]] == [3, 3, 3]
    assert np.allclose(found["together"][0], np.concatenate(found["apart"]), atol=1e-5)


def test_the_table(bundle, tmp_path):
    document = tmp_path / "page.md"
    document.write_text("<!-- shared-sources -->\n<!-- end of shared-sources -->\n")
    options = ["--rounds", 1, "--threads", 1, "--rows", 2, "--wait", 0, "--document", document]
    done = lab_run("shared-sources", bundle, *options)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in document.read_text().splitlines() if line[:2] == "| "]
    assert [row[0] for row in rows[1:]] == ["| 24"] * 4 + ["| 256"] * 4 + ["| 256 and 24"]
    assert [row[1] for row in rows[1:]] == ["1", "2", "4", "8"] * 2 + ["8"]
    write_tiny_bundle(tmp_path / "decoder")
    refused = lab_run("shared-sources", tmp_path / "decoder", *options)
    assert refused.returncode == 2
    assert "is no encoder-decoder's" in refused.stderr
