"""The gather head: what it puts on the graph, and that a wrong one is caught."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.opening import open_checkpoint
from dsbd_export.parts.gather_head import GatheredRows, gather_problem
from dsbd_export.pipeline import export_model
from dsbd_forward.logits import Gather
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.loading import load_causal_lm
from dsbd_runtime.parts.cache_entries import most_new_rows
from scripts.family_checkpoints import write_family_checkpoint
from tests.export.conftest import export
from tests.runtime.model_calls import logits_of


@pytest.fixture(scope="module")
def exported_gather(exported, captures, tmp_path_factory):
    output = tmp_path_factory.mktemp("gather") / "bundle"
    return export(replace(exported.config, output=output, logits="gather"), captures)


def test_the_tensors_and_operators(exported_gather, exported):
    for role in ("target", "draft"):
        gather, dense = exported_gather.graph(role), exported.graph(role)
        shapes = {
            value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in (*gather.output[:2], *gather.input)
        }
        assert (shapes["gathered_logits"], shapes["logsumexp"]) == (["N"], ["R"])
        assert (shapes["gather_rows"], shapes["gather_ids"]) == (["N"], ["N"])
        assert list(gather.output[2:]) == list(dense.output)  # logits and caches
        old = [value for value in gather.input if not value.name.startswith("gather_")]
        assert old == list(dense.input)
        head = [node.op_type for node in gather.node[len(dense.node) :]]
        sums = ["TopK", "LogSoftmax", "GatherElements", "Sub", "Squeeze"]
        assert head == [*sums, "Unsqueeze", "Unsqueeze", "Concat", "GatherND"]
        assert not any(node.domain for node in gather.node)


def test_manifest_and_report_name_the_head(exported_gather):
    manifest = open_bundle(exported_gather.config.output, verify=True).manifest
    for entry in (manifest.target, manifest.draft):
        assert (entry.logits, entry.full_logits) == ("gather", True)
    assert manifest.schema_version == 4
    assert sum("gather head" in line for line in exported_gather.report) == 2


def test_logits_are_those_of_the_dense_export(exported_gather, exported):
    step = (np.array([5, 6, 7]), np.arange(3), np.tri(3, dtype=np.bool_), np.array([2, 0]))
    pairs = Gather(np.array([0, 1, 1]), np.array([3, 299, 0]))
    for role in ("target", "draft"):
        with load_causal_lm(open_bundle(exported.config.output), role) as dense:
            logits = logits_of(dense, *step)
        with load_causal_lm(open_bundle(exported_gather.config.output), role) as gather:
            found = logits_of(gather, *step, pairs)
            gather.keep(np.arange(0))
            np.testing.assert_allclose(logits_of(gather, *step), logits, rtol=1e-6, atol=1e-6)
        wanted = logits[pairs.rows, pairs.token_ids]
        np.testing.assert_allclose(found.values, wanted, rtol=1e-6, atol=1e-6)
        sums = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
        np.testing.assert_allclose(found.logsumexp, sums, rtol=1e-6)


def test_a_tensorrt_engine_is_refused(tmp_path):
    with pytest.raises(ExportError, match="'gather' has no form for engine='tensorrt-rtx'"):
        ExportConfig(
            target="t", output=tmp_path, logits="gather", engine="tensorrt-rtx", dtype="fp16"
        )


LOGITS = np.random.default_rng(0).normal(size=(3, 300)).astype(np.float32) * 3
GATHER = Gather(np.array([2, 0, 1, 0]), np.array([5, 299, 0, 7]))


def right():
    sums = np.log(np.exp(LOGITS.astype(np.float64)).sum(axis=1)).astype(np.float32)
    return GatheredRows(LOGITS[GATHER.rows, GATHER.token_ids], sums, LOGITS.copy())


def test_right_rows_pass():
    assert gather_problem(right(), LOGITS, GATHER) is None


WRONG = [
    ({"gathered_logits": LOGITS[[2, 0, 1, 0], [5, 298, 0, 7]]}, "gathered_logits differs by"),
    ({"gathered_logits": LOGITS[0, :3]}, r"gathered_logits has shape \(3,\), expected \(4,\)"),
    ({"gathered_logits": np.full(4, np.nan, np.float32)}, "gathered_logits differs by nan"),
    ({"logsumexp": np.zeros(3, np.float32)}, "logsumexp differs by"),
    ({"logits": LOGITS + 0.01}, "logits differs by"),
]


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_a_wrong_head_is_named(change, said):
    assert re.match(said, gather_problem(replace(right(), **change), LOGITS, GATHER))


def test_pairs_of_more_rows_than_a_call_takes(captures, tmp_path):
    """The gate compares each pair, of texts that a recurrent engine takes in several calls."""
    options = ExportConfig(target="", draft="", output=tmp_path, logits="gather")
    folder = write_family_checkpoint("granite_hybrid", tmp_path / "checkpoint")
    checkpoint = open_checkpoint("target", folder, options)
    entry = export_model(checkpoint, tmp_path, options, lambda _: None, captures)
    assert entry.logits == "gather"
    assert most_new_rows(entry.caches, 2**31) < max(
        case.prompt_length for case in entry.parity.cases
    )
