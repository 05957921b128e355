"""Arrays of calls: packed and padded for a device, bound between calls on the host."""

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from dsbd_runtime.device.bound_calls import fill_mask, fill_move, fill_padded, move_parts
from dsbd_runtime.device.cuda_device import PackedBuffer, packed_bytes
from dsbd_runtime.parts import host_binder
from dsbd_runtime.parts.attention.attention_rows import (
    ATTENTION_MASK,
    INPUT_IDS,
    SRC_ROWS,
    WRITE_INDICES,
)
from dsbd_runtime.parts.device_binder import forward_bucket, padded_rows, row_bucket
from dsbd_runtime.parts.head.head import LOGIT_ROWS
from dsbd_runtime.parts.host_binder import HeadOutput, HostBinder
from tests.ort_sessions import cpu_session
from tests.runtime.fake_device import FakeDevice


def staged(parts):
    """Return arrays for these parts, full of what an earlier call left."""
    arrays = PackedBuffer(FakeDevice(), packed_bytes(parts)).lay_out(parts)
    for array in arrays.on_host.values():
        array[...] = 99
    return arrays


BUCKETS = [  # (function, limit, rounded size by number of rows)
    (row_bucket, 256, {0: 1, 1: 1, 2: 2, 3: 4, 4: 4, 33: 64, 200: 256, 256: 256}),
    (row_bucket, 6, {5: 6}),
    (row_bucket, 3, {3: 3}),
    (forward_bucket, 512, {0: 1, 3: 4, 9: 16, 17: 24, 25: 32, 33: 40, 41: 48, 49: 64, 65: 96}),
    (forward_bucket, 512, {257: 512}),
    (forward_bucket, 6, {5: 6}),
    (forward_bucket, 3, {3: 3}),
    (padded_rows, 256, {0: 0, 1: 1, 3: 4, 256: 256, 257: 257, 300: 304, 600: 608}),
]


@pytest.mark.parametrize(("rounded", "limit", "sizes"), BUCKETS)
def test_rows_are_rounded_up_least_where_verifications_lie(rounded, limit, sizes):
    assert {number: rounded(number, limit) for number in sizes} == sizes


def test_padding_rows_see_themselves_and_the_first_row_and_nobody_sees_them():
    mask = np.array([[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 0, 1, 0, 0, 0, 0]], np.bool_)
    target = np.full((1, 1, 4, 8), True)
    fill_mask(target, mask[None, None], 2)
    padding = [[1, 0, 0, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 1, 0, 0]]
    assert target[0, 0].tolist() == [*mask.tolist(), *np.array(padding, bool).tolist()]


@pytest.mark.parametrize(
    ("array", "shape", "filled"),
    [
        (np.array([[7, 8]]), (1, 4), [[7, 8, -1, -1]]),
        (np.array([1, 0, 1]), (4,), [1, 0, 1, -1]),
        (np.array([2]), (1,), [2]),
        (np.zeros(0, np.int64), (2,), [-1, -1]),
    ],
)
def test_padding_follows_the_numbers_of_a_call(array, shape, filled):
    target = np.full(shape, 99)
    fill_padded(target, array, -1)
    assert target.tolist() == filled


def test_the_padding_of_a_move_copies_a_row_that_moves_anyway():
    arrays = staged(move_parts(4))
    fill_move(arrays, np.array([5, 7, 8]), 2)
    assert arrays.on_host[SRC_ROWS].tolist() == [5, 7, 8, 8]
    assert arrays.on_host[WRITE_INDICES].tolist() == [2]


def test_parts_are_aligned_and_the_same_on_both_sides():
    device = FakeDevice()
    parts = [
        (WRITE_INDICES, (1,), "int64"),
        (INPUT_IDS, (1, 3), "int64"),
        (ATTENTION_MASK, (1, 1, 3, 10), "bool"),
        (LOGIT_ROWS, (2,), "int64"),
    ]
    buffer = PackedBuffer(device, packed_bytes(parts))
    arrays = buffer.lay_out(parts)
    first = arrays.on_device[WRITE_INDICES].memory
    for value, (name, shape, _) in enumerate(parts):
        assert (arrays.on_device[name].memory - first) % 256 == 0
        assert arrays.on_host[name].shape == arrays.on_device[name].shape == shape
        arrays.on_host[name][...] = value % 2
    buffer.upload(arrays.num_bytes)
    device.synchronize()
    for name, host in arrays.on_host.items():
        found = device.memory_of(arrays.on_device[name])
        assert found.tobytes() == host.tobytes()


