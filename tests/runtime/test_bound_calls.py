"""Packed inputs: where each array lies, and what the padding says."""

import numpy as np
import pytest

from dsbd_runtime.device.bound_calls import fill_mask, fill_move, fill_padded, move_parts
from dsbd_runtime.device.cuda_device import PackedBuffer, packed_bytes
from dsbd_runtime.parts.attention.attention_rows import (
    ATTENTION_MASK,
    INPUT_IDS,
    SRC_ROWS,
    WRITE_INDICES,
)
from dsbd_runtime.parts.device_binder import forward_bucket, padded_rows, row_bucket
from dsbd_runtime.parts.head.head import LOGIT_ROWS
from tests.runtime.fake_device import FakeDevice


def staged(parts):
    """Return arrays for these parts, full of what an earlier call left."""
    arrays = PackedBuffer(FakeDevice(), packed_bytes(parts)).lay_out(parts)
    for array in arrays.on_host.values():
        array[...] = 99
    return arrays


@pytest.mark.parametrize(
    ("num_rows", "bucket"),
    [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (33, 64), (200, 256), (256, 256)],
)
def test_rows_are_rounded_up_to_powers_of_two(num_rows, bucket):
    assert row_bucket(num_rows, 256) == bucket


@pytest.mark.parametrize(
    ("num_rows", "bucket"),
    [
        (0, 1),
        (3, 4),
        (9, 16),
        (17, 24),
        (25, 32),
        (33, 40),
        (41, 48),
        (49, 64),
        (65, 96),
        (257, 512),
    ],
)
def test_a_forward_is_padded_less_where_verifications_lie(num_rows, bucket):
    assert forward_bucket(num_rows, 512) == bucket


def test_the_bucket_never_exceeds_the_limit():
    for bucket in (row_bucket, forward_bucket):
        assert bucket(5, 6) == 6
        assert bucket(3, 3) == 3


@pytest.mark.parametrize(
    ("num_new", "padded"), [(0, 0), (1, 1), (3, 4), (256, 256), (257, 257), (300, 304), (600, 608)]
)
def test_only_the_last_call_of_a_long_step_is_padded(num_new, padded):
    assert padded_rows(num_new, 256) == padded


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
