"""Arrays that stay bound between engine calls: values, changing sizes, large arrays."""

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from dsbd_runtime.ort import host_binder
from dsbd_runtime.ort.host_binder import OrtBinder
from dsbd_runtime.parts.part import HeadOutput
from tests.ort_sessions import cpu_session

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
        self.values = OrtBinder(ort, self.binding, "an engine")

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


def test_sizes_that_come_and_go():
    engine = Engine()
    for seed, num_rows in enumerate([1, 4, 1, 0, 2, 4]):
        engine.check(num_rows, seed)


def test_a_call_of_the_same_size_binds_nothing():
    engine = Engine()
    engine.check(4, 1)
    num_bound = engine.binding.num_bound
    engine.check(4, 2)
    assert engine.binding.num_bound == num_bound == 5
    engine.check(5, 3)
    assert engine.binding.num_bound == num_bound + 4  # rows and weights in, both outputs


def test_results_are_the_caller_s():
    engine = Engine()
    first = engine.check(2, 1)
    kept = {name: array.copy() for name, array in first.items()}
    engine.check(2, 2)
    for name, array in first.items():
        np.testing.assert_array_equal(array, kept[name])


def test_large_arrays_are_bound_as_they_are():
    engine = Engine()
    num_rows = host_binder._MOST_BYTES // 12 + 1
    first = engine.check(num_rows, 1)
    second = engine.check(num_rows, 2)
    assert not np.shares_memory(first["doubled"], second["doubled"])
    engine.check(1, 3)


def test_other_sizes_than_are_kept(monkeypatch):
    monkeypatch.setattr(host_binder, "_MOST_KEPT", 7)
    engine = Engine()
    for seed in range(20):
        engine.check(1 + seed % 5, seed)


def test_a_binding_that_was_cleared():
    engine = Engine()
    engine.check(2, 1)
    engine.values.clear()
    assert engine.values.is_cleared
    engine.check(2, 2)
