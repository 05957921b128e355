"""A device whose memory is values of ONNX Runtime: on the CPU's values, without a plug-in."""

import sys
import threading
from types import SimpleNamespace

import numpy as np
import onnxruntime as ort
import pytest

from dsbd_forward.forward import Forward
from dsbd_runtime.device.bound_calls import MOST_RECORDED, LoadedModel
from dsbd_runtime.device.device_session import DeviceSession
from dsbd_runtime.device.ort_engine import OrtCall
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.engine.providers import find_provider, parse_placement
from dsbd_runtime.engine.session import EngineOptions
from dsbd_runtime.errors import CapacityError, EngineError, ProviderError
from dsbd_runtime.loading import load_causal_lm
from dsbd_runtime.plugin import number_check, plugin_module
from dsbd_runtime.plugin.number_check import check_numbers
from dsbd_runtime.plugin.plugin_engine import ValueEngine
from dsbd_runtime.plugin.plugin_module import TURNS, plugin_device
from dsbd_runtime.plugin.value_device import ValueDevice
from tests.ort_sessions import cpu_session
from tests.runtime.model_calls import forest_forward


class CpuValues:
    """ONNX Runtime with copies between values on the CPU, which it has between devices alone."""

    OrtValue, RunOptions = ort.OrtValue, ort.RunOptions

    @staticmethod
    def copy_tensors(sources, targets):
        for source, target in zip(sources, targets, strict=True):
            target.update_inplace(source.numpy())


WEBGPU = find_provider("webgpu")
FIRST = Forward(np.array([5]), np.array([0]), np.ones((1, 1), np.bool_), np.array([0]))


def open_on_values(bundle, *, most_recorded=0, role="target"):
    device = ValueDevice(CpuValues, "cpu", 0)
    engines = (
        ValueEngine(CpuValues, cpu_session(path, num_threads=1), path, device)
        for path in (bundle.model_path(role), bundle.prune_path(role))
    )
    entry = bundle.entry(role)
    session = DeviceSession(LoadedModel(device, *engines, entry, 256, most_recorded))
    return device, session, CausalLM(session, entry)


def random_forward(model, rng):
    num_new = int(rng.choice([1, 2, 3, 5, 8, 13]))
    parents = [int(rng.integers(-1, row)) if row else -1 for row in range(num_new)]
    token_ids = rng.integers(0, model.spec.vocab_size, num_new)
    rows = rng.permutation(num_new)[: rng.integers(0, num_new + 1)]
    return forest_forward(model, parents, token_ids, rows)


@pytest.mark.parametrize("most_recorded", [0, MOST_RECORDED])
def test_a_session_gives_the_logits_of_the_host(tiny_bundle, most_recorded):
    """Over growth, prunes and calls without logits; recorded work is run twice to be recorded."""
    rng = np.random.default_rng(7)
    device, _, model = open_on_values(tiny_bundle, most_recorded=most_recorded)
    with load_causal_lm(tiny_bundle, "target") as host, model:
        for _ in range(75):
            forward = random_forward(host, rng)
            found, wanted = (each.forward(forward).logits.whole for each in (model, host))
            np.testing.assert_allclose(found, wanted, atol=1e-5)
            kept = forward.mask[-1].nonzero()[0]
            for each in (model, host):
                each.keep(kept)
        assert host.num_rows > 128  # the capacity has grown
        assert (device._num_recorded > 0) == (most_recorded > 0)


def test_recorded_work_is_limited_as_its_memory_is_kept():
    device = ValueDevice(CpuValues, "cpu", 0)
    runs = []
    for _ in range(32):
        device.record(lambda: runs.append(1))
    assert len(runs) == 32  # to record is to run
    with pytest.raises(MemoryError, match="32 calls are recorded"):
        device.record(lambda: None)


def test_a_call_that_the_device_dropped_is_an_error(tiny_bundle, monkeypatch):
    """ONNX Runtime's plug-in for WebGPU says nothing: the outputs are as they were."""
    _, _, model = open_on_values(tiny_bundle)
    rng = np.random.default_rng(0)
    wanted = model.forward(FIRST).logits.whole
    model.keep(np.zeros(0, np.int64))
    with monkeypatch.context() as patch:
        patch.setattr(OrtCall, "run", lambda self: None)
        with pytest.raises(CapacityError, match="cpu:0 dropped a call, ONNX Runtime's lines on"):
            model.forward(FIRST)
    assert model.num_rows == 0
    np.testing.assert_array_equal(model.forward(FIRST).logits.whole, wanted)
    model.forward(random_forward(model, rng))


def test_a_lost_device_is_one_error_that_says_to_open_again(tiny_bundle, monkeypatch):
    _, _, model = open_on_values(tiny_bundle)
    model.forward(FIRST)
    model.keep(np.zeros(0, np.int64))

    def lose(*_):
        raise RuntimeError("Device is lost")

    with monkeypatch.context() as patch:
        patch.setattr(CpuValues, "copy_tensors", lose)
        with pytest.raises(EngineError, match=r"cpu:0 has failed: Device is lost; open the bundle"):
            model.forward(FIRST)


