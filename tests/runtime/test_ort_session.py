"""ONNX Runtime session: in place, on shared memory, and clear about what it cannot open."""

import os
import sys
import tracemalloc
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.errors import BundleError, DsbdError, EngineError, InputError, ProviderError
from dsbd_runtime.ort.ort_module import LOG_WARNINGS, saturates_int8_products
from dsbd_runtime.ort.ort_session import OrtSession
from dsbd_runtime.parts.attention.attention_rows import ATTENTION_MASK, SRC_ROWS, WRITE_INDICES
from dsbd_runtime.parts.attention.cache_entries import past_name, present_name
from dsbd_runtime.parts.attention.kv_cache import KVCache
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


def test_a_closed_session_says_so(tiny_bundle):
    session = session_of(tiny_bundle)
    inputs = step_inputs(session.rows.capacity, 1)
    session.close()
    session.close()
    assert (session.rows.capacity, session.rows.num_bytes) == (0, 0)
    for call in (
        lambda: session.run(inputs),
        lambda: session.rows.reserve(1, 0),
        lambda: session.rows.memory.move_rows(np.array([1]), 0),
    ):
        with pytest.raises(DsbdError, match=r"model\.onnx is closed"):
            call()


def test_a_closed_session_releases_its_engine(tiny_bundle):
    """The binding holds the engine, whose packed weights are as large as the model."""
    session = session_of(tiny_bundle)
    binding = weakref.ref(session._binder._binding)
    session.run(step_inputs(session.rows.capacity, 1))
    session.close()
    assert binding() is None


@pytest.mark.parametrize("content", [b"", b"hello", b"\xff" * 4096, None])
def test_a_damaged_engine_is_one_line(tiny_bundle, tmp_path, content):
    good = tiny_bundle.model_path("target").read_bytes()
    path = tmp_path / "model.onnx"
    path.write_bytes(good[: len(good) // 2] if content is None else content)
    with pytest.raises(BundleError, match=r"cannot load .*model\.onnx") as caught:
        OrtSession(path, tiny_bundle.entry("target"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("num_bytes", [None, 3000])
def test_missing_or_short_weights_are_one_line(bundle_copy, num_bytes):
    weights = bundle_copy / "target" / "model.onnx.data"
    if num_bytes is None:
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:num_bytes])
    with pytest.raises(BundleError, match=r"cannot load .*model\.onnx") as caught:
        OrtSession(bundle_copy / "target" / "model.onnx", TinyModel().entry())
    assert "\n" not in str(caught.value)


def test_weights_are_memory_mapped(tiny_bundle):
    session = session_of(tiny_bundle)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    assert f"{tiny_bundle.model_path('target')}.data" in maps.read_text()
    session.close()


@pytest.mark.parametrize("num_threads", [0, -1, 10**9, 1.5, True])
def test_threads_must_be_positive(tiny_bundle, num_threads):
    with pytest.raises(InputError, match=f"num_threads is {num_threads}"):
        session_of(tiny_bundle, settings=EngineSettings(num_threads=num_threads))


def test_a_type_that_the_provider_lacks_is_refused(tiny_bundle):
    entry = replace(tiny_bundle.entry("target"), dtype="bf16")
    with pytest.raises(ProviderError, match=r"is in bf16, provider 'cpu' runs fp32, fp16"):
        OrtSession(tiny_bundle.model_path("target"), entry)


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


FLAGS = "processor : 0\nflags\t\t: fpu avx2 {}\nbugs : none\n"


@pytest.mark.parametrize(
    ("machine", "flag", "saturates"),
    [
        ("x86_64", "avx512_vnni", False),
        ("AMD64", "avx_vnni", False),
        ("x86_64", "avx512f", True),
        ("aarch64", "", False),
    ],
)
def test_x86_without_vnni_saturates(machine, flag, saturates, tmp_path):
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(FLAGS.format(flag))
    assert saturates_int8_products(machine, cpu_info) is saturates


def test_an_unknown_x86_is_taken_for_one_that_saturates(tmp_path):
    assert saturates_int8_products("AMD64", tmp_path / "nothing here")
