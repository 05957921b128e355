"""The adapter, and tiny pairs of WebGPU's form, for the processes that run these tests."""

import importlib.util
from pathlib import Path

import pytest

from scripts.shared_captures import SharedCaptures
from scripts.software_adapter import Unavailable, put_in_place
from tests.exports import family_pair
from tests.made_once import made_once

HEADS = ("full", "topk:16")


@pytest.fixture(scope="session", autouse=True)
def adapter() -> None:
    """Let this process have the adapter; without it the tests are skipped, which say why."""
    if importlib.util.find_spec("onnxruntime_ep_webgpu") is None:
        pytest.skip("there is no package onnxruntime-ep-webgpu")
    try:
        put_in_place()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def bundle_by_head(
    tmp_path_factory: pytest.TempPathFactory, captures: SharedCaptures
) -> dict[str, Path]:
    """A pair whose heads are grouped and whose draft has windows, with each kind of head."""
    found = {}
    for head in HEADS:
        name, make = family_pair("llama", "gemma2", form="webgpu", logits=head)
        folder = made_once(tmp_path_factory, name, lambda to, make=make: make(captures, to))
        found[head] = folder / "bundle"
    return found