def test_memory_that_is_not_there_is_found_when_it_is_taken():
    """As in the plug-in, taking and writing it raise nothing, reading does."""

    class Value:
        def update_inplace(self, array): ...

        def shape(self):
            return [4, 5]

        def numpy(self):
            raise RuntimeError("Invalid Buffer")

    taken = SimpleNamespace(
        OrtValue=SimpleNamespace(ortvalue_from_shape_and_type=lambda *_: Value())
    )
    with pytest.raises(MemoryError, match="webgpu:0: 80 bytes: Invalid Buffer"):
        ValueDevice(taken, "webgpu", 0).allocate((4, 5), "fp32")


def test_rows_are_copied_by_way_of_the_host_and_to_the_device_before_a_call():
    device = ValueDevice(CpuValues, "cpu", 0)
    source, target = (device.allocate((2, rows, 3), "fp32") for rows in (4, 6))
    numbers = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    source.memory.put(numbers)
    source.memory.is_device_newer = True
    device.copy_rows(source, target, 2, source_row=1, target_row=3)
    assert target.memory.is_host_newer
    assert not target.memory.value.numpy().any()
    target.memory.upload()
    found = target.memory.value.numpy()
    np.testing.assert_array_equal(found[:, 3:5], numbers[:, 1:3])
    assert not found[:, :3].any()
    device.fill_zero(target)
    assert not target.memory.value.numpy().any()
    assert not target.memory.numbers.any()


def test_layouts_share_arrays_of_the_same_name_and_shape():
    """Or the memory would grow with the combinations of sizes."""
    staging = ValueDevice(CpuValues, "cpu", 0).staging([])
    ids, mask, other = ("ids", (1, 2), "int64"), ("mask", (2, 8), "bool"), ("mask", (4, 8), "bool")
    first, second = staging.lay_out([ids, mask]), staging.lay_out([ids, other])
    assert first.on_device["ids"] is second.on_device["ids"]
    assert first.on_device["mask"] is not second.on_device["mask"]
    second.on_host["ids"][...] = [[3, 4]]
    second.upload()
    assert first.on_device["ids"].memory.value.numpy().tolist() == [[3, 4]]


def test_the_check_at_opening(tiny_bundle, monkeypatch):
    request = EngineOptions(
        bundle=tiny_bundle, role="target", placement=parse_placement("webgpu:0")
    )
    _, session, model = open_on_values(tiny_bundle, most_recorded=MOST_RECORDED)
    check_numbers(session, request)
    assert model.num_rows == 0

    hidden = lambda model: np.column_stack([numbers(model), np.full(40, -np.inf)])  # noqa: E731
    numbers = number_check._numbers
    with monkeypatch.context() as patch:  # tokens that a draft never proposes
        patch.setattr(number_check, "_numbers", hidden)
        check_numbers(session, request)

    right = number_check._numbers_on_cpu
    for name, wrong in (("2", lambda x: x + 2), ("nan", lambda x: x * np.nan)):
        monkeypatch.setattr(number_check, "_numbers_on_cpu", lambda r, f=wrong: f(right(r)))
        with pytest.raises(ProviderError, match=f"webgpu:0 computes wrong logits: .* by {name}.*"):
            check_numbers(session, request)
    monkeypatch.setattr(OrtCall, "run", lambda self: None)
    with pytest.raises(ProviderError, match=r"webgpu:0 cannot run .*model.onnx: .* dropped a call"):
        check_numbers(session, request)


@pytest.fixture
def no_plugins(monkeypatch):
    monkeypatch.setattr(plugin_module, "_registered", {})


def test_a_missing_package_a_missing_gpu_and_a_missing_device(no_plugins, monkeypatch):
    registered = []
    fake = SimpleNamespace(
        register_execution_provider_library=lambda *names: registered.append(names),
        get_ep_devices=list,
    )
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_webgpu", None)
    with pytest.raises(ProviderError, match=r"needs the plug-in onnxruntime_ep_webgpu.*\[webgpu\]"):
        plugin_device(fake, WEBGPU, 0)
    module = SimpleNamespace(get_library_path=lambda: "lib.so", get_ep_name=lambda: "Wg")
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_webgpu", module)
    for _ in range(2):
        with pytest.raises(ProviderError, match="'webgpu' finds no GPU; install the GPU's driver"):
            plugin_device(fake, WEBGPU, 0)
    assert registered == [("webgpu", "lib.so")]  # once
    fake.get_ep_devices = lambda: [SimpleNamespace(ep_name=name) for name in ("Cpu", "Wg", "Wg")]
    assert plugin_device(fake, WEBGPU, 1).ep_name == "Wg"
    with pytest.raises(ProviderError, match=r"no device webgpu:2.* has 2; choose webgpu:0 to web"):
        plugin_device(fake, WEBGPU, 2)


def test_calls_of_all_sessions_take_turns(tiny_bundle):
    _, _, model = open_on_values(tiny_bundle)
    thread = threading.Thread(target=model.forward, args=(FIRST,))
    with TURNS:
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    thread.join()
    assert model.num_rows == 1
