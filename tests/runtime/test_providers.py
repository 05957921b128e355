"""Providers: known or refused, present or refused, never silently another one."""

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import onnxruntime as ort
import pytest

import dsbd_runtime
from dsbd_runtime.bundle_files.manifest import quantize_option
from dsbd_runtime.engine.providers import (
    PROVIDERS,
    Placement,
    check_runnable,
    find_provider,
    parse_placement,
)
from dsbd_runtime.errors import ProviderError
from dsbd_runtime.loading import BACKENDS, check_available, load_causal_lm, load_pair
from dsbd_runtime.ort.ort_module import check_offered
from dsbd_runtime.parts.attention.cache_entries import ConvolutionRows

ROWS = [
    # name, what offers it, extra, dtypes, device caches, CUDA graphs
    ("cpu", "CPUExecutionProvider", "cpu", ("fp32", "fp16"), False, False),
    ("cuda", "CUDAExecutionProvider", "gpu", ("fp16", "bf16", "fp32"), True, True),
    ("webgpu", "WebGpuExecutionProvider", "webgpu", ("fp32", "fp16"), True, True),
    ("tensorrt", None, "tensorrt", ("fp16", "bf16", "fp32"), True, False),
    ("tensorrt-rtx", None, "tensorrt-rtx", ("fp16", "bf16", "fp32"), True, False),
]


def test_the_table():
    assert [
        (
            row.name,
            row.ort_name,
            row.extra,
            row.dtypes,
            row.has_device_caches,
            row.uses_cuda_graphs,
        )
        for row in PROVIDERS
        if row.is_tried
    ] == ROWS
    assert {row.backend for row in PROVIDERS} == set(BACKENDS)
    for row in PROVIDERS:
        assert find_provider(row.name) is row


@pytest.mark.parametrize("name", [row.name for row in PROVIDERS if not row.is_tried])
def test_a_plug_in_that_was_never_run_is_refused(tiny_bundle, name):
    with pytest.raises(ProviderError, match=f"provider '{name}', the plug-in .* is not tried"):
        load_causal_lm(tiny_bundle, "target", provider=name)


def test_where_there_is_no_wheel_pip_is_not_recommended():
    cuda, cpu = find_provider("cuda"), find_provider("cpu")
    assert "pip install" in cuda.install_line_on("x86_64")
    said = cuda.install_line_on("aarch64")
    assert "no onnxruntime with 'cuda' for aarch64 (Jetson, Grace): build it from" in said
    assert "pip install" in cpu.install_line_on("aarch64")


@pytest.mark.parametrize("name", ["directml", "CPU", ""])
def test_an_unknown_provider_is_refused_and_the_known_are_named(tiny_bundle, name):
    with pytest.raises(
        ProviderError, match=f"no execution provider '{name}'.*one of: cpu, cuda, webgpu, tens"
    ):
        load_causal_lm(tiny_bundle, "target", provider=name)


def test_a_provider_that_is_not_offered_is_refused():
    cuda = find_provider("cuda")
    check_offered(cuda, ["CUDAExecutionProvider", "CPUExecutionProvider"], "the session runs on")
    with pytest.raises(
        ProviderError,
        match=r"'cuda' needs CUDAExecutionProvider, the session runs on \['CPUExecutionProvider'\]"
        r"; pip uninstall onnxruntime .*, then in a checkout .* '\.\[gpu\]'",
    ):
        check_offered(cuda, ["CPUExecutionProvider"], "the session runs on")


@pytest.mark.parametrize("provider", ["cuda", "cuda:1"])
def test_cuda_without_its_package_is_refused_and_never_another_provider(tiny_bundle, provider):
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this package has the provider")
    half = replace(tiny_bundle.manifest.target, dtype="fp16")
    bundle = replace(tiny_bundle, manifest=replace(tiny_bundle.manifest, target=half))
    for load in (
        lambda: load_causal_lm(bundle, "target", provider=provider),
        lambda: load_pair(bundle, draft_provider=provider),
        lambda: check_available(parse_placement(provider)),
    ):
        with pytest.raises(ProviderError, match=r"needs CUDAExec.* in a checkout .* '\.\[gpu\]'"):
            load()


def test_tensorrt_without_its_module_says_how_to_get_it():
    if importlib.util.find_spec("tensorrt") is not None:
        pytest.skip("TensorRT is installed")
    with pytest.raises(
        ProviderError, match=r"needs the package tensorrt, .*; in a checkout .* '\.\[tensorrt\]'"
    ):
        check_available(parse_placement("tensorrt"))


def test_without_the_cuda_bindings_the_mend_is_named():
    code = (
        "import sys; sys.modules['cuda.bindings.runtime'] = None\n"
        "from dsbd_runtime.device.cuda_device import import_cuda_runtime\n"
        "from dsbd_runtime.errors import ProviderError\n"
        "try: import_cuda_runtime('pip install this')\n"
        "except ProviderError as error: print(error)"
    )
    assert re.fullmatch(
        r"the package cuda-bindings cannot be imported \(.*\); pip install this\n", output_of(code)
    )


PLACES = [("cpu", "cpu", 0), ("cuda", "cuda", 0), ("cuda:0", "cuda", 0), ("cuda:12", "cuda", 12)]


