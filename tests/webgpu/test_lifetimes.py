"""Engines on WebGPU over their lives: growth, several at a time, closing, and what is missing."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dsbd_errors import DsbdError
from dsbd_ort import Pipeline
from dsbd_ort.decoding import WithResult
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.loading import load_causal_lm
from scripts.software_adapter import OWN
from tests.webgpu.forwards import forward

pytestmark = pytest.mark.webgpu

ROOT = Path(__file__).parents[2]
DSBD = {"strategy": "dsbd", "num_beams": 2, "draft_length": 2, "draft_policy": "fixed"}
PROMPT = "def read(path):"
OPEN = """
import sys
from scripts.software_adapter import put_in_place
put_in_place()
{before}
from dsbd_errors import DsbdError
from dsbd_ort import Pipeline
try:
    Pipeline.from_bundle(sys.argv[1], provider="webgpu").close()
except DsbdError as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""


def opened_after(before, bundle):
    """Return the error of a pipeline in a process of its own, prepared by a statement."""
    command = [sys.executable, "-c", OPEN.format(before=before), str(bundle)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def tokens(pipe, seed, **options):
    result = pipe.generate(PROMPT, seed=seed, max_new_tokens=10, **DSBD, **options)
    return [sequence.token_ids for sequence in result.sequences]


@pytest.fixture(scope="module")
def bundle(bundle_by_head):
    return bundle_by_head["full"]


@pytest.fixture(scope="module")
def wanted(bundle):
    """The tokens of the CPU, by seed."""
    with Pipeline.from_bundle(bundle, num_threads=1) as pipe:
        return {seed: tokens(pipe, seed) for seed in range(4)}


def test_rows_survive_growth(bundle):
    """The caches grow between calls; the logits of every call are those of the CPU."""
    by_provider = {}
    for provider in ("cpu", "webgpu"):
        with load_causal_lm(open_bundle(bundle), "target", provider=provider) as model:
            sizes, logits = [], []
            for num_rows in (20, 70, 1, 90, 40):
                logits.append(forward(model, num_rows))
                sizes.append(model.kv_bytes)
                model.keep(np.delete(np.arange(model.num_rows), [3, model.num_rows - 2]))
            assert sizes[-1] > sizes[0], sizes
            by_provider[provider] = np.concatenate(logits)
    np.testing.assert_allclose(by_provider["webgpu"], by_provider["cpu"], atol=1e-4)


def test_a_context_that_is_full_is_the_same_error_as_on_the_cpu(bundle):
    errors = []
    for provider in ("cpu", "webgpu"):
        with load_causal_lm(open_bundle(bundle), "target", provider=provider) as model:
            with pytest.raises(DsbdError) as error:
                forward(model, model.context_length + 1)
            errors.append((error.type, str(error.value)))
            forward(model, 3)  # it goes on
    assert errors[0] == errors[1]


def test_two_pipelines_in_two_threads(bundle, wanted):
    """Calls of the process take turns: without that ONNX Runtime fails or crashes."""
    with (
        Pipeline.from_bundle(bundle, provider="webgpu") as one,
        Pipeline.from_bundle(bundle, provider="webgpu") as two,
        ThreadPoolExecutor(2) as threads,
    ):
        found = [
            threads.submit(lambda pipe=pipe: {seed: tokens(pipe, seed) for seed in wanted})
            for pipe in (one, two)
        ]
        assert [each.result() for each in found] == [wanted, wanted]


def test_target_on_webgpu_and_draft_on_the_cpu(bundle, wanted):
    with Pipeline.from_bundle(bundle, provider="webgpu", draft_provider="cpu") as pipe:
        assert {seed: tokens(pipe, seed) for seed in wanted} == wanted


def test_closing_in_the_middle_of_a_request(bundle, wanted):
    """A stream that is given up leaves nothing to what is opened next."""
    with Pipeline.from_bundle(bundle, provider="webgpu") as pipe:
        pieces = pipe.stream(PROMPT, seed=0, max_new_tokens=100, **DSBD)
        next(pieces)
        pieces.close()
    with Pipeline.from_bundle(bundle, provider="webgpu") as again:
        assert tokens(again, 0) == wanted[0]


def test_closing_while_another_thread_generates(bundle, wanted):
    """Closing waits for the requests of that pipeline, and leaves the other pipeline alone."""
    with Pipeline.from_bundle(bundle, provider="webgpu") as other, ThreadPoolExecutor(2) as threads:
        pipe = Pipeline.from_bundle(bundle, provider="webgpu")
        begun = threading.Event()

        def running():
            pieces = WithResult(pipe.stream(PROMPT, seed=0, max_new_tokens=10, **DSBD))
            for _ in pieces:
                begun.set()
            return [sequence.token_ids for sequence in pieces.result.sequences]

        found = [threads.submit(running), threads.submit(tokens, other, 1)]
        begun.wait(60)
        pipe.close()
        assert [each.result() for each in found] == [wanted[0], wanted[1]]


@pytest.mark.skipif(os.environ.get("DSBD_WEBGPU") == OWN, reason="of Vulkan's drivers alone")
def test_no_adapter(bundle):
    error = opened_after("import os; os.environ['VK_DRIVER_FILES'] = os.devnull", bundle)
    assert error.startswith("ProviderError: provider 'webgpu'"), error
    assert "adapter" in error
    assert "use provider 'cpu'" in error


def test_no_device_is_offered_unless_software_is_allowed(bundle):
    before = "import os; del os.environ['ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER']"
    error = opened_after(before, bundle)
    if error:  # a machine with a GPU offers that
        assert error.startswith("ProviderError: provider 'webgpu' finds no GPU"), error
        assert "driver" in error


def test_no_package(bundle):
    before = "sys.modules['onnxruntime_ep_webgpu'] = None"
    error = opened_after(before, bundle)
    assert error.startswith("ProviderError: provider 'webgpu' needs the plug-in"), error
    assert "[webgpu]'" in error  # the extra


def test_another_form(demo_bundle):
    with pytest.raises(DsbdError, match="--form webgpu"):
        Pipeline.from_bundle(demo_bundle, provider="webgpu")


def test_a_bundle_of_the_portable_form_is_refused_by_its_form(int8_bundle):
    with pytest.raises(DsbdError, match=r"has the form portable.*export with --form webgpu"):
        Pipeline.from_bundle(int8_bundle, provider="webgpu")
