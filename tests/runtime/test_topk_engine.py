"""Engines with a top-k head: the candidates of the dense engine, and full logits when read."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.ort.ort_session import OrtSession
from dsbd_runtime.parts.head.full_logits import HostLogits
from dsbd_runtime.parts.head.head import full_output
from tests.runtime.model_calls import ancestor_mask, chain, logits_of, opened_in
from tests.runtime.tiny_graph import TinyModel, write_engine

NUM_CANDIDATES = 8
DENSE = TinyModel()
TOPK = replace(DENSE, logits=f"topk:{NUM_CANDIDATES}")
WITHOUT_FULL = replace(TOPK, full_logits=False)


def assert_candidates_of(found, logits):
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :NUM_CANDIDATES]
    np.testing.assert_array_equal(found.top_ids, ids)
    np.testing.assert_array_equal(found.top_logits, np.take_along_axis(logits, ids, axis=1))
    sums = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(found.logsumexp, sums, rtol=0, atol=5e-6)
    assert (found.top_ids.dtype, found.top_logits.dtype) == (np.int64, np.float32)
    assert found.logsumexp.dtype == np.float32


def test_manifest_and_head_must_agree(tmp_path):
    write_engine(TOPK, tmp_path / "topk.onnx")
    write_engine(DENSE, tmp_path / "dense.onnx")
    write_engine(WITHOUT_FULL, tmp_path / "without.onnx")
    with pytest.raises(BundleError, match="has an output top_logits that the manifest excludes"):
        OrtSession(tmp_path / "topk.onnx", DENSE.entry())
    with pytest.raises(BundleError, match="has an output logits that the manifest excludes"):
        OrtSession(tmp_path / "topk.onnx", WITHOUT_FULL.entry())
    with pytest.raises(BundleError, match="lacks the output logits"):
        OrtSession(tmp_path / "without.onnx", TOPK.entry())
    with pytest.raises(BundleError, match="lacks the output top_logits"):
        OrtSession(tmp_path / "dense.onnx", TOPK.entry())
    with pytest.raises(BundleError, match=r"top_logits of shape .*8.*, expected .*9"):
        OrtSession(tmp_path / "topk.onnx", replace(TOPK, logits="topk:9").entry())


LARGE = replace(TOPK, vocab_size=50_000, num_layers=1, num_kv_heads=1, context_length=512)
LARGE_ROW_BYTES = LARGE.vocab_size * 4


def traced_peak(model, num_rows):
    """Return the most bytes that Python and numpy took in forwards of so many logit rows."""
    tracemalloc.start()
    for _ in range(3):
        model.keep(np.arange(0))
        logits_of(model, *chain(num_rows), np.arange(num_rows))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_no_forward_takes_an_array_of_the_vocabularys_size(tmp_path):
    with opened_in(tmp_path, replace(LARGE, logits="full")) as dense:
        assert traced_peak(dense, 4) > 4 * LARGE_ROW_BYTES  # the measure sees such arrays
    with opened_in(tmp_path, replace(LARGE, full_logits=False)) as without:
        assert traced_peak(without, 4) < LARGE_ROW_BYTES / 2
    with opened_in(tmp_path, LARGE) as topk:
        traced_peak(topk, 5)
        for num_rows in (5, 1, 8, 4):  # the buffer of five has room for eight
            assert traced_peak(topk, num_rows) < LARGE_ROW_BYTES / 2


def test_the_buffer_of_full_logits_is_that_of_the_largest_call(tmp_path):
    with opened_in(tmp_path, LARGE) as topk:
        tracemalloc.start()
        for num_rows, num_held in ((3, 4), (20, 32), (2, 32), (300, 512), (30, 512)):
            topk.keep(np.arange(0))
            logits_of(topk, *chain(num_rows), np.arange(num_rows))
            held = tracemalloc.get_traced_memory()[0] / LARGE_ROW_BYTES
            assert num_held <= held < num_held + 2
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_candidates_and_full_logits_are_those_of_the_dense_engine(tmp_path, dtype):
    dense, topk = (opened_in(tmp_path, replace(m, dtype=dtype)) for m in (DENSE, TOPK))
    assert (topk.spec.head.num_top_logits, dense.spec.head.num_top_logits) == (NUM_CANDIDATES, 0)
    step = (np.array([5, 6, 7, 8, 9]), np.array([0, 1, 1, 2, 2]), ancestor_mask([-1, 0, 0, 2, 1]))
    for logit_rows in ([0, 1, 2, 3, 4], [3], [4, 1, 1, 0]):  # the buffer has room for eight
        for model in (dense, topk):
            model.keep(np.arange(0))
        asked = np.array(logit_rows)
        logits, found = logits_of(dense, *step, asked), logits_of(topk, *step, asked)
        assert_candidates_of(found, logits)
        last = len(asked) - 1
        for rows in (range(last + 1), [last, 0], [last], [0, 0, last, 0], []):
            full = found.full.read(np.array(rows, np.int64))
            assert full.dtype == np.float32 and full.shape == (len(rows), DENSE.vocab_size)
            np.testing.assert_array_equal(full, logits[rows])
            full[:] = 0  # the caller's own


def test_all_calls_of_a_forward_can_be_read(tmp_path):
    dense, topk = opened_in(tmp_path, DENSE), opened_in(tmp_path, TOPK)
    asked_rows = [[299, 3, 255, 256, 280], [256, 257], [599, 255], [], [3, 255], range(600), [9]]
    for logit_rows in asked_rows:  # in three calls; the second begins with row 256
        dense.keep(np.arange(0))
        topk.keep(np.arange(0))
        asked = np.array(logit_rows, np.int64)
        logits = logits_of(dense, *chain(600), asked)
        found = logits_of(topk, *chain(600), asked)
        assert_candidates_of(found, logits)
        rows = np.arange(len(asked))[::-1]
        np.testing.assert_array_equal(found.full.read(rows), logits[rows])
        tokens = rows % DENSE.vocab_size
        np.testing.assert_array_equal(found.full.read_tokens(rows, tokens), logits[rows, tokens])


WRONG_ROWS = [
    (np.array([0, 3]), r"rows\[1\] is 3, expected 0 to 2"),
    (np.array([-1]), r"rows\[0\] is -1, expected 0 to 2"),
    (np.array([[0]]), r"rows has shape \(1, 1\) and type int64, expected .* 1 dimensions, int64"),
    (np.array([0.0]), "type float64"),
]


@pytest.mark.parametrize(("rows", "said"), WRONG_ROWS)
def test_other_rows_are_refused(tmp_path, rows, said):
    full = logits_of(opened_in(tmp_path, TOPK), *chain(3), np.arange(3)).full
    with pytest.raises(InputError, match=said):
        full.read(rows)


def test_full_logits_end_with_the_next_forward_and_not_before(tmp_path):
    model = opened_in(tmp_path, TOPK)
    first = logits_of(model, *chain(200), np.array([199])).full
    wanted = first.read(np.array([0]))
    model.keep(np.arange(10, 20))
    model.shrink()
    with pytest.raises(InputError):
        logits_of(model, *chain(3), np.array([5]))  # refused: no forward
    model.keep(np.arange(0))
    np.testing.assert_array_equal(first.read(np.array([0])), wanted)
    second = logits_of(model, *chain(3), np.array([2])).full
    with pytest.raises(InputError, match="read after the model's next forward or its end"):
        first.read(np.array([0]))
    second.read(np.array([0]))
    model.close()
    with pytest.raises(InputError, match="read after the model's next forward or its end"):
        second.read(np.array([0]))


def test_an_engine_without_the_output_has_no_full_logits(tmp_path):
    asked = np.array([2, 0])
    wanted = logits_of(opened_in(tmp_path, TOPK), *chain(3), asked)
    found = logits_of(opened_in(tmp_path, WITHOUT_FULL), *chain(3), asked)
    assert found.full is None
    for name in ("top_ids", "top_logits", "logsumexp"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))


class ValueBinder:
    """Values are the arrays themselves: ``made`` has all."""

    def __init__(self):
        self.made = []

    def value_on(self, array):
        self.made.append(array)
        return array

    def write_value(self, name, value):
        pass


def test_calls_of_sizes_that_come_again_have_one_value_each():
    binder, logits = ValueBinder(), HostLogits(full_output(3))
    for num_rows in (4, 1, 4, 1, 4, 2):
        logits.bind(binder, 0, num_rows)
    assert [len(array) for array in binder.made] == [4, 1, 2]
