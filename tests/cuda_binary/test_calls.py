"""Host calls and GPU queue entries of a forward and a prune, with limits."""

import pytest

from dsbd_export.config import ExportConfig
from dsbd_export.demo import demo_pair
from dsbd_export.pipeline import export_bundle

pytestmark = [pytest.mark.cuda_binary, pytest.mark.slow]  # a wheel of 256 MB, 45 s

SIZES = [1, 8, 32]
NUM_LAYERS = 6  # of the demo pair's target
MOST_LAUNCHES = [
    # rows of a forward, launches of it at most: 6 layers, embedding, masks, head, top-k
    (1, 153),
    (8, 179),
    (32, 179),
    ("prune", 24),
]


def test_launches_copies_and_waits_piece_by_piece(worker, fp16_bundle):
    found = worker.run(
        "count_forwards", path=fp16_bundle, role="target", sizes=SIZES, cuda_graphs=False
    )
    for (size, most), counts in zip(MOST_LAUNCHES, found, strict=True):
        assert 0 < counts.pop("launches") <= most, size
        is_prune = size == "prune"
        within = counts.pop("copies_within")
        assert within == 0 if is_prune else within <= 27, size  # a prune updates rows in place
        assert counts == {
            "copies_in": 1,
            "copies_out": 0 if is_prune else 1,
            "waits": 0 if is_prune else 1,
            "takes": 0,
            "graphs": 0,
            "refused": 0,
        }


def test_cuda_form_launches_three_kernels_less_a_layer(worker, tmp_path):
    target, _ = demo_pair()
    config = ExportConfig(
        target=str(target), output=tmp_path / "b", dtype="fp16", logits="topk:64", form="cuda"
    )
    export_bundle(config, report=lambda _: None)
    [eight, _prune] = worker.run(
        "count_forwards", path=str(config.output), role="target", sizes=[8], cuda_graphs=False
    )
    assert eight["launches"] <= 179 - 6 * NUM_LAYERS + 2  # masks: a Where and a Cast
    assert (eight["copies_in"], eight["copies_out"], eight["waits"]) == (1, 1, 1)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_by_default_a_size_that_returns_is_one_launch(worker, fp16_bundle, role):
    for counts in worker.run("count_forwards", path=fp16_bundle, role=role, sizes=SIZES)[:-1]:
        assert counts == {
            "launches": 1,
            "copies_in": 0,  # it is in the graph
            "copies_out": 1,
            "copies_within": 0,
            "waits": 1,
            "takes": 0,
            "graphs": 1,
            "refused": 0,
        }


def test_the_laboratory_times_what_its_settings_name(worker, fp16_bundle):
    found = worker.run("time_settings", path=fp16_bundle)
    assert {name: counts["graphs"] > 0 for name, counts in found.items()} == {
        "as it is": True,
        "--no-cuda-graphs": False,
    }
    assert all(counts["refused"] == 0 for counts in found.values())
    plain, queued = found.values()
    assert plain["launches"] < queued["launches"]


def test_a_recorded_call_copies_from_our_memory_alone(worker, fp16_bundle):
    """ONNX Runtime's own staging memory is reused by then: a replay would read something else."""
    copies = worker.run("captured_copies", path=fp16_bundle, role="target")
    assert [line.rsplit(" ", 3)[1:] for line in copies] == [["pinned", "to", "device"]] * 3


def test_other_threads_replay_what_one_has_recorded(worker, fp16_bundle):
    first, *others = worker.run("use_from_threads", path=fp16_bundle, num_threads=3)
    assert first["refused"] == 0
    for counts in others:  # four forwards and four prunes each
        assert counts["launches"] == counts["graphs"] == 8
        assert counts["copies_out"] == 4 and counts["takes"] == counts["refused"] == 0
