"""Engines of the native library on a stand-in for a device: memory of the host, copied as on one.

A graph has the same numbers there for the same sizes of a call. On a device the sizes are rounded
up, so that the numbers of both differ by rounding.
"""

import numpy as np
import pytest

from dsbd_forward.forward import Forward
from tests.native.test_native_engine import NO_PATHS, NativeEngine, random_forward
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle

KINDS = {
    "full logits": TinyModel(),
    "sliding window": TinyModel(sliding_window=5, num_layers=4),
    "top-k head": TinyModel(logits="topk:8"),
    "fp16": TinyModel(dtype="fp16"),
}
SIZES = (1, 3, 40, 100, 300, 1, 7, 600, 2)  # rows of the forwards; chunks, and growth in steps
UPLOADS = {"full logits": 6, "sliding window": 7, "top-k head": 6, "fp16": 6}


class Rows:
    """Number of rows and size of the vocabulary of an engine, for random_forward."""

    def __init__(self, vocab_size):
        self.num_rows, self.spec = 0, type("Spec", (), {"vocab_size": vocab_size})


def floats(bits):
    return np.array(bits, np.uint32).view(np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_prunes_and_growth_have_the_numbers_of_the_host(native_build, tmp_path, kind):
    """CUDA's way: the prune graph reads no other caches, so that growth passes through the host."""
    write_tiny_bundle(tmp_path / "bundle", target=KINDS[kind], draft=TinyModel(seed=1))
    host, device = (
        NativeEngine(native_build, tmp_path / "bundle", "target", where)
        for where in ("cpu", "stand-in")
    )
    rng, paths, rows = np.random.default_rng(0), NO_PATHS, Rows(258)
    for num_new in SIZES:
        forward = random_forward(rng, rows, paths, num_new)
        ours, theirs = (each.forward(forward) for each in (device, host))
        assert list(ours) == list(theirs)
        for name in set(ours) & {"logits", "top_logits", "logsumexp"}:
            np.testing.assert_allclose(floats(ours[name]), floats(theirs[name]), atol=1e-3)
        if len(forward.logit_rows) and ours.get("has_full"):
            full = [floats(each.ask(full=0)["logits"]) for each in (device, host)]
            np.testing.assert_allclose(*full, atol=1e-3)
        num_rows = rows.num_rows + num_new
        paths = np.vstack([np.pad(paths, ((0, 0), (0, num_new))), forward.mask])
        kept = np.flatnonzero(paths[rng.random(num_rows) < 0.1].any(axis=0))
        answers = [each.ask(keep=kept.tolist())["num_rows"] for each in (device, host)]
        paths, rows.num_rows = paths[kept][:, kept], len(kept)
        assert answers == [len(kept)] * 2
    host.close()
    device.close()


def linear_forward(num_rows, first):
    """Rows that see all before them; the logits of each are returned."""
    rows = np.arange(num_rows)
    mask = np.tri(num_rows, first + num_rows, first, dtype=np.bool_)
    return Forward((rows * 7 + first) % 200, first + rows, mask, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_runs_of_a_call(native_build, tmp_path, kind):
    """The small inputs and the mark of an output, one run, the outputs of the head; no caches."""
    write_tiny_bundle(tmp_path / "bundle", target=KINDS[kind], draft=TinyModel(seed=1))
    native = NativeEngine(native_build, tmp_path / "bundle", "target", "stand-in")
    native.forward(linear_forward(40, 0))
    native.ask(counts=True)
    native.forward(linear_forward(5, 40))
    downloads = 3 if kind == "top-k head" else 1
    of_all = {"runs": 1, "recorded": 0, "sets_up": True}
    assert native.ask(counts=True) == of_all | {"uploads": UPLOADS[kind], "downloads": downloads}
    native.ask(keep=np.delete(np.arange(45), 20).tolist())
    assert native.ask(counts=True) == of_all | {"uploads": 2, "downloads": 0}
    native.close()


def test_a_lost_device(native_build, tmp_path):
    """Calls that the device drops without an error are found by their outputs."""
    write_tiny_bundle(tmp_path / "bundle", target=TinyModel(), draft=TinyModel(seed=1))
    native = NativeEngine(native_build, tmp_path / "bundle", "target", "stand-in")
    assert "logits" in native.forward(linear_forward(3, 0))
    native.ask(lose=True)
    error = native.forward(linear_forward(3, 3))["error"]
    assert error.startswith("stand-in:0 dropped a call"), error
    assert error.endswith("if the device is lost: open the bundle again")
    native.close()
