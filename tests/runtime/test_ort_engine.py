"""Opening a bundle with the CUDA provider: options, reasons, no silent fallback."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime as ort
import pytest

from dsbd_export.capture.cache_graphs import write_prune_graph
from dsbd_export.capture.forest_graph import ExportContract
from dsbd_export.parts.rows import EVERY_ROW
from dsbd_runtime.device.cuda_device import CudaDevice
from dsbd_runtime.device.ort_engine import (
    OrtEngine,
    cuda_options,
    open_on_provider,
    preload_libraries,
)
from dsbd_runtime.engine.providers import Provider, find_provider
from dsbd_runtime.errors import BundleError, CapacityError, DsbdError, EngineError, ProviderError
from dsbd_runtime.parts.attention.attention_rows import SRC_ROWS, WRITE_INDICES
from dsbd_runtime.parts.attention.cache_entries import equal_caches
from dsbd_runtime.parts.attention.kv_cache import DeviceCaches
from tests.ort_sessions import cpu_session
from tests.runtime.fake_cuda import FakeCudaRuntime
from tests.runtime.fake_device import FakeDevice

CUDA = find_provider("cuda")
FREE = lambda: 1000  # noqa: E731
NO_FALLBACK = "session.disable_cpu_ep_fallback"
# A provider that the CPU package offers and that runs no node of ours.
AZURE = Provider(
    name="azure",
    module="onnxruntime",
    ort_name="AzureExecutionProvider",
    extra="azure",
    backend="onnxruntime-device",
    dtypes=("fp32",),
    quantizations=("none",),
    has_device_caches=True,
    uses_cuda_graphs=False,
)


def test_options_name_the_device_and_its_queue():
    device = CudaDevice(1, FakeCudaRuntime())
    options = cuda_options(device)
    assert (options["device_id"], options["enable_cuda_graph"]) == ("1", "0")
    assert int(options["user_compute_stream"]) == device.stream
    assert options["use_tf32"] == "0"  # fp32 means fp32


def test_what_onnxruntime_prints_of_libraries_is_kept_as_a_reason(capsys):
    def preload():
        print("Failed to load libcublas.so.13: not found\nPlease follow the guide.")

    reason = preload_libraries(SimpleNamespace(preload_dlls=preload))
    assert reason == "Failed to load libcublas.so.13: not found Please follow the guide."
    assert capsys.readouterr().out == ""


def test_a_session_may_not_fall_back(tiny_bundle):
    opened = []

    def inference_session(path, settings, **arguments):
        opened.append((settings.get_session_config_entry(NO_FALLBACK), arguments))
        return path

    module = SimpleNamespace(SessionOptions=ort.SessionOptions, InferenceSession=inference_session)
    path, options = tiny_bundle.model_path("target"), {"device_id": "1"}
    assert open_on_provider(module, path, CUDA, options, "", FREE) == str(path)
    providers = [("CUDAExecutionProvider", options)]
    assert opened == [("1", {"providers": providers, "enable_fallback": False})]


def test_nodes_that_would_run_on_the_cpu_are_named(tiny_bundle):
    """On the real package: AzureExecutionProvider is in the session and takes no node."""
    words = r"does not run every node of .*prune\.onnx, the CPU would run Gather, TensorScatter;"
    with pytest.raises(ProviderError, match=words):
        open_on_provider(ort, tiny_bundle.prune_path("target"), AZURE, {}, "", FREE)


class OrtWithoutItsLibraries:
    """ONNX Runtime when the CUDA provider's library does not load: it goes on with the CPU."""

    SessionOptions = ort.SessionOptions

    @staticmethod
    def InferenceSession(path, settings, **arguments):
        assert arguments == {"providers": [("CUDAExecutionProvider", {})], "enable_fallback": False}
        azure = ["AzureExecutionProvider"]
        return ort.InferenceSession(path, settings, providers=azure)


@pytest.mark.parametrize(
    ("libraries", "said"),
    [("Failed to load libcudnn.so.9", "Failed to load libcudnn.so.9"), ("", "log on stderr")],
)
def test_a_provider_that_was_left_out_is_an_error_with_the_reason(tiny_bundle, libraries, said):
    path = tiny_bundle.model_path("target")
    with pytest.raises(
        ProviderError,
        match=rf"without CUDAExecutionProvider: .*{said}.*; in a checkout .* '\.\[gpu\]'",
    ):
        open_on_provider(OrtWithoutItsLibraries, path, CUDA, {}, libraries, FREE)


