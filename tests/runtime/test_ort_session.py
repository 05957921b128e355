"""ONNX Runtime session and its caches: in place, growing, clear about what it cannot open."""

import os
import sys
import tracemalloc
import weakref
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from dsbd_runtime.errors import BundleError, CapacityError, DsbdError, EngineError
from dsbd_runtime.ort.ort_module import LOG_WARNINGS, saturates_int8_products
from dsbd_runtime.ort.ort_session import OrtSession
from dsbd_runtime.parts.attention.attention_rows import ATTENTION_MASK, SRC_ROWS, WRITE_INDICES
from dsbd_runtime.parts.attention.cache_entries import (
    AttentionRows,
    ConvolutionRows,
    equal_caches,
    past_name,
    present_name,
)
from dsbd_runtime.parts.attention.kv_cache import KVCache, bucket_capacity, row_bytes
from tests.ort_sessions import cpu_session
from tests.runtime.model_calls import ONE_THREAD, engine_inputs, tiny_session
from tests.runtime.tiny_graph import TinyModel

IN_PLACE_WARNING = "in-place optimization not activated"


def session_of(bundle, **options):
    return OrtSession(bundle.model_path("target"), bundle.entry("target"), **options)


def step_inputs(capacity, num_new, first_row=0):
    rows = np.arange(num_new)
    mask = np.arange(capacity) <= (first_row + rows)[:, None]
    return engine_inputs(rows, first_row + rows, {ATTENTION_MASK: mask}, first_row, rows[-1:])


def buffers_of(session):
    """The caches' memory, which no public name gives away."""
    return list(session.rows.memory._cache.buffers.values())


def engine_with_warnings(path):
    return cpu_session(path, log_severity=LOG_WARNINGS)


def test_caches_are_updated_in_place_and_nothing_is_copied(tiny_bundle, capfd):
    session = session_of(tiny_bundle, settings=ONE_THREAD, log_severity=LOG_WARNINGS)
    for num_rows, first_row in ((5, 0), (7, 5), (200, 12)):
        session.rows.reserve(first_row + num_rows, first_row)
        addresses = [buffer.ctypes.data for buffer in buffers_of(session)]
        session.run(step_inputs(session.rows.capacity, num_rows, first_row))
        for buffer, address in zip(buffers_of(session), addresses, strict=True):
            assert buffer.ctypes.data == address
            written = buffer[0, :, :, 0] != 0
            assert written[:, : first_row + num_rows].all()
            assert not written[:, first_row + num_rows :].any()
    assert IN_PLACE_WARNING not in capfd.readouterr().err


def test_the_warning_appears_when_past_and_present_differ(tiny_bundle, capfd):
    """Proves that the absence of the warning, above and below, says something."""
    engine = engine_with_warnings(tiny_bundle.prune_path("target"))
    cache = KVCache(tiny_bundle.entry("target").caches)
    feeds = {past_name(layer, part): b for (layer, part), b in cache.buffers.items()}
    engine.run(None, {SRC_ROWS: np.array([1]), WRITE_INDICES: np.array([0]), **feeds})
    assert IN_PLACE_WARNING in capfd.readouterr().err


@pytest.mark.parametrize(
    ("src_rows", "first_row"), [([3], 0), ([1, 2, 3, 4], 0), ([5, 7, 8, 20, 127], 4), ([], 2)]
)
def test_prune_graph_and_move_rows_give_the_same_caches_in_place(
    tiny_bundle, capfd, src_rows, first_row
):
    engine = engine_with_warnings(tiny_bundle.prune_path("target"))
    by_numpy, by_graph = (KVCache(tiny_bundle.entry("target").caches) for _ in range(2))
    rng = np.random.default_rng(0)
    binding = engine.io_binding()
    for key, buffer in by_numpy.buffers.items():
        buffer[:] = rng.standard_normal(buffer.shape)
        by_graph.buffers[key][:] = buffer
        value = ort.OrtValue.ortvalue_from_numpy(by_graph.buffers[key])
        binding.bind_ortvalue_input(past_name(*key), value)
        binding.bind_ortvalue_output(present_name(*key), value)
    binding.bind_cpu_input(SRC_ROWS, np.array(src_rows, np.int64))
    binding.bind_cpu_input(WRITE_INDICES, np.array([first_row]))
    engine.run_with_iobinding(binding)
    by_numpy.move_rows(np.array(src_rows, np.int64), first_row)
    for key, buffer in by_numpy.buffers.items():
        np.testing.assert_array_equal(by_graph.buffers[key], buffer)
    assert IN_PLACE_WARNING not in capfd.readouterr().err


def test_a_fresh_start_shrinks_the_caches_and_forgets(tiny_bundle):
    session = session_of(tiny_bundle)
    session.rows.reserve(300, 0)
    session.run(step_inputs(session.rows.capacity, 256))
    session.rows.reserve(10, 256)
    assert session.rows.capacity == 320
    session.rows.reserve(10, 0)
    assert session.rows.capacity == 128
    assert session.rows.num_bytes == sum(buffer.nbytes for buffer in buffers_of(session))
    assert not any(buffer.any() for buffer in buffers_of(session))


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_call_over_large_caches_is_released(tmp_path):
    """Attention over 16 heads, 256 rows and 8,192 cache rows takes 128 MiB a layer."""
    tiny = TinyModel(num_layers=1, num_heads=16, context_length=8192)
    session = tiny_session(tiny, tmp_path / "model.onnx")
    session.run(step_inputs(session.rows.capacity, 1))
    before = resident_bytes()
    session.rows.reserve(8192, 0)
    session.run(step_inputs(session.rows.capacity, 256))
    wide = resident_bytes()
    assert wide - before > 100 << 20
    session.rows.shrink(1)
    session.run(step_inputs(session.rows.capacity, 1, first_row=1))
    assert resident_bytes() - before < (wide - before) // 4


