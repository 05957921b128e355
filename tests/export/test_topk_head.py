"""The top-k head: what it puts on the graph, and that a wrong one is caught."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.parts.head import HeadRows, head_problem
from dsbd_export.pipeline import export_bundle
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.loading import load_causal_lm
from tests.export.conftest import export
from tests.runtime.model_calls import logits_of

NUM_CANDIDATES = 8


@pytest.fixture(scope="module")
def exported_topk(exported, captures, tmp_path_factory):
    output = tmp_path_factory.mktemp("topk") / "bundle"
    logits = f"topk:{NUM_CANDIDATES}"
    return export(replace(exported.config, output=output, logits=logits), captures)


def test_the_outputs_and_operators(exported_topk, exported):
    for role in ("target", "draft"):
        topk, dense = exported_topk.graph(role), exported.graph(role)
        shapes = {
            value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in topk.output[:3]
        }
        assert shapes == {"top_logits": ["R", 8], "top_ids": ["R", 8], "logsumexp": ["R"]}
        assert list(topk.output[3:]) == list(dense.output)  # logits and caches
        assert topk.input == dense.input
        assert not any(node.domain for node in topk.node)
        head = [node.op_type for node in topk.node[len(dense.node) :]]
        assert head == ["TopK", "Slice", "Slice", "LogSoftmax", "GatherElements", "Sub", "Squeeze"]


def test_manifest_and_report_name_the_head(exported_topk):
    manifest = open_bundle(exported_topk.config.output, verify=True).manifest
    for entry in (manifest.target, manifest.draft):
        assert (entry.logits, entry.full_logits) == ("topk:8", True)
    assert sum("top-k head" in line for line in exported_topk.report) == 2


def test_a_large_vocabulary_has_the_head_by_default(exported, captures, tmp_path, monkeypatch):
    monkeypatch.setattr("dsbd_export.config.LARGE_VOCABULARY", 300)
    config = replace(exported.config, output=tmp_path / "bundle")
    assert config.logits == "auto"
    manifest = export(config, captures).result.manifest
    assert (manifest.target.logits, manifest.draft.logits) == ("topk:64", "topk:64")


def test_candidates_are_those_of_the_dense_export(exported_topk, exported):
    step = (np.array([5, 6, 7]), np.arange(3), np.tri(3, dtype=np.bool_), np.array([2, 0]))
    for role in ("target", "draft"):
        with load_causal_lm(open_bundle(exported.config.output), role) as dense:
            logits = logits_of(dense, *step)
        with load_causal_lm(open_bundle(exported_topk.config.output), role) as topk:
            found = logits_of(topk, *step)
            full = found.full.read(np.arange(2))
        assert_candidates_of(found, logits)
        np.testing.assert_allclose(full, logits, rtol=1e-6, atol=1e-6)
        best = np.take_along_axis(full, found.top_ids, axis=1)
        np.testing.assert_array_equal(best, found.top_logits)


def assert_candidates_of(found, logits):
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :NUM_CANDIDATES]
    np.testing.assert_array_equal(found.top_ids, ids)
    np.testing.assert_allclose(found.top_logits, np.take_along_axis(logits, ids, 1), rtol=1e-6)
    sums = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(found.logsumexp, sums, rtol=1e-6)


PRECISIONS = [{"dtype": "fp16"}, {"dtype": "bf16"}, {"quantize": "int8-dynamic"}]


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda p: "-".join(p.values()))
def test_the_head_on_other_precisions_passes_its_gate(small_llama_folder, tmp_path, precision):
    folder = str(small_llama_folder)
    config = ExportConfig(
        target=folder, draft=folder, output=tmp_path / "b", logits="topk:300", **precision
    )
    manifest = export_bundle(config, report=lambda _: None).manifest
    assert (manifest.target.logits, manifest.draft.logits) == ("topk:300", "topk:300")


def test_more_candidates_than_tokens_are_refused_before_anything_is_written(exported, tmp_path):
    config = replace(exported.config, output=tmp_path / "bundle", logits="topk:301")
    with pytest.raises(ExportError, match=r"'topk:301' names more .* tokens, 300; use topk:300"):
        export_bundle(config, report=lambda _: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["topk", "topk:0", "topk:-3", "topk:x", "TOPK:4", "none", ""])
def test_other_kinds_are_refused(tmp_path, kind):
    words = rf"logits='{kind}' is no kind .*use auto, full, or topk:K"
    with pytest.raises(ExportError, match=words):
        ExportConfig(target="t", draft="d", output=tmp_path, logits=kind)


LOGITS = np.random.default_rng(0).normal(size=(3, 300)).astype(np.float32) * 3


def right_rows():
    ids = np.argsort(-LOGITS, axis=1)[:, :NUM_CANDIDATES]
    sums = np.log(np.exp(LOGITS.astype(np.float64)).sum(axis=1)).astype(np.float32)
    return HeadRows(ids, np.take_along_axis(LOGITS, ids, axis=1), sums, LOGITS.copy())


def test_right_rows_pass():
    assert head_problem(right_rows(), LOGITS, NUM_CANDIDATES) is None


def damaged(rows, place):
    if place == "width":
        return replace(rows, top_ids=rows.top_ids[:, 1:], top_logits=rows.top_logits[:, 1:])
    if place == "order":
        return replace(rows, top_ids=rows.top_ids[:, ::-1], top_logits=rows.top_logits[:, ::-1])
    if place == "next best":
        ids = np.argsort(-LOGITS, axis=1)[:, 1 : NUM_CANDIDATES + 1]
        top_logits = np.take_along_axis(LOGITS, ids, axis=1)
        return replace(rows, top_ids=ids, top_logits=top_logits)
    if place == "rows of logits":
        return replace(rows, logits=rows.logits[:2])
    if place == "id":
        rows.top_ids[2, 3] = (rows.top_ids[2, 3] + 1) % 300
    if place == "logit":
        rows.top_logits[1, 5] += 1e-3
    if place == "sum":
        rows.logsumexp[0] += 1e-3
    if place == "NaN":
        rows.logsumexp[0] = np.nan
    if place == "full logit":
        rows.logits[2, 299] += 1e-3
    return rows


DAMAGE = [
    ("width", r"shape \(3, 7\), expected \(3, 8\)"),
    ("order", "top_logits differs"),
    ("next best", "top_logits differs"),
    ("id", "top_ids differs"),
    ("logit", "top_logits differs by 0.001"),
    ("sum", "logsumexp differs by 0.001"),
    ("NaN", "logsumexp differs by nan"),
    ("full logit", "logits differs by 0.001"),
    ("rows of logits", r"logits has shape \(2, 300\), expected \(3, 300\)"),
]


@pytest.mark.parametrize(("place", "words"), DAMAGE)
def test_a_wrong_head_is_named(place, words):
    problem = head_problem(damaged(right_rows(), place), LOGITS, NUM_CANDIDATES)
    assert problem is not None
    assert re.search(words, problem), problem


def test_a_token_named_twice_is_caught():
    logits = np.zeros((1, 10), np.float32)
    sums = np.log([10.0]).astype(np.float32)
    rows = HeadRows(np.array([[0, 0]]), np.zeros((1, 2), np.float32), sums, logits)
    assert head_problem(rows, logits, 2) == "top_ids names a token twice"
