"""Engines of the native library on WebGPU: Python's bits, call by call, and what a call costs."""

import os

import numpy as np
import pytest

from dsbd_forward.forward import Forward
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.loading import load_causal_lm
from tests.exports import family_pair
from tests.made_once import made_once
from tests.native.test_native_engine import (
    NativeEngine,
    assert_same_calls,
)
from tests.webgpu.conftest import HEADS
from tests.webgpu.test_calls import MOST, MOST_OF_A_PRUNE

pytestmark = pytest.mark.webgpu

SIZES = (1, 3, 40, 5, 5, 5, 5, 90, 3, 3, 3, 7, 300, 1, 1, 2, 90, 5)  # growth, calls of one size
PROVIDERS = {"webgpu": False, "webgpu+capture": True}


def check_engine(native_build, bundle, role, provider):
    """The same calls and prunes in both libraries; both record a call when its size repeats."""
    native = NativeEngine(native_build, bundle, role, provider)
    settings = EngineSettings(cuda_graphs=PROVIDERS[provider])
    opened = load_causal_lm(open_bundle(bundle), role, provider="webgpu", settings=settings)
    with opened as engine:
        assert_same_calls(native, engine, np.random.default_rng(0), SIZES)
    native.close()


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_calls_and_prunes_have_the_bits_of_python(native_build, bundle_by_head, head, role):
    check_engine(native_build, bundle_by_head[head], role, "webgpu+capture")


@pytest.mark.slow
def test_without_recorded_calls(native_build, bundle_by_head):
    check_engine(native_build, bundle_by_head["full"], "target", "webgpu")


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_other_weights(native_build, captures, tmp_path_factory, quantize):
    name, make = family_pair("llama", "gemma2", form="webgpu", quantize=quantize, max_kl=10.0)
    bundle = made_once(tmp_path_factory, name, lambda to: make(captures, to)) / "bundle"
    check_engine(native_build, bundle, "target", "webgpu+capture")


def linear_forward(num_rows, first):
    """Rows that see all before them."""
    rows = np.arange(num_rows)
    mask = np.tri(num_rows, first + num_rows, first, dtype=np.bool_)
    return Forward((rows * 7 + first) % 200, first + rows, mask, rows)


class CountedEngine(NativeEngine):
    """An engine whose launches are lines of a log."""

    def __init__(self, native_build, bundle, role, provider, log):
        environment = {**os.environ, "DSBD_TEST_VERBOSE": "1"}
        with log.open("w") as written:
            super().__init__(native_build, bundle, role, provider, stderr=written, env=environment)
        self._log = log.open()

    def counted(self):
        """Return the copies and launches since the last question."""
        counts = self.ask(counts=True)
        return counts | {"launches": self._log.read().count("Starting program")}

    def close(self):
        super().close()
        self._log.close()


@pytest.mark.parametrize(("role", "head", "launches", "uploads", "downloads"), MOST)
def test_costs_of_a_call(
    native_build,
    bundle_by_head,
    tmp_path,
    role,
    head,
    launches,
    uploads,
    downloads,
):
    """The limits of Python, piece by piece and once it is recorded; caches are never copied."""
    for provider, is_recorded in PROVIDERS.items():
        bundle = bundle_by_head[head]
        native = CountedEngine(native_build, bundle, role, provider, tmp_path / provider)
        native.forward(linear_forward(40, 0))
        set_ups = []
        for _ in range(4):
            native.counted()
            native.forward(linear_forward(5, 40))
            of_forward = native.counted()
            set_ups.append(of_forward["sets_up"])
            native.ask(keep=np.delete(np.arange(40), 20).tolist())
            of_prune = native.counted()
            native.forward(linear_forward(1, 39))
            native.ask(keep=list(range(40)))
        native.close()
        assert set_ups == [True, is_recorded, False, False]
        assert (of_forward["uploads"], of_forward["downloads"]) == (uploads, downloads)
        assert (of_prune["uploads"], of_prune["downloads"]) == (2, 0)
        assert of_forward["runs"] == of_prune["runs"] == 1
        if is_recorded:
            assert of_forward["launches"] == of_prune["launches"] == 0
        else:
            assert 0 < of_forward["launches"] <= launches
            assert 0 < of_prune["launches"] <= MOST_OF_A_PRUNE
