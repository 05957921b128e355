"""Memory of full logits on the host: one buffer, and a value for each number of rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from dsbd_runtime.parts.full_logits import HostLogits
from dsbd_runtime.parts.head import full_output


class ValueBinder:
    """Values are the arrays themselves.

    Attributes:
        made: every value.
        bound: the last one that was bound.
    """

    def __init__(self) -> None:
        self.made: list[np.ndarray] = []

    def value_on(self, array: np.ndarray) -> np.ndarray:
        self.made.append(array)
        return array

    def write_value(self, name: str, value: np.ndarray) -> None:
        assert name == "logits"
        self.bound = value


def test_calls_of_sizes_that_come_again_have_one_value_each() -> None:
    binder: Any = ValueBinder()
    logits = HostLogits(full_output(3))
    logits.bind(binder, 0, 4)
    first = binder.bound
    for num_rows in (1, 4, 1, 4, 2):
        logits.bind(binder, 0, num_rows)
        value = binder.bound
        assert value.shape == (num_rows, 3) and np.shares_memory(value, first)
    assert [len(array) for array in binder.made] == [4, 1, 2]
    value[:] = np.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(logits.read(np.array([1, 0])), [[3, 4, 5], [0, 1, 2]])


def test_a_larger_call_leaves_no_value_on_the_memory_of_before() -> None:
    binder: Any = ValueBinder()
    logits = HostLogits(full_output(3))
    logits.bind(binder, 0, 2)
    before = binder.bound
    logits.bind(binder, 0, 5)
    logits.bind(binder, 0, 2)
    after = binder.bound
    assert not np.shares_memory(before, after)
    after[:] = 7.0
    np.testing.assert_array_equal(logits.read(np.array([1])), np.full((1, 3), 7.0))


def test_the_rows_of_a_forwards_earlier_calls_stay() -> None:
    binder: Any = ValueBinder()
    logits = HostLogits(full_output(3))
    logits.bind(binder, 0, 2)
    binder.bound[:] = 1.0
    logits.bind(binder, 2, 3)  # more than there is room for
    binder.bound[:] = 2.0
    assert logits.read(np.arange(5))[:, 0].tolist() == [1, 1, 2, 2, 2]
    assert logits.read_tokens(np.array([4, 0]), np.array([2, 1])).tolist() == [2, 1]
