"""The adapter, for the processes that run these tests."""

import importlib.util

import pytest

from scripts.software_adapter import Unavailable, put_in_place


@pytest.fixture(scope="session", autouse=True)
def adapter() -> None:
    """Let this process have the adapter; without it the tests are skipped, which say why."""
    if importlib.util.find_spec("onnxruntime_ep_webgpu") is None:
        pytest.skip("there is no package onnxruntime-ep-webgpu")
    try:
        put_in_place()
    except Unavailable as reason:
        pytest.skip(str(reason))