@pytest.mark.parametrize(("text", "name", "device_id"), PLACES)
def test_a_number_after_a_colon_is_the_device(text, name, device_id):
    assert parse_placement(text) == Placement(find_provider(name), device_id)


BAD_PLACES = [
    ("cpu:0", "cpu has no numbered devices; write 'cpu'"),
    ("cuda:", "names the device '', expected a number: 'cuda:0'"),
    ("cuda:-1", "names the device '-1'"),
    ("cuda:1:2", "names the device '1:2'"),
    ("gpu:1", "no execution provider 'gpu'"),
]


@pytest.mark.parametrize(("text", "said"), BAD_PLACES)
def test_a_bad_device_is_refused(text, said):
    with pytest.raises(ProviderError, match=said):
        parse_placement(text)


WITHOUT_ONNXRUNTIME = """
import sys
sys.modules["onnxruntime"] = None
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.parts.attention.cache_entries import ConvolutionRows
from dsbd_runtime.errors import ProviderError
from dsbd_runtime.loading import load_causal_lm
bundle = open_bundle(sys.argv[1], verify=True)
try:
    load_causal_lm(bundle, "target")
except ProviderError as error:
    print(error)
"""


def output_of(code, *arguments):
    """Return what a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(dsbd_runtime.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_missing_package_is_the_line_that_mends_it(tiny_bundle):
    printed = output_of(WITHOUT_ONNXRUNTIME, str(tiny_bundle.path))
    assert printed.count("\n") == 1
    assert "in a checkout of dsbd-ort run: pip install -c constraints.txt -e '.[cpu]'" in printed


def test_the_runtime_imports_nothing_heavy():
    code = (
        "import sys, dsbd_runtime.loading, dsbd_runtime.text.tokenizer\n"
        "print(sorted({'onnxruntime', 'onnx', 'torch', 'transformers', 'cuda'} & set(sys.modules)))"
    )
    assert output_of(code) == "[]\n"


@pytest.mark.parametrize(("given", "found"), [(None, "1"), ("0", "0")])
def test_telemetry_is_off_unless_the_environment_decides(given, found):
    code = (
        "import os, sys\n"
        f"os.environ.pop('ORT_DISABLE_TELEMETRY', None); given = {given!r}\n"
        "if given is not None: os.environ['ORT_DISABLE_TELEMETRY'] = given\n"
        "from dsbd_runtime.ort.ort_module import import_ort_for\n"
        "from dsbd_runtime.engine.providers import find_provider\n"
        "import_ort_for(find_provider('cpu')); print(os.environ['ORT_DISABLE_TELEMETRY'])"
    )
    assert output_of(code) == f"{found}\n"


@pytest.mark.parametrize(
    ("provider", "quantization", "runs"),
    [
        ("cpu", "int4-symmetric", "none, int8, int8-blocks, int4"),
        ("cuda", "int8-dynamic", "none, int8-blocks, int4: export with --quantize int4"),
        ("tensorrt", "int8", "none: export with --quantize none --dtype fp16"),
    ],
)
def test_a_quantization_without_kernels_is_refused(tiny_bundle, provider, quantization, runs):
    row, path = find_provider(provider), Path("model.onnx")
    entry = replace(tiny_bundle.entry("target"), quantization=quantization)
    check_runnable(row, replace(entry, quantization=row.quantizations[-1]), path)
    if quantization in row.quantizations:
        assert ", ".join(dict.fromkeys(map(quantize_option, row.quantizations))) == runs
        return
    with pytest.raises(ProviderError) as raised:
        check_runnable(row, entry, path)
    assert f"model.onnx is quantized as {quantize_option(quantization)}, for which provider" in str(
        raised.value
    )
    assert f"it runs {runs}" in str(raised.value)


@pytest.mark.parametrize(
    ("provider", "form", "usual"),
    [("webgpu", None, "webgpu"), ("webgpu", "cuda", "webgpu"), ("tensorrt", "webgpu", "portable")],
)
def test_another_form_is_refused(tiny_bundle, provider, form, usual):
    row, entry = find_provider(provider), replace(tiny_bundle.entry("target"), dtype="fp32")
    check_runnable(row, replace(entry, form=usual), Path("model.onnx"))
    with pytest.raises(ProviderError) as raised:
        check_runnable(row, replace(entry, form=form), Path("model.onnx"))
    assert f"model.onnx has the form {form or 'portable'}, provider '{provider}' runs {usual}" in (
        str(raised.value)
    )
    assert str(raised.value).endswith(f"; export with --form {usual}")


@pytest.mark.parametrize("provider", ["cuda", "tensorrt", "tensorrt-rtx"])
def test_recent_rows_are_kept_on_the_cpu_alone(tiny_bundle, provider):
    convolution = ConvolutionRows(layer=0, width=4, num_ancestors=2, dtype="fp16")
    entry = tiny_bundle.entry("target")
    entry = replace(entry, dtype="fp16", caches=[*entry.caches[1:], convolution])
    with pytest.raises(ProviderError, match="has convolutions or recurrences, whose rows") as found:
        check_runnable(find_provider(provider), entry, Path("model.onnx"))
    assert f"provider '{provider}' cannot fold yet; use provider 'cpu'" in str(found.value)
