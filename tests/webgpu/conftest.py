"""The adapter, and tiny pairs of WebGPU's form, for the processes that run these tests."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from dsbd_runtime.engine.providers import find_provider
from dsbd_runtime.ort.ort_module import import_ort
from dsbd_runtime.plugin.plugin_module import plugin_devices
from scripts.shared_captures import SharedCaptures
from scripts.software_adapter import Unavailable, put_in_place, variables
from tests.exports import family_pair
from tests.made_once import made_once
from tests.native.conftest import native_build, with_native  # noqa: F401 (fixtures)

_HERE = Path(__file__).parent
HEADS = ("full", "topk:16")


_unavailable: list[str] = []  # why these tests are skipped


def pytest_collection_finish(session: pytest.Session) -> None:
    """Load the plug-in with the adapter, before any test: devices are looked for only once.

    dsbd-inspect loads the plug-in in other tests too. The variables are not theirs: a process that
    they start would print the plug-in's warning of a GPU in software.
    """
    if not any(_HERE in item.path.parents for item in session.items):
        return
    try:
        if importlib.util.find_spec("onnxruntime_ep_webgpu") is None:
            raise Unavailable("there is no package onnxruntime-ep-webgpu")
        with mock.patch.dict(os.environ):
            put_in_place()
            plugin_devices(import_ort(), find_provider("webgpu"))
    except Unavailable as reason:
        _unavailable.append(str(reason))


@pytest.fixture(scope="session", autouse=True)
def adapter() -> None:
    """Skip the tests of a process that has no adapter."""
    if _unavailable:
        pytest.skip(_unavailable[0])


@pytest.fixture(scope="module", autouse=True)
def variables_of_adapter() -> Iterator[None]:
    """Let pipelines, also those of a module, and the processes that a test starts find it."""
    with mock.patch.dict(os.environ, variables()):
        yield


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
