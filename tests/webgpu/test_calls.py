"""Calls of one engine on WebGPU: numbers, bits, and what a call costs, with limits."""

import numpy as np
import pytest

from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.device import ort_engine
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.loading import load_causal_lm
from lab.gpu.kinds_of_ways import count_by_kind
from tests.exports import family_pair
from tests.made_once import made_once
from tests.webgpu.conftest import HEADS
from tests.webgpu.forwards import append, counted, forward

pytestmark = pytest.mark.webgpu

NUM_LAYERS = 2  # of both tiny models
MOST = [
    # role, head, launches of a forward at most, arrays copied in, arrays copied out
    ("target", "full", 36 * NUM_LAYERS, 6, 1),
    ("target", "topk:16", 36 * NUM_LAYERS + 8, 6, 3),
    ("draft", "full", 42 * NUM_LAYERS, 7, 1),  # a mask more, for windows
    ("draft", "topk:16", 42 * NUM_LAYERS + 8, 7, 3),
]
MOST_OF_A_PRUNE = 7 * NUM_LAYERS + 1
BY_FORM = {  # attention: kinds of ways to compute a path that keep every bit
    "fused": {"the same calls again", "fixed rows, fixed places"},
    "exact": {
        "the same calls again",
        "any rows, any places",
        "fixed rows, any places",
        "fixed rows, fixed places",
    },
}


def opened(bundle, role="target", **settings):
    settings = EngineSettings(**settings)
    return load_causal_lm(open_bundle(bundle), role, provider="webgpu", settings=settings)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_any_calls_and_prunes_have_the_numbers_of_the_cpu(bundle_by_head, role, head):
    """Sizes are recorded at their second call, so recording and replaying are among the calls."""
    bundle = bundle_by_head[head]
    rng = np.random.default_rng(0)
    with opened(bundle, role) as model, load_causal_lm(open_bundle(bundle), role) as reference:
        for number in range(60):
            num_rows = model.num_rows
            kept = rng.permutation(num_rows)[: max(num_rows - rng.integers(0, 4), 0)]
            if num_rows > 90:
                kept = kept[:0]
            size = int(rng.choice([1, 2, 3, 5, 8, 20]))
            found = []
            for each in (model, reference):
                each.keep(np.sort(kept))
                found.append(forward(each, size))
            np.testing.assert_allclose(*found, atol=1e-4, err_msg=f"call {number}")


@pytest.mark.parametrize(("role", "head", "launches", "uploads", "downloads"), MOST)
def test_costs_of_a_call(
    bundle_by_head, role, head, launches, uploads, downloads, capfd, monkeypatch
):
    """Piece by piece, and once it is recorded; no array of the caches is ever copied."""
    monkeypatch.setattr(ort_engine, "LOG_ERRORS", 0)  # every launch is a line of the log
    for cuda_graphs in (False, True):
        with opened(bundle_by_head[head], role, cuda_graphs=cuda_graphs) as model:
            forward(model, 40)
            set_ups = []
            for _ in range(4):
                with counted(capfd, monkeypatch) as of_forward:
                    set_ups.append(append(model, 5).sets_up)
                with counted(capfd, monkeypatch) as of_prune:
                    model.keep(np.delete(np.arange(40), 20))
                forward(model, 1)
                model.keep(np.arange(40))
        assert set_ups == [True, cuda_graphs, False, False]
        assert (of_forward.uploads, of_forward.downloads) == (uploads, downloads)
        assert (of_prune.uploads, of_prune.downloads) == (2, 0)
        if cuda_graphs:
            assert of_forward.dispatches == of_prune.dispatches == 0
        else:
            assert 0 < of_forward.dispatches <= launches
            assert 0 < of_prune.dispatches <= MOST_OF_A_PRUNE


@pytest.mark.slow
@pytest.mark.parametrize("attention", BY_FORM)
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_bits_by_neighbours_place_and_repetition(
    attention, cuda_graphs, captures, tmp_path_factory
):
    """As far as they are the same here, on one adapter: no bundle claims it."""
    name, make = family_pair("llama", "gemma2", form="webgpu", attention=attention)
    bundle = made_once(tmp_path_factory, name, lambda to: make(captures, to)) / "bundle"
    with opened(bundle, cuda_graphs=cuda_graphs) as model:
        counts = count_by_kind(model, num_tokens=40, num_ways=5)
    kept = {kind for kind, count in counts.items() if not count.num_other_ways}
    assert kept >= BY_FORM[attention], counts


@pytest.mark.slow
def test_bits_by_capacity_and_recording(bundle_by_head):
    bundle = bundle_by_head["full"]
    found = []
    for settings in ({"cuda_graphs": False}, {"cuda_graphs": True}):
        for num_before in (0, 150):  # the second grows the caches first
            with opened(bundle, **settings) as model:
                forward(model, num_before) if num_before else None
                model.keep(np.arange(0))
                for _ in range(4):
                    model.keep(np.arange(0))
                    found.append(np.concatenate([forward(model, size) for size in (9, 4, 1, 4)]))
    for each in found[1:]:
        np.testing.assert_array_equal(each, found[0])
