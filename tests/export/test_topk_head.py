"""The top-k head: what it puts on the graph, and that a wrong one is caught."""

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


def test_outputs_operators_manifest_and_report(exported_topk, exported):
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
        ids = np.argsort(-logits, axis=1, kind="stable")[:, :NUM_CANDIDATES]
        np.testing.assert_array_equal(found.top_ids, ids)
        wanted = np.take_along_axis(logits, ids, axis=1)
        np.testing.assert_allclose(found.top_logits, wanted, rtol=1e-6)
        sums = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
        np.testing.assert_allclose(found.logsumexp, sums, rtol=1e-6)
        np.testing.assert_allclose(full, logits, rtol=1e-6, atol=1e-6)
        best = np.take_along_axis(full, found.top_ids, axis=1)
        np.testing.assert_array_equal(best, found.top_logits)


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


LOGITS = np.random.default_rng(0).normal(size=(3, 300)).astype(np.float32) * 3


def best_rows(first=0):
    """Return the rows of a head from the ``first`` best token on."""
    ids = np.argsort(-LOGITS, axis=1)[:, first : first + NUM_CANDIDATES]
    sums = np.log(np.exp(LOGITS.astype(np.float64)).sum(axis=1)).astype(np.float32)
    return HeadRows(ids, np.take_along_axis(LOGITS, ids, axis=1), sums, LOGITS.copy())


def of_candidates(places):
    rows = best_rows()
    return replace(rows, top_ids=rows.top_ids[:, places], top_logits=rows.top_logits[:, places])


def changed(name, place, change):
    array = getattr(rows := best_rows(), name)
    array[place] = change(array[place])
    return rows


DAMAGE = [
    (of_candidates(slice(1, None)), r"shape \(3, 7\), expected \(3, 8\)"),
    (of_candidates(slice(None, None, -1)), "top_logits differs"),
    (best_rows(first=1), "top_logits differs"),
    (changed("top_ids", (2, 3), lambda token: (token + 1) % 300), "top_ids differs"),
    (changed("top_logits", (1, 5), lambda logit: logit + 1e-3), "top_logits differs by 0.001"),
    (changed("logsumexp", 0, lambda total: total + 1e-3), "logsumexp differs by 0.001"),
    (changed("logsumexp", 0, lambda _: np.nan), "logsumexp differs by nan"),
    (changed("logits", (2, 299), lambda logit: logit + 1e-3), "logits differs by 0.001"),
    (
        replace(best_rows(), logits=LOGITS[:2]),
        r"logits has shape \(2, 300\), expected \(3, 300\)",
    ),
]


@pytest.mark.parametrize(("rows", "words"), DAMAGE)
def test_a_wrong_head_is_named(rows, words):
    assert head_problem(best_rows(), LOGITS, NUM_CANDIDATES) is None
    problem = head_problem(rows, LOGITS, NUM_CANDIDATES)
    assert problem is not None and re.search(words, problem), problem


def test_a_token_named_twice_is_caught():
    logits = np.zeros((1, 10), np.float32)
    sums = np.log([10.0]).astype(np.float32)
    rows = HeadRows(np.array([[0, 0]]), np.zeros((1, 2), np.float32), sums, logits)
    assert head_problem(rows, logits, 2) == "top_ids names a token twice"
