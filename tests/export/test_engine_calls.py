"""How the exported graphs behave at run time: shapes at their limits, and updates in place."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from dsbd_runtime.ort.ort_module import LOG_WARNINGS
from tests.ort_sessions import cpu_session

CAPACITY = 16
NOT_IN_PLACE = "in-place optimization not activated"


def new_caches():
    rng = np.random.default_rng(0)
    return {
        f"{layer}.{part}": rng.standard_normal((1, 2, CAPACITY, 12), dtype=np.float32)
        for layer in range(2)
        for part in ("key", "value")
    }


def session_of(exported, file):
    path = exported.config.output / "target" / file
    return cpu_session(path, log_severity=LOG_WARNINGS)


def run(session, inputs, caches, *, in_place):
    """Run with every output bound, the caches' to their own memory if ``in_place``."""
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_cpu_input(name, array)
    if "logits" in {output.name for output in session.get_outputs()}:
        binding.bind_output("logits")
    for name, cache in caches.items():
        value = ort.OrtValue.ortvalue_from_numpy(cache)
        binding.bind_ortvalue_input(f"past_key_values.{name}", value)
        if in_place:
            binding.bind_ortvalue_output(f"present.{name}", value)
        else:
            binding.bind_output(f"present.{name}")
    session.run_with_iobinding(binding)
    return [output.numpy() for output in binding.get_outputs()]


def step_inputs(num_nodes, logit_rows, first_row=0):
    mask = np.zeros((1, 1, num_nodes, CAPACITY), np.bool_)
    mask[0, 0, :, : first_row + num_nodes] = np.tri(num_nodes, first_row + num_nodes, first_row)
    positions = np.arange(first_row, first_row + num_nodes)
    return {
        "input_ids": positions[None] + 5,
        "position_ids": positions[None],
        "attention_mask": mask,
        "write_indices": np.array([first_row]),
        "logit_rows": np.array(logit_rows, np.int64),
    }


@pytest.mark.parametrize("num_nodes", [1, 2, CAPACITY])
@pytest.mark.parametrize("num_rows", [0, 1])
def test_calls_with_no_logit_rows_and_with_one_node(exported, num_nodes, num_rows):
    inputs = step_inputs(num_nodes, [num_nodes - 1] * num_rows)
    caches = new_caches()
    before = {name: cache.copy() for name, cache in caches.items()}
    logits = run(session_of(exported, "model.onnx"), inputs, caches, in_place=True)[0]
    assert logits.shape == (num_rows, 300) and logits.dtype == np.float32
    assert all(
        (caches[name][:, :, :num_nodes] != before[name][:, :, :num_nodes]).all() for name in caches
    )
    assert all(
        (caches[name][:, :, num_nodes:] == before[name][:, :, num_nodes:]).all() for name in caches
    )


def test_logit_rows_choose_and_order_the_rows(exported):
    session = session_of(exported, "model.onnx")
    every = run(session, step_inputs(4, [0, 1, 2, 3]), new_caches(), in_place=True)[0]
    some = run(session, step_inputs(4, [3, 1, 1]), new_caches(), in_place=True)[0]
    np.testing.assert_allclose(some, every[[3, 1, 1]], atol=1e-5)


def test_the_prune_graph_moves_rows(exported):
    caches = new_caches()
    before = {name: cache.copy() for name, cache in caches.items()}
    inputs = {"src_rows": np.array([9, 3, 12, 4]), "write_indices": np.array([3])}
    run(session_of(exported, "prune.onnx"), inputs, caches, in_place=True)
    for name, cache in caches.items():
        wanted = before[name].copy()
        wanted[:, :, 3:7] = before[name][:, :, [9, 3, 12, 4]]
        np.testing.assert_array_equal(cache, wanted)


PRUNE_INPUTS = {"src_rows": np.array([9, 3]), "write_indices": np.array([3])}


@pytest.mark.parametrize("file", ["model.onnx", "prune.onnx"])
def test_bound_to_one_buffer_the_caches_are_not_copied(exported, capfd, file):
    """ONNX Runtime warns when a scatter has to copy its cache: the proof that it does not here."""
    inputs = step_inputs(2, [1]) if file == "model.onnx" else PRUNE_INPUTS
    session = session_of(exported, file)
    run(session, inputs, new_caches(), in_place=False)
    assert NOT_IN_PLACE in capfd.readouterr().err
    run(session, inputs, new_caches(), in_place=True)
    assert NOT_IN_PLACE not in capfd.readouterr().err
