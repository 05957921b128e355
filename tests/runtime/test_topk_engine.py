"""Engines with a top-k head: the candidates of the dense engine, and nothing larger."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dsbd_runtime.causal_lm import CausalLM
from dsbd_runtime.errors import BundleError
from dsbd_runtime.graph import TopLogits
from dsbd_runtime.ort_session import OrtSession
from tests.runtime.reference import ancestor_mask
from tests.runtime.tiny_graph import TinyModel, write_engine

NUM_CANDIDATES = 8
DENSE = TinyModel()
TOPK = replace(DENSE, logits=f"topk:{NUM_CANDIDATES}")


def open_model(folder: Path, model: TinyModel) -> CausalLM:
    path = folder / f"{model.logits.replace(':', '-')}-{model.dtype}.onnx"
    write_engine(model, path)
    return CausalLM(OrtSession(path, model.entry(), num_threads=1), model.entry())


def chain(num_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    rows = np.arange(num_rows)
    return rows % 256, rows, np.tri(num_rows, dtype=np.bool_)


def assert_candidates_of(found: TopLogits, logits: NDArray[np.float32]) -> None:
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :NUM_CANDIDATES]
    np.testing.assert_array_equal(found.top_ids, ids)
    np.testing.assert_array_equal(found.top_logits, np.take_along_axis(logits, ids, axis=1))
    sums = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(found.logsumexp, sums, rtol=0, atol=5e-6)
    assert (found.top_ids.dtype, found.top_logits.dtype) == (np.int64, np.float32)
    assert found.logsumexp.dtype == np.float32


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_candidates_are_the_largest_logits_of_the_dense_engine(tmp_path: Path, dtype: str) -> None:
    dense, topk = (open_model(tmp_path, replace(m, dtype=dtype)) for m in (DENSE, TOPK))
    parents = [-1, 0, 0, 2, 1]
    step = (np.array([5, 6, 7, 8, 9]), np.array([0, 1, 1, 2, 2]), ancestor_mask(parents))
    for logit_rows in ([0, 1, 2, 3, 4], [4, 1], [3]):
        dense.keep(np.arange(0))
        topk.keep(np.arange(0))
        rows = np.array(logit_rows)
        assert_candidates_of(topk.forward(*step, rows), dense.forward(*step, rows))
    assert (topk.num_top_logits, dense.num_top_logits) == (NUM_CANDIDATES, 0)


def test_no_asked_row_gives_no_candidates(tmp_path: Path) -> None:
    found = open_model(tmp_path, TOPK).forward(*chain(3), np.arange(0))
    assert found.top_ids.shape == found.top_logits.shape == (0, NUM_CANDIDATES)
    assert found.logsumexp.shape == (0,)


def test_a_long_step_runs_in_chunks(tmp_path: Path) -> None:
    dense, topk = open_model(tmp_path, DENSE), open_model(tmp_path, TOPK)
    rows = np.array([299, 3, 255, 256])
    assert_candidates_of(topk.forward(*chain(300), rows), dense.forward(*chain(300), rows))


def test_manifest_and_head_must_agree(tmp_path: Path) -> None:
    write_engine(TOPK, tmp_path / "topk.onnx")
    write_engine(DENSE, tmp_path / "dense.onnx")
    with pytest.raises(BundleError, match="lacks the output logits"):
        OrtSession(tmp_path / "topk.onnx", DENSE.entry())
    with pytest.raises(BundleError, match="lacks the output top_logits"):
        OrtSession(tmp_path / "dense.onnx", TOPK.entry())
    with pytest.raises(BundleError, match=r"top_logits of shape .*8.*, expected .*9"):
        OrtSession(tmp_path / "topk.onnx", replace(TOPK, logits="topk:9").entry())


def test_no_array_of_the_vocabularys_size_reaches_the_host(tmp_path: Path) -> None:
    large = replace(TOPK, vocab_size=50_000, num_layers=1, num_kv_heads=1, context_length=128)
    row_bytes = large.vocab_size * 4
    peak_by_kind = {}
    for model in (large, replace(large, logits="full")):
        with open_model(tmp_path, model) as opened:
            step = opened.forward
            tracemalloc.start()
            for _ in range(3):
                opened.keep(np.arange(0))
                step(*chain(4), np.arange(4))
            peak_by_kind[model.logits] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    assert peak_by_kind["topk:8"] < row_bytes / 2
    assert peak_by_kind["full"] > 4 * row_bytes  # the measure sees such arrays
