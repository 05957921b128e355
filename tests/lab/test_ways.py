"""Logits of one path computed in many ways: what is counted, and that a count goes on."""

from __future__ import annotations

import json

import numpy as np

from dsbd_runtime.bundle_files.bundle import open_bundle
from scripts.path_ways import Way, WayCount, count_differing
from tests.lab.lab_run import RESULTS, lab_run
from tests.runtime.tiny_graph import write_tiny_bundle


class OneThreadDiffers:
    """An engine whose ways with one thread, but the plain one, have other bits in two places."""

    vocab_size = 7

    def __init__(self):
        self.ways = []

    def logits(self, token_ids, way, rng):
        found = np.repeat(token_ids[:, None], self.vocab_size, axis=1).astype(np.float32)
        if self.ways and way.threads == 1:
            found[-1, :2] = np.nextafter(found[-1, :2], np.float32(np.inf))
        self.ways.append(way)
        return found


def test_ways_and_logits_are_counted():
    engine = OneThreadDiffers()
    found = count_differing(engine, num_tokens=20, num_ways=10, seed=3)
    plain, *ways = engine.ways
    assert plain == Way.plain(20)
    num_other = sum(way.threads == 1 for way in ways)
    assert 0 < num_other < 10
    assert found == WayCount(10, num_other, 10 * 20 * 7, 2 * num_other)
    assert found + WayCount(1, 0, 5, 0) == WayCount(11, num_other, 1405, 2 * num_other)


def measured(bundle, record, document, elements):
    options = ["--elements", elements, "--record", record, "--document", document]
    done = lab_run("invariance", "logits", bundle, *options)
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(record.read_text()).values()
    return entry, done.stdout


def test_a_count_goes_on_where_it_ended(tmp_path):
    """Fused attention in fp32: some ways differ, by bits."""
    assert "<!-- flips -->" in (RESULTS / "invariance.md").read_text()
    write_tiny_bundle(tmp_path / "bundle")
    vocab_size = open_bundle(tmp_path / "bundle").entry("target").vocab_size
    document = tmp_path / "page.md"
    document.write_text("<!-- flips -->\n<!-- end of flips -->")
    a_path = 12 * 150 * vocab_size
    first, _ = measured(tmp_path / "bundle", tmp_path / "record.json", document, 1)
    assert (first["num_paths"], first["count"]["num_logits"]) == (1, a_path)
    second, text = measured(tmp_path / "bundle", tmp_path / "record.json", document, a_path + 1)
    assert (second["num_paths"], second["count"]["num_ways"]) == (2, 24)
    assert second["count"]["num_other_ways"] > first["count"]["num_other_ways"] > 0
    share = second["count"]["num_other_logits"] / (2 * a_path)
    assert f"| {2 * a_path:,} | {second['count']['num_other_logits']:,} | {share:.1e} |" in text
    assert text.strip() in document.read_text()