def test_growth_lets_go_of_each_old_buffer_before_the_next(tmp_path):
    tiny = TinyModel(num_layers=4, num_kv_heads=4, head_dim=32, vocab_size=300)
    session = tiny_session(tiny, tmp_path / "model.onnx")
    tracemalloc.start()
    try:
        session.rows.reserve(100, 0)
        session.run(step_inputs(session.rows.capacity, 100))
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        old_bytes, one_buffer = session.rows.num_bytes, session.rows.num_bytes // 8
        session.rows.reserve(200, 100)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert session.rows.num_bytes == 2 * old_bytes
    assert peak - before < session.rows.num_bytes - old_bytes + 2 * one_buffer


def test_a_closed_session_says_so_and_releases_its_engine(tiny_bundle):
    """The binding holds the engine, whose packed weights are as large as the model."""
    session = session_of(tiny_bundle)
    binding = weakref.ref(session._binder._binding)
    inputs = step_inputs(session.rows.capacity, 1)
    session.run(inputs)
    if (maps := Path("/proc/self/maps")).exists():
        assert f"{tiny_bundle.model_path('target')}.data" in maps.read_text()  # not read to memory
    session.close()
    session.close()
    assert binding() is None
    assert (session.rows.capacity, session.rows.num_bytes) == (0, 0)
    for call in (
        lambda: session.run(inputs),
        lambda: session.rows.reserve(1, 0),
        lambda: session.rows.memory.move_rows(np.array([1]), 0),
    ):
        with pytest.raises(DsbdError, match=r"model\.onnx is closed"):
            call()


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data"])
@pytest.mark.parametrize("content", [b"", b"hello", b"\xff" * 4096, None])
def test_a_damaged_engine_or_its_weights_are_one_line(bundle_copy, name, content):
    path = bundle_copy / "target" / name
    path.write_bytes(path.read_bytes()[:3000] if content is None else content)
    with pytest.raises(BundleError, match=r"cannot load .*model\.onnx") as caught:
        OrtSession(bundle_copy / "target" / "model.onnx", TinyModel().entry())
    assert "\n" not in str(caught.value)
    path.unlink()
    with pytest.raises(BundleError, match=r"cannot load .*model\.onnx"):
        OrtSession(bundle_copy / "target" / "model.onnx", TinyModel().entry())


def test_a_call_that_fails_names_the_engine_and_what_was_asked(tmp_path):
    model = TinyModel(num_layers=1, context_length=16)
    session = tiny_session(model, tmp_path / "model.onnx")
    session.rows.reserve(20, 0)
    with pytest.raises(EngineError) as caught:
        session.run(step_inputs(session.rows.capacity, 20))  # beyond the table of positions
    message = str(caught.value)
    assert "failed in a call of" in message and str(tmp_path / "model.onnx") in message
    assert "(20 rows from row 0 on, logits of 1, caches of 128)" in message
    assert "\n" not in message
    call = step_inputs(session.rows.capacity, 5)
    session.run(call)  # it goes on
    assert np.isfinite(call.returned["logits"].values).all()


GEOMETRY = equal_caches(3, num_heads=2, head_dim=4, dtype="fp32")

CAPACITIES = {0: 128, 128: 128, 129: 256, 257: 320, 385: 448, 512: 512, 513: 576, 769: 832}
CAPACITIES |= {1024: 1024, 1025: 1152, 1537: 1664, 32_769: 36_864}


def test_capacities_by_the_rows_that_are_needed():
    assert {num_rows: bucket_capacity(num_rows) for num_rows in CAPACITIES} == CAPACITIES


def test_long_caches_have_at_most_a_ninth_free_and_always_fit():
    for num_rows in range(513, 9000):
        assert num_rows <= bucket_capacity(num_rows) < 1.125 * num_rows


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
    for num_rows in (256, 1 << 50):  # the second: beyond the address space of any machine
        with pytest.raises(CapacityError, match=rf"no memory for .* {num_rows} rows, .*shorten"):
            cache.resize(num_rows, 50)
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


FLAGS = "processor : 0\nflags\t\t: fpu avx2 {}\nbugs : none\n"


MACHINES = [("x86_64", "avx512_vnni", False), ("AMD64", "avx_vnni", False)]
MACHINES += [("x86_64", "avx512f", True), ("aarch64", "", False)]


@pytest.mark.parametrize(("machine", "flag", "saturates"), MACHINES)
def test_x86_without_vnni_saturates(machine, flag, saturates, tmp_path):
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(FLAGS.format(flag))
    assert saturates_int8_products(machine, cpu_info) is saturates
    assert saturates_int8_products(machine, tmp_path / "none") is (machine != "aarch64")
