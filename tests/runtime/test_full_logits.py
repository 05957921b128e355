"""Memory of full logits on the host: one buffer, and a value for each number of rows."""

from __future__ import annotations

import numpy as np

from dsbd_runtime.parts.full_logits import HostLogits


def test_calls_of_sizes_that_come_again_have_one_value_each() -> None:
    made: list[np.ndarray] = []

    def value_on(array: np.ndarray) -> np.ndarray:
        made.append(array)
        return array

    logits = HostLogits(3, value_on)
    first = logits.room_for(4)
    for num_rows in (1, 4, 1, 4, 2):
        value = logits.room_for(num_rows)
        assert value.shape == (num_rows, 3) and np.shares_memory(value, first)
    assert [len(array) for array in made] == [4, 1, 2]
    value[:] = np.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(logits.read(np.array([1, 0])), [[3, 4, 5], [0, 1, 2]])


def test_a_larger_call_leaves_no_value_on_the_memory_of_before() -> None:
    logits = HostLogits(3, lambda array: array)
    before = logits.room_for(2)
    logits.room_for(5)
    after = logits.room_for(2)
    assert not np.shares_memory(before, after)
    after[:] = 7.0
    np.testing.assert_array_equal(logits.read(np.array([1])), np.full((1, 3), 7.0))
