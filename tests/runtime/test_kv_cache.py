"""Cache buffers: buckets, growth, moves, and memory that runs out."""

import tracemalloc

import numpy as np
import pytest

from dsbd_runtime.errors import CapacityError
from dsbd_runtime.parts.attention.cache_entries import (
    AttentionRows,
    ConvolutionRows,
    equal_caches,
)
from dsbd_runtime.parts.attention.kv_cache import KVCache, bucket_capacity, row_bytes

GEOMETRY = equal_caches(3, num_heads=2, head_dim=4, dtype="fp32")

BUCKETS = [
    # rows wanted, capacity
    (0, 128),
    (128, 128),
    (129, 256),
    (257, 320),
    (385, 448),
    (512, 512),
    (513, 576),
    (769, 832),
    (1024, 1024),
    (1025, 1152),
    (1537, 1664),
    (32_769, 36_864),
]


@pytest.mark.parametrize(("num_rows", "capacity"), BUCKETS)
def test_buckets(num_rows, capacity):
    assert bucket_capacity(num_rows) == capacity


def test_long_caches_have_at_most_a_ninth_free_and_always_fit():
    for num_rows in range(513, 9000):
        assert num_rows <= bucket_capacity(num_rows) < 1.125 * num_rows


def filled_cache(num_used, geometry=GEOMETRY):
    cache = KVCache(geometry)
    rng = np.random.default_rng(0)
    for buffer in cache.buffers.values():
        buffer[:, :, :num_used] = rng.standard_normal(buffer[:, :, :num_used].shape)
    return cache


def test_growth_holds_one_old_buffer_at_a_time():
    geometry = equal_caches(8, num_heads=2, head_dim=64, dtype="fp16")
    cache = filled_cache(128, geometry)
    tracemalloc.start()
    try:
        cache.resize(256, 128)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    one_buffer = cache.num_bytes // 16
    assert cache.num_bytes == 8 * 2 * 2 * 256 * 64 * 2
    assert peak < cache.num_bytes + one_buffer


def test_too_little_memory_leaves_the_caches_as_they_were():
    class ScarceCache(KVCache):
        """Has memory for three buffers of 256 rows."""

        num_large = 0

        def _new_buffer(self, old, capacity):
            if capacity == 256:
                self.num_large += 1
                if self.num_large > 3:
                    raise MemoryError
            return super()._new_buffer(old, capacity)

    cache = ScarceCache(GEOMETRY)
    for index, buffer in enumerate(cache.buffers.values()):
        buffer[:] = index + 1
    with pytest.raises(CapacityError, match=r"no memory for .* 256 rows, 49152 bytes"):
        cache.resize(256, 50)
    assert cache.capacity == 128
    for index, buffer in enumerate(cache.buffers.values()):
        assert buffer.shape[2] == 128
        assert (buffer[:, :, :50] == index + 1).all()


def test_rows_that_nothing_has_written_may_be_other_than_zero():
    """The export's gate fills them with noise, which no masked row may show."""
    numbers = iter(range(1, 100))
    cache = KVCache(GEOMETRY, new_rows=lambda shape, dtype: np.full(shape, next(numbers), dtype))
    assert [buffer.flat[0] for buffer in cache.buffers.values()] == [1, 2, 3, 4, 5, 6]
    cache.resize(256, 100)
    for number, buffer in enumerate(cache.buffers.values(), start=1):
        assert (buffer[:, :, :100] == number).all() and (buffer[:, :, 100:] == number + 6).all()
    cache.resize(256, 0)  # it starts again
    assert all((buffer > 12).all() for buffer in cache.buffers.values())


def test_a_refused_allocation_is_a_capacity_error():
    cache = KVCache(GEOMETRY)
    with pytest.raises(CapacityError, match="shorten the prompt"):
        cache.resize(1 << 50, 10)  # beyond the address space of any machine
    assert cache.capacity == 128


MIXED = [  # a layer with latents, one without rows, one with wide heads in another precision
    AttentionRows(layer=0, num_heads=1, key_width=8, value_width=2, dtype="fp32"),
    AttentionRows(layer=2, num_heads=3, key_width=16, value_width=16, dtype="fp16"),
    ConvolutionRows(layer=3, width=6, num_ancestors=2, dtype="fp32"),
]


def test_layers_may_cache_rows_of_different_shapes():
    cache = KVCache(MIXED)
    assert {key: buffer.shape for key, buffer in cache.buffers.items()} == {
        (0, "key"): (1, 1, 128, 8),
        (0, "value"): (1, 1, 128, 2),
        (2, "key"): (1, 3, 128, 16),
        (2, "value"): (1, 3, 128, 16),
        (3, "convolution"): (1, 1, 128, 6),
    }
    assert row_bytes(MIXED) == (8 + 2) * 4 + 3 * (16 + 16) * 2 + 6 * 4
    cache.resize(256, 0)
    assert cache.num_bytes == 256 * row_bytes(MIXED)
