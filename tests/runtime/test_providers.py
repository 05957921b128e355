"""Providers: known or refused, present or refused, never silently another one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dsbd_runtime
from dsbd_runtime.bundle import Bundle
from dsbd_runtime.errors import ProviderError
from dsbd_runtime.loading import load_causal_lm
from dsbd_runtime.providers import PROVIDERS, Provider, check_offered, find_provider

CUDA = Provider(name="cuda", ort_name="CUDAExecutionProvider", extra="gpu", dtypes=("fp16",))


def test_the_table_has_the_cpu() -> None:
    assert find_provider("cpu") is PROVIDERS[0]
    assert PROVIDERS[0].ort_name == "CPUExecutionProvider"


@pytest.mark.parametrize("name", ["cuda", "tensorrt", "CPU", ""])
def test_an_unknown_provider_is_refused_and_the_known_are_named(
    tiny_bundle: Bundle, name: str
) -> None:
    with pytest.raises(ProviderError, match=f"no execution provider '{name}'.*one of: cpu"):
        load_causal_lm(tiny_bundle, "target", provider=name)


def test_a_provider_that_is_not_offered_is_refused() -> None:
    check_offered(CUDA, ["CUDAExecutionProvider", "CPUExecutionProvider"], "the session runs on")
    with pytest.raises(
        ProviderError,
        match=r"'cuda' needs CUDAExecutionProvider, the session runs on \['CPUExecutionProvider'\]"
        r'; pip install "dsbd-ort\[gpu\]"',
    ):
        check_offered(CUDA, ["CPUExecutionProvider"], "the session runs on")


WITHOUT_ONNXRUNTIME = """
import sys
sys.modules["onnxruntime"] = None
from dsbd_runtime.bundle import open_bundle
from dsbd_runtime.errors import ProviderError
from dsbd_runtime.loading import load_causal_lm
bundle = open_bundle(sys.argv[1], verify=True)
try:
    load_causal_lm(bundle, "target")
except ProviderError as error:
    print(error)
"""


def output_of(code: str, *arguments: str) -> str:
    """Return what a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(dsbd_runtime.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_missing_package_is_the_line_that_mends_it(tiny_bundle: Bundle) -> None:
    printed = output_of(WITHOUT_ONNXRUNTIME, str(tiny_bundle.path))
    assert printed.count("\n") == 1
    assert 'pip install "dsbd-ort[cpu]"' in printed


def test_the_runtime_imports_nothing_heavy() -> None:
    code = (
        "import sys, dsbd_runtime.loading, dsbd_runtime.tokenizer\n"
        "print(sorted({'onnxruntime', 'onnx', 'torch', 'transformers'} & set(sys.modules)))"
    )
    assert output_of(code) == "[]\n"
