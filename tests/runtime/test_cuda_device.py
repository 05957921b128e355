"""CUDA device over a runtime in host memory: every copy lands, every failure has its words."""

import inspect

import numpy as np
import pytest

from dsbd_runtime.device.bound_calls import LoadedModel
from dsbd_runtime.device.cuda_device import CudaDevice, check_cuda_device, import_cuda_runtime
from dsbd_runtime.device.device_session import DeviceSession
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.errors import CapacityError, DsbdError, ProviderError
from tests.runtime.fake_cuda import FakeCudaRuntime, cudaError_t, cudaMemcpyKind
from tests.runtime.fake_device import open_on_fake
from tests.runtime.model_calls import logits_of


def values_of(device, array):
    pinned = device.allocate_pinned(array.num_bytes)
    device.download(array, pinned)
    device.synchronize()
    values = pinned.tolist()
    device.free_pinned(pinned)
    return values


def test_arrays_begin_as_zeros_and_bytes_come_back():
    runtime = FakeCudaRuntime()
    device = CudaDevice(1, runtime)
    array = device.allocate((2, 3), "uint8")
    assert values_of(device, array) == [0] * 6
    pinned = device.allocate_pinned(4)
    pinned[:] = [1, 2, 3, 4]
    device.upload(pinned, array)
    assert values_of(device, array) == [1, 2, 3, 4, 0, 0]
    device.fill_zero(array)
    assert values_of(device, array) == [0] * 6
    device.free(array)
    device.free_pinned(pinned)
    device.close()
    device.close()
    assert (runtime.live, runtime.streams) == ({}, [])
    # Another session in the same thread may have made another device the current one.
    calls = [call for call in runtime.log if call[0] != "cudaGetDeviceCount"]
    assert {call for call in calls[::2]} == {("cudaSetDevice", (1,))}
    assert "cudaSetDevice" not in {name for name, _ in calls[1::2]}


def test_rows_move_to_another_capacity_as_one_rectangle():
    runtime = FakeCudaRuntime()
    device = CudaDevice(0, runtime)
    small, large = (device.allocate((1, 2, rows, 4), "fp16") for rows in (3, 5))
    pinned = device.allocate_pinned(small.num_bytes)
    pinned[:] = np.arange(48)
    device.upload(pinned, small)
    runtime.log.clear()
    device.copy_rows(small, large, 2)
    assert [name for name, _ in runtime.log] == ["cudaSetDevice", "cudaMemcpy2DAsync"]
    found = np.array(values_of(device, large)).reshape(2, 5, 8)
    wanted = np.arange(48).reshape(2, 3, 8)
    assert found[:, :2].tolist() == wanted[:, :2].tolist()
    assert not found[:, 2:].any()


def test_no_room_is_a_memory_error_and_all_else_names_the_function():
    runtime = FakeCudaRuntime()
    device = CudaDevice(0, runtime)
    for function, take in (
        ("cudaMalloc", lambda: device.allocate((100,), "fp32")),
        ("cudaMallocHost", lambda: device.allocate_pinned(400)),
    ):
        runtime.fails = {function: cudaError_t.cudaErrorMemoryAllocation}
        with pytest.raises(MemoryError, match=rf"cuda:0: {function}\(400,\)"):
            take()
    runtime.fails = {"cudaStreamSynchronize": cudaError_t.cudaErrorInvalidValue}
    words = r"Synchronize on cuda:0 failed: what CUDA says \(cudaErrorInvalidValue\)"
    with pytest.raises(DsbdError, match=words):
        device.synchronize()


def test_a_missing_driver_and_a_missing_device():
    runtime = FakeCudaRuntime(num_devices=2)
    check_cuda_device(runtime, 1)
    with pytest.raises(ProviderError, match=r"no device cuda:2, .* has 2; choose cuda:0 to cuda:1"):
        check_cuda_device(runtime, 2)
    runtime.fails = {"cudaGetDeviceCount": cudaError_t.cudaErrorInsufficientDriver}
    words = r"what CUDA says \(cudaErrorInsufficientDriver\); install an NVIDIA"
    with pytest.raises(ProviderError, match=words):
        CudaDevice(0, runtime)