FAILURES = [  # (what ONNX Runtime raises, the error, what it says)
    (
        "[ONNXRuntimeError] : 1 : FAIL : Failed to allocate memory for buffer of size 262144",
        CapacityError,
        r"no memory on cuda:1 for .*model\.onnx, which takes [\d,]{5,} bytes .*; "
        "1,000 bytes were free; close other programs",
    ),
    (
        "CUDNN failure 1001: CUDNN_STATUS_NOT_INITIALIZED ; GPU=0",
        ProviderError,
        r"a CUDA library fails .*NOT_INITIALIZED.*libcudnn\.so\.9: not found.*pip install",
    ),
    ("CUDA failure 35: insufficient driver", ProviderError, "insufficient driver"),
    (
        "Load model failed:\nProtobuf",
        BundleError,
        r"cannot load .*model\.onnx on cuda \(Load model failed: Protobuf\); copy the bundle",
    ),
]


@pytest.mark.parametrize(("raised", "error", "said"), FAILURES)
def test_what_fails_at_the_opening_is_named_for_what_it_is(tiny_bundle, raised, error, said):
    def inference_session(path, settings, **arguments):
        raise RuntimeError(raised)

    module = SimpleNamespace(SessionOptions=ort.SessionOptions, InferenceSession=inference_session)
    path, device = tiny_bundle.model_path("target"), {"device_id": "1"}
    with pytest.raises(error, match=said):
        open_on_provider(module, path, CUDA, device, "libcudnn.so.9: not found", FREE)


class RecordingSession:
    """An InferenceSession that keeps whether it was told not to wait."""

    def __init__(self, run=lambda: None):
        self.ran = []
        self._run = run

    def io_binding(self):
        bind = lambda *arguments: None  # noqa: E731
        return SimpleNamespace(bind_input=bind, bind_output=bind)

    def run_with_iobinding(self, binding, options):
        self.ran.append(options.get_run_config_entry("disable_synchronize_execution_providers"))
        self._run()


def recording_engine(session):
    return OrtEngine(ort, session, Path("m.onnx"), device_type="cuda")


def test_a_call_does_not_wait_and_fails_for_want_of_memory_or_as_an_engine():
    reasons = [None, "[E] Failed to allocate memory\nfor requested buffer of size 99", "bad shape"]

    def run():
        if reasons[0] is not None:
            raise RuntimeError(reasons[0])

    session = RecordingSession(run)
    engine = recording_engine(session)
    call = engine.bind({}, {})
    call.run()
    assert session.ran == ["1"]
    for error, said in ((CapacityError, "allocate memory for requested"), (EngineError, "bad sh")):
        del reasons[0]
        with pytest.raises(error, match=said):
            call.run()
    for _ in range(2):
        engine.close()
    with pytest.raises(DsbdError, match=r"m\.onnx is closed"):
        engine.bind({}, {})


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_rows_of_every_type_move_in_place_after_an_address(tmp_path, dtype):
    geometry = equal_caches(1, num_heads=2, head_dim=8, dtype=dtype)
    path = tmp_path / "prune.onnx"
    caches = tuple((entry, EVERY_ROW) for entry in geometry)
    write_prune_graph(ExportContract(spaces=(EVERY_ROW,), caches=caches), path)
    session = cpu_session(path)
    engine = OrtEngine(ort, session, path, device_type="cpu")
    device = FakeDevice()
    caches = DeviceCaches(device, geometry, 6)
    for number, array in enumerate(caches.inputs.values()):
        memory = device.memory_of(array)
        memory[:] = np.arange(memory.size) % 100 + number
    before = [device.memory_of(array).copy() for array in caches.inputs.values()]
    small = {name: device.allocate(shape, "int64") for name, shape in MOVE_SHAPES.items()}
    for name, values in MOVE.items():
        device.memory_of(small[name]).view(np.int64)[:] = values
    engine.bind({**small, **caches.inputs}, caches.outputs).run()
    for array, old in zip(caches.inputs.values(), before, strict=True):
        found = device.memory_of(array).reshape(2, 6, -1)
        np.testing.assert_array_equal(found, old.reshape(2, 6, -1)[:, [0, 2, 3, 5, 4, 5]])


MOVE = {SRC_ROWS: [2, 3, 5], WRITE_INDICES: [1]}
MOVE_SHAPES = {SRC_ROWS: (3,), WRITE_INDICES: (1,)}
