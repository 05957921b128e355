"""Packed inputs: where each array lies, and what the padding says."""

from __future__ import annotations

import numpy as np
import pytest

from dsbd_runtime.device.device_binder import forward_bucket, padded_rows, row_bucket
from dsbd_runtime.device.packed_buffer import (
    PackedArrays,
    PackedBuffer,
    fill_forward,
    fill_move,
    forward_parts,
    move_parts,
    packed_bytes,
)
from dsbd_runtime.parts.attention_rows import (
    ATTENTION_MASK,
    ATTENTION_MASK_SLIDING,
    INPUT_IDS,
    POSITION_IDS,
    SRC_ROWS,
    WRITE_INDICES,
)
from dsbd_runtime.parts.head import LOGIT_ROWS
from tests.runtime.fake_device import FakeDevice
from tests.runtime.model_calls import engine_inputs

MASKS = [ATTENTION_MASK, ATTENTION_MASK_SLIDING]


def staged(parts: list[tuple[str, tuple[int, ...], str]]) -> PackedArrays:
    """Return arrays for these parts, full of what an earlier call left."""
    arrays = PackedBuffer(FakeDevice(), packed_bytes(parts)).lay_out(parts)
    for array in arrays.on_host.values():
        array[...] = 99
    return arrays


@pytest.mark.parametrize(
    ("num_rows", "bucket"),
    [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (33, 64), (200, 256), (256, 256)],
)
def test_rows_are_rounded_up_to_powers_of_two(num_rows: int, bucket: int) -> None:
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
def test_a_forward_is_padded_less_where_verifications_lie(num_rows: int, bucket: int) -> None:
    assert forward_bucket(num_rows, 512) == bucket


def test_the_bucket_never_exceeds_the_limit() -> None:
    for bucket in (row_bucket, forward_bucket):
        assert bucket(5, 6) == 6
        assert bucket(3, 3) == 3


@pytest.mark.parametrize(
    ("num_new", "padded"), [(0, 0), (1, 1), (3, 4), (256, 256), (257, 257), (300, 304), (600, 608)]
)
def test_only_the_last_call_of_a_long_step_is_padded(num_new: int, padded: int) -> None:
    assert padded_rows(num_new, 256) == padded


def test_padding_rows_see_themselves_and_the_first_row_and_nobody_sees_them() -> None:
    arrays = staged(forward_parts(4, 4, 8, MASKS))
    masks = {
        MASKS[0]: np.array([[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 0, 1, 0, 0, 0, 0]], np.bool_),
        MASKS[1]: np.array([[0, 1, 1, 0, 0, 0, 0, 0], [0, 1, 0, 1, 0, 0, 0, 0]], np.bool_),
    }
    two, positions = np.array([7, 8]), np.array([2, 2])
    fill_forward(arrays, engine_inputs(two, positions, masks, 2, np.array([1, 0, 1])))
    host = arrays.on_host
    assert host[INPUT_IDS].tolist() == [[7, 8, 0, 0]]
    assert host[POSITION_IDS].tolist() == [[2, 2, 0, 0]]
    assert host[WRITE_INDICES].tolist() == [2]
    assert host[LOGIT_ROWS].tolist() == [1, 0, 1, 0]
    padding = [[1, 0, 0, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 1, 0, 0]]
    for name, mask in masks.items():
        assert host[name][0, 0].tolist() == [*mask.tolist(), *np.array(padding, bool).tolist()]


def test_the_padding_of_a_move_copies_a_row_that_moves_anyway() -> None:
    arrays = staged(move_parts(4))
    fill_move(arrays, np.array([5, 7, 8]), 2)
    assert arrays.on_host[SRC_ROWS].tolist() == [5, 7, 8, 8]
    assert arrays.on_host[WRITE_INDICES].tolist() == [2]


def test_parts_are_aligned_and_the_same_on_both_sides() -> None:
    device = FakeDevice()
    parts = forward_parts(3, 2, 10, MASKS)
    buffer = PackedBuffer(device, packed_bytes(parts))
    arrays = buffer.lay_out(parts)
    first = arrays.on_device[WRITE_INDICES].address
    for value, (name, shape, _) in enumerate(parts):
        assert (arrays.on_device[name].address - first) % 256 == 0
        assert arrays.on_host[name].shape == arrays.on_device[name].shape == shape
        arrays.on_host[name][...] = value % 2
    buffer.upload(arrays.num_bytes)
    device.synchronize()
    for name, host in arrays.on_host.items():
        found = device.memory_of(arrays.on_device[name])
        assert found.tobytes() == host.tobytes()


def test_without_pinned_memory_nothing_is_taken() -> None:
    class NoPinned(FakeDevice):
        def allocate_pinned(self, num_bytes: int) -> np.ndarray:
            raise MemoryError

    device = NoPinned()
    with pytest.raises(MemoryError):
        PackedBuffer(device, 100)
    assert not device.live


def test_a_part_stays_within_its_array() -> None:
    array = FakeDevice().allocate((10,), "uint8")
    assert array.part(2, (1,), "int64").address == array.address + 2
    with pytest.raises(ValueError, match="bytes 3 to 11 of an array of 10"):
        array.part(3, (1,), "int64")
