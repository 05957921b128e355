"""Providers: known or refused, present or refused, never silently another one."""

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
    tried = [row for row in PROVIDERS if row.is_tried]
    found = [(row.name, row.ort_name, row.extra, row.dtypes) for row in tried]
    assert found == [row[:4] for row in ROWS]
    assert [(row.has_device_caches, row.uses_cuda_graphs) for row in tried] == [r[4:] for r in ROWS]
    assert {row.backend for row in PROVIDERS} == set(BACKENDS)
    for row in PROVIDERS:
        assert find_provider(row.name) is row


def test_where_there_is_no_wheel_pip_is_not_recommended():
    cuda, cpu = find_provider("cuda"), find_provider("cpu")
    assert "pip install" in cuda.install_line_on("x86_64")
    said = cuda.install_line_on("aarch64")
    assert "no onnxruntime with 'cuda' for aarch64 (Jetson, Grace): build it from" in said
    assert "pip install" in cpu.install_line_on("aarch64")


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


PLACES = [("cpu", "cpu", 0), ("cuda", "cuda", 0), ("cuda:0", "cuda", 0), ("cuda:12", "cuda", 12)]


@pytest.mark.parametrize(("text", "name", "device_id"), PLACES)
def test_a_number_after_a_colon_is_the_device(text, name, device_id):
    assert parse_placement(text) == Placement(find_provider(name), device_id)


NO_PLACES = [
    ("directml", "no execution provider 'directml'.*one of: cpu, cuda, webgpu, tens"),
    ("CPU", "no execution provider 'CPU'"),
    ("", "no execution provider ''"),
    ("gpu:1", "no execution provider 'gpu'"),
    ("cpu:0", "cpu has no numbered devices; write 'cpu'"),
    ("cuda:", "names the device '', expected a number: 'cuda:0'"),
    ("cuda:-1", "names the device '-1'"),
    ("cuda:1:2", "names the device '1:2'"),
    *(
        (row.name, f"provider '{row.name}', the plug-in .* is not tried")
        for row in PROVIDERS
        if not row.is_tried
    ),
]


@pytest.mark.parametrize(("text", "said"), NO_PLACES)
def test_what_is_no_provider_and_device_is_refused(tiny_bundle, text, said):
    with pytest.raises(ProviderError, match=said):
        load_causal_lm(tiny_bundle, "target", provider=text)


MODULES = "{'onnxruntime', 'onnx', 'torch', 'transformers', 'cuda'}"
PRINTED = {  # code, what it prints
    "without cuda-bindings": (
        "import sys; sys.modules['cuda.bindings.runtime'] = None\n"
        "from dsbd_runtime.device.cuda_device import import_cuda_runtime\n"
        "from dsbd_runtime.errors import ProviderError\n"
        "try: import_cuda_runtime('pip install this')\n"
        "except ProviderError as error: print(error)",
        r"the package cuda-bindings cannot be imported \(.*\); pip install this",
    ),
    "without onnxruntime": (
        "import sys; sys.modules['onnxruntime'] = None\n"
        "from dsbd_runtime.bundle_files.bundle import open_bundle\n"
        "from dsbd_runtime.errors import ProviderError\n"
        "from dsbd_runtime.loading import load_causal_lm\n"
        "bundle = open_bundle(sys.argv[1], verify=True)\n"
        "try: load_causal_lm(bundle, 'target')\n"
        "except ProviderError as error: print(error)",
        r".*in a checkout of dsbd-ort run: pip install -c constraints.txt -e '\.\[cpu\]'.*",
    ),
    "nothing heavy": (
        "import sys, dsbd_runtime.loading, dsbd_runtime.text.tokenizer\n"
        f"print(sorted({MODULES} & set(sys.modules)))",
        r"\[\]",
    ),
    **{
        f"telemetry {given}": (
            "import os\n"
            "os.environ.pop('ORT_DISABLE_TELEMETRY', None)\n"
            f"os.environ.update({given})\n"
            "from dsbd_runtime.ort.ort_module import import_ort_for\n"
            "from dsbd_runtime.engine.providers import find_provider\n"
            "import_ort_for(find_provider('cpu')); print(os.environ['ORT_DISABLE_TELEMETRY'])",
            printed,
        )
        for given, printed in (({}, "1"), ({"ORT_DISABLE_TELEMETRY": "0"}, "0"))
    },
}


@pytest.mark.parametrize(("code", "printed"), PRINTED.values(), ids=PRINTED)
def test_a_fresh_interpreter(tiny_bundle, code, printed):
    """Missing packages are the line that installs them, imports are light, telemetry is off."""
    assert re.fullmatch(f"{printed}\n", output_of(code, str(tiny_bundle.path)))


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


CONVOLUTION = ConvolutionRows(layer=0, width=4, num_ancestors=2, dtype="fp16")
NOT_RUN = [  # (provider, changes of an engine that it runs, what is said)
    (
        "cuda",
        {"quantization": "int8-dynamic"},
        "as int8, .* it runs none, int8-blocks, int4: export with --quantize int4 --dtype fp16",
    ),
    ("tensorrt", {"quantization": "int8"}, "as int8-blocks, .* runs none: .* --quantize none"),
    ("webgpu", {"form": None}, "has the form portable, .*'webgpu' runs webgpu; .* --form webgpu$"),
    ("webgpu", {"form": "cuda"}, "has the form cuda, .*'webgpu' runs webgpu; .* --form webgpu$"),
    ("tensorrt", {"form": "webgpu"}, "has the form webgpu, .* runs portable; .* --form portable$"),
    ("cpu", {"dtype": "bf16"}, "is in bf16, provider 'cpu' runs fp32, fp16; .* --dtype fp32"),
    *(
        (name, {"caches": [CONVOLUTION]}, f"has convolutions or recurrences, .*'{name}' cannot")
        for name in ("cuda", "tensorrt", "tensorrt-rtx")
    ),
]


@pytest.mark.parametrize(("provider", "changes", "said"), NOT_RUN)
def test_an_engine_that_a_provider_does_not_run_is_refused(tiny_bundle, provider, changes, said):
    row, path = find_provider(provider), Path("model.onnx")
    for quantization in row.quantizations:
        form = None if row.forms[0] == "portable" else row.forms[0]
        entry = replace(tiny_bundle.entry("target"), quantization=quantization, form=form)
        check_runnable(row, entry, path)
    with pytest.raises(ProviderError, match=rf"model\.onnx .*{said}"):
        check_runnable(row, replace(entry, **changes), path)


def test_kinds_of_quantization_are_those_of_the_export():
    kinds = dict.fromkeys(map(quantize_option, find_provider("cpu").quantizations))
    assert list(kinds) == ["none", "int8", "int8-blocks", "int4"]