def test_without_pinned_memory_nothing_is_taken():
    class NoPinned(FakeDevice):
        def allocate_pinned(self, num_bytes):
            raise MemoryError

    device = NoPinned()
    with pytest.raises(MemoryError):
        PackedBuffer(device, 100)
    assert not device.live


HEAD = (HeadOutput("doubled", np.float32, (3,)), HeadOutput("total", np.float32, ()))


class CountingBinding:
    """The binding of an engine, and how often something was bound."""

    def __init__(self, binding):
        self.binding = binding
        self.num_bound = 0

    def bind_ortvalue_input(self, name, value):
        self.num_bound += 1
        self.binding.bind_ortvalue_input(name, value)

    def clear_binding_inputs(self):
        self.binding.clear_binding_inputs()

    def clear_binding_outputs(self):
        self.binding.clear_binding_outputs()

    def bind_ortvalue_output(self, name, value):
        self.num_bound += 1
        self.binding.bind_ortvalue_output(name, value)


class Engine:
    """rows (R, 3) float32 -> twice the rows; weights (N,) and index (1,) int64 -> their sum."""

    def __init__(self):
        tensor = helper.make_tensor_value_info
        graph = helper.make_graph(
            [
                helper.make_node("Add", ["rows", "rows"], ["doubled"]),
                helper.make_node("Cast", ["index"], ["number"], to=TensorProto.FLOAT),
                helper.make_node("Add", ["weights", "number"], ["total"]),
            ],
            "graph",
            [
                tensor("rows", TensorProto.FLOAT, ["R", 3]),
                tensor("weights", TensorProto.FLOAT, ["R"]),
                tensor("index", TensorProto.INT64, [1]),
            ],
            [
                tensor("doubled", TensorProto.FLOAT, ["R", 3]),
                tensor("total", TensorProto.FLOAT, ["R"]),
            ],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
        model.ir_version = 10
        self.session = cpu_session(model)
        self.binding = CountingBinding(self.session.io_binding())
        self.values = HostBinder(ort, self.binding, "an engine")

    def run_with_iobinding(self, binding, options):
        self.session.run_with_iobinding(binding.binding, options)

    def check(self, num_rows, seed):
        """Make a call and compare what it returns."""
        rng = np.random.default_rng(seed)
        rows = rng.normal(size=(3, num_rows)).astype(np.float32).T  # not contiguous
        weights, index = rng.normal(size=num_rows).astype(np.float32), np.array([seed])
        self.values.write({"rows": rows, "weights": weights, "index": index})
        self.values.returns(HEAD, num_rows)
        found = self.values.run(self)
        np.testing.assert_array_equal(found["doubled"], rows + rows)
        np.testing.assert_array_equal(found["total"], weights + np.float32(seed))
        return found


def test_sizes_that_come_and_go(monkeypatch):
    engine = Engine()
    for seed, num_rows in enumerate([1, 4, 1, 0, 2, 4]):
        engine.check(num_rows, seed)
    engine.values.clear()
    assert engine.values.is_cleared
    monkeypatch.setattr(host_binder, "_MOST_KEPT", 7)  # more sizes than are kept
    engine = Engine()
    for seed in range(20):
        engine.check(1 + seed % 5, seed)
        assert len(engine.values._kept) <= 7


def test_a_call_of_the_same_size_binds_nothing():
    engine = Engine()
    engine.check(4, 1)
    num_bound = engine.binding.num_bound
    engine.check(4, 2)
    assert engine.binding.num_bound == num_bound == 5
    engine.check(5, 3)
    assert engine.binding.num_bound == num_bound + 4  # rows and weights in, both outputs


def test_large_arrays_are_bound_as_they_are():
    engine = Engine()
    num_rows = host_binder._MOST_BYTES // 12 + 1
    first = engine.check(num_rows, 1)
    second = engine.check(num_rows, 2)
    assert not np.shares_memory(first["doubled"], second["doubled"])
    engine.check(1, 3)