def test_a_session_runs_on_it(tiny_bundle):
    """The engines of the fake device, with their memory from this one."""
    runtime = FakeCudaRuntime()
    wanted = open_on_fake(tiny_bundle)
    engines = (engine.inner for engine in (wanted.engine, wanted.prune_engine))
    entry = tiny_bundle.entry("target")
    session = DeviceSession(LoadedModel(CudaDevice(0, runtime), *engines, entry, 256))
    model = CausalLM(session, entry)
    for size in (3, 200):
        rows, mask = np.arange(size), np.tri(size, dtype=np.bool_)
        outputs = []
        for each in (model, wanted.model):
            each.keep(np.arange(0))
            logits_of(each, rows, rows, mask, rows)
            each.keep(rows[1:])
            last = np.ones((1, size), np.bool_)
            outputs.append(logits_of(each, rows[:1], rows[-1:], last, rows[:1]))
        np.testing.assert_array_equal(*outputs)
    runtime.fails = {"cudaMalloc": cudaError_t.cudaErrorMemoryAllocation}
    with pytest.raises(CapacityError, match="cuda:0 has no memory for a key/value cache"):
        session.rows.reserve(5000, 100)
    model.close()
    assert (runtime.live, runtime.streams) == ({}, [])


def test_the_package_has_every_function_and_says_what_is_missing():
    runtime = pytest.importorskip("cuda.bindings.runtime")
    assert import_cuda_runtime("pip install it") is runtime
    for name, _ in inspect.getmembers(FakeCudaRuntime, inspect.isfunction):
        if name.startswith("cuda"):
            assert callable(getattr(runtime, name))
    for enum in (cudaError_t, cudaMemcpyKind):
        for member in enum:
            assert getattr(getattr(runtime, enum.__name__), member.name) == member.value
    status, _ = runtime.cudaGetDeviceCount()
    if status == runtime.cudaError_t.cudaSuccess:
        pytest.skip("this machine has a GPU")
    with pytest.raises(ProviderError, match="install an NVIDIA driver for CUDA 13"):
        check_cuda_device(runtime, 0)


def test_work_is_recorded_launched_and_given_back():
    runtime = FakeCudaRuntime()
    device = CudaDevice(0, runtime)
    runtime.log.clear()
    recorded = device.record(lambda: None)
    recorded.run()
    recorded.free()
    names = [name for name, _ in runtime.log if name != "cudaSetDevice"]
    assert names == [
        "cudaStreamBeginCapture",
        "cudaStreamEndCapture",
        "cudaGraphInstantiate",
        "cudaGraphDestroy",
        "cudaGraphLaunch",
        "cudaGraphExecDestroy",
    ]
    assert ("cudaStreamBeginCapture", (device.stream, 1)) in runtime.log  # the thread's own
    assert runtime.graphs == []


def test_a_recording_that_fails_leaves_the_stream_as_it_was():
    runtime = FakeCudaRuntime()
    device = CudaDevice(0, runtime)

    def fail():
        raise CapacityError("no room")

    with pytest.raises(CapacityError, match="no room"):
        device.record(fail)
    runtime.fails = {"cudaGraphInstantiate": cudaError_t.cudaErrorMemoryAllocation}
    with pytest.raises(MemoryError):
        device.record(lambda: None)
    assert runtime.graphs == []
    begun = [name for name, _ in runtime.log if name.endswith("Capture")]
    assert begun == ["cudaStreamBeginCapture", "cudaStreamEndCapture"] * 2


def test_giving_back_raises_nothing_after_a_failure(caplog):
    """CUDA answers every call after a kernel has failed with the error of the kernel."""
    runtime = FakeCudaRuntime()
    device = CudaDevice(0, runtime)
    array, pinned = device.allocate((4,), "fp32"), device.allocate_pinned(16)
    broken = ("cudaStreamSynchronize", "cudaFree", "cudaFreeHost", "cudaStreamDestroy")
    runtime.fails = dict.fromkeys(broken, cudaError_t.cudaErrorInvalidValue)
    device.free(array)  # nobody was told of a failure yet
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    caplog.clear()
    with pytest.raises(DsbdError, match="cudaStreamSynchronize on cuda:0 failed"):
        device.synchronize()
    device.free_pinned(pinned)
    device.close()
    assert caplog.records == []
