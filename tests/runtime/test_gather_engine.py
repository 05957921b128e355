"""Engines with a gather head: the logits of named tokens, bit for bit those of the dense engine."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dsbd_forward.forward import Forward
from dsbd_forward.logits import Gather, GatheredLogits
from dsbd_forward.spec import HeadSpec
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.ort.ort_session import OrtSession
from tests.runtime.model_calls import logits_of
from tests.runtime.reference import ancestor_mask
from tests.runtime.tiny_graph import TinyModel, write_engine

DENSE = TinyModel()
GATHER = replace(DENSE, logits="gather")
NONE = np.arange(0)


def open_model(folder: Path, model: TinyModel) -> CausalLM:
    path = folder / f"{model.logits}-{model.dtype}.onnx"
    write_engine(model, path)
    return CausalLM(
        OrtSession(path, model.entry(), settings=EngineSettings(num_threads=1)), model.entry()
    )


def chain(num_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    rows = np.arange(num_rows)
    return rows % 256, rows, np.tri(num_rows, dtype=np.bool_)


def assert_gathered(
    found: GatheredLogits,
    logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    ids: NDArray[np.int64],
) -> None:
    np.testing.assert_array_equal(found.values, logits[rows, ids])
    sums = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(found.logsumexp, sums, rtol=0, atol=5e-6)
    assert (found.values.dtype, found.logsumexp.dtype) == (np.float32, np.float32)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_ragged_lists_in_any_order(tmp_path: Path, dtype: str) -> None:
    dense, gather = (open_model(tmp_path, replace(m, dtype=dtype)) for m in (DENSE, GATHER))
    step = (np.array([5, 6, 7, 8, 9]), np.array([0, 1, 1, 2, 2]), ancestor_mask([-1, 0, 0, 2, 1]))
    asked = np.array([4, 1, 0])
    logits = logits_of(dense, *step, asked)
    for rows, ids in (
        ([0, 0, 0, 2], [0, 257, 9, 3]),  # nothing of row 1
        ([2, 0, 2, 1], [7, 7, 1, 7]),
        ([], []),
    ):
        gather.keep(NONE)
        pairs = Gather(np.array(rows, np.int64), np.array(ids, np.int64))
        assert_gathered(logits_of(gather, *step, asked, pairs), logits, *pairs)
    assert (gather.spec.head, dense.spec.head) == (HeadSpec(gathers_logits=True), HeadSpec())


def test_without_pairs_it_is_a_dense_engine(tmp_path: Path) -> None:
    dense, gather = open_model(tmp_path, DENSE), open_model(tmp_path, GATHER)
    for num_rows, asked in ((3, [2, 0, 0]), (300, [299, 3, 255, 256]), (4, [])):
        rows = np.array(asked, np.int64)
        for model in (dense, gather):
            model.keep(NONE)
        found = gather.forward(Forward(*chain(num_rows), rows)).logits
        np.testing.assert_array_equal(found.values, logits_of(dense, *chain(num_rows), rows))
        assert found.values.shape == (len(rows), DENSE.vocab_size)
        gather.keep(NONE)
        one = logits_of(gather, *chain(num_rows), rows, Gather(NONE, NONE))
        np.testing.assert_array_equal(found.logsumexp, one.logsumexp)  # a row has one sum


def test_no_logit_rows_give_nothing(tmp_path: Path) -> None:
    found = logits_of(open_model(tmp_path, GATHER), *chain(3), NONE, Gather(NONE, NONE))
    assert found.values.shape == found.logsumexp.shape == (0,)


def test_a_long_forward_runs_in_calls_of_its_own_pairs(tmp_path: Path) -> None:
    dense, gather = open_model(tmp_path, DENSE), open_model(tmp_path, GATHER)
    asked = np.array([299, 3, 255, 256, 17])
    pairs = Gather(np.array([4, 0, 1, 3, 2, 0, 1]), np.array([9, 8, 7, 6, 5, 4, 3]))
    logits = logits_of(dense, *chain(300), asked)
    assert_gathered(logits_of(gather, *chain(300), asked, pairs), logits, *pairs)


WRONG_PAIRS = [
    (Gather(np.array([2]), np.array([0])), r"gather_rows\[0\] is 2, expected 0 to 1"),
    (Gather(np.array([0]), np.array([-1])), r"gather_ids\[0\] is -1, expected 0 to 257"),
    (
        Gather(np.array([0, 1]), np.array([1])),
        r"gather_ids has shape \(1,\), expected \(2,\) as gather",
    ),
    (Gather(np.array([0]), np.array([1.0])), "gather_ids has shape .* type float64"),
]


@pytest.mark.parametrize(("pairs", "said"), WRONG_PAIRS)
def test_other_pairs_are_refused(tmp_path: Path, pairs: Gather, said: str) -> None:
    with pytest.raises(InputError, match=said):
        logits_of(open_model(tmp_path, GATHER), *chain(3), np.array([0, 1]), pairs)


def test_a_gather_needs_the_head(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no gather head; .* --logits gather"):
        logits_of(open_model(tmp_path, DENSE), *chain(3), np.array([0]), Gather(NONE, NONE))


def test_manifest_and_head_must_agree(tmp_path: Path) -> None:
    write_engine(GATHER, tmp_path / "gather.onnx")
    write_engine(DENSE, tmp_path / "dense.onnx")
    with pytest.raises(BundleError, match=r"has an input gather_rows that the manifest excludes"):
        OrtSession(tmp_path / "gather.onnx", DENSE.entry())
    with pytest.raises(BundleError, match="lacks the input gather_rows"):
        OrtSession(tmp_path / "dense.onnx", GATHER.entry())


def test_no_gather_takes_an_array_of_the_vocabularys_size(tmp_path: Path) -> None:
    large = replace(GATHER, vocab_size=50_000, num_layers=1, num_kv_heads=1, context_length=512)
    with open_model(tmp_path, large) as model:
        pairs = Gather(np.repeat(np.arange(8), 50), np.arange(400))
        for peak_limit in (None, large.vocab_size * 2):  # the first call takes the engine's buffer
            model.keep(NONE)
            tracemalloc.start()
            logits_of(model, *chain(8), np.arange(8), pairs)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak_limit is None or peak < peak_limit
