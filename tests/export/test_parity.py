"""The parity gate lets right graphs pass and stops wrong ones, also after a fold; its memory."""

import math
import mmap
import shutil
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from dsbd_export.checkpoints.checkpoint import limited_threads
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import ModelOptions
from dsbd_export.errors import ExportError
from dsbd_export.gate.parity import MEAN_KL, ParityLimit, advice, divergence
from dsbd_export.gate.parity_engine import dropped_pages, parity_engine, see_rows
from dsbd_export.opening import source_of
from dsbd_export.parity_cases import TREE_PARENTS, ForestCase, forest_cases, reference_logits
from dsbd_export.progress import silent
from dsbd_export.tensorrt.tensorrt_build import check_buildable
from dsbd_export.tokenizers.tokenizer_files import highest_token_id, read_tokenizer
from dsbd_runtime.bundle_files.bundle import ParityCase, ParityReport
from dsbd_runtime.parts.attention.cache_entries import state_decay_name
from dsbd_runtime.parts.recent.recent_rows import RecentRows
from scripts.family_checkpoints import write_family_checkpoint
from tests.export.conftest import opened
from tests.export.gate import (
    bundle_of,
    check_parity,
    export_alone,
    references,
)
from tests.made_once import made_once

ATOL = 1e-4
LIMIT = ParityLimit("max_abs_error", ATOL)


@pytest.fixture
def folder(exported, tmp_path):
    shutil.copytree(exported.config.output / "target", tmp_path / "target")
    return tmp_path / "target"


def test_a_right_graph_passes_with_rounding_errors_only(exported, exported_others):
    for bundle in (exported, exported_others):
        for entry in (bundle.result.manifest.target, bundle.result.manifest.draft):
            assert entry.parity.max_abs_error < 2e-5
            assert (entry.parity.measure, entry.parity.limit) == ("max_abs_error", ATOL)
            assert entry.parity.mean_kl < 1e-8 and entry.parity.top1_agreement == 1
            *cases, text = [(case.name, case.prompt_length) for case in entry.parity.cases]
            assert text == ("text", 256)  # the whole context
            kinds = ("prefill", "decode", "tree")
            lengths = (1, 17, 128) if entry.sliding_window is None else (1, 17, 25, 128)
            assert cases == [(kind, length) for length in lengths for kind in kinds]


def test_cases_fit_the_context_and_have_tokens_of_the_tokenizer(checkpoint):
    """Rows of a padded vocabulary may hold anything: a twin's have logits in the millions."""
    lengths = {case.prompt_length for case in forest_cases(replace(checkpoint, context_length=20))}
    assert lengths == {1, 17}
    highest = highest_token_id(read_tokenizer(checkpoint))
    drawn = np.concatenate(
        [case.node_ids for case in forest_cases(replace(checkpoint, vocab_size=10**6))]
    )
    assert 0.9 * highest < drawn.max() <= highest


def test_the_logits_of_a_tree_are_those_of_its_paths(checkpoint):
    model = load_model(checkpoint)
    tree = next(case for case in forest_cases(checkpoint) if case.name == "tree")
    path = [0, 2, 6]
    chain = ForestCase(
        name="chain",
        prefix_ids=tree.prefix_ids,
        node_ids=tree.node_ids[path],
        parents=np.array([-1, 0, 1]),
        rows=np.arange(3),
    )
    found = reference_logits(model, tree)
    assert found.shape == (len(TREE_PARENTS), 300) and np.isfinite(found).all()
    np.testing.assert_allclose(found[path], reference_logits(model, chain), atol=1e-5)


def test_threads_are_those_of_torch_and_only_in_the_block(exported, checkpoint):
    before = torch.get_num_threads()
    with limited_threads(3):
        bundle = bundle_of(exported.config.output / "target", checkpoint)
        with parity_engine(bundle, "target") as engine:
            options = engine.model._session._engine.get_session_options()
            assert options.intra_op_num_threads == 3
        with limited_threads(None):
            assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == before


def test_what_nodes_see():
    visible, positions = see_rows(np.array([-1, -1, 0]), first_row=1, capacity=5)
    assert positions.tolist() == [1, 1, 2]
    assert visible.astype(int).tolist() == [[1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0]]
    # Two requests: one has row 0 and two new nodes, the other has rows 1 and 2 and one new node.
    first = see_rows(np.array([-1, 0]), 3, 6, (0, 1))
    second = see_rows(np.array([-1]), 5, 6, (1, 3))
    assert [*first[1], *second[1]] == [1, 2, 2]
    wanted = [[1, 0, 0, 1, 0, 0], [1, 0, 0, 1, 1, 0], [0, 1, 1, 0, 0, 1]]
    assert np.concatenate([first[0], second[0]]).astype(int).tolist() == wanted


def damage(folder, edit):
    model = onnx.load(folder / "model.onnx")
    (folder / "model.onnx.data").unlink()
    edit(model.graph)
    onnx.save(model, folder / "model.onnx")


def node_of(graph: onnx.GraphProto, op_type: str) -> onnx.NodeProto:
    return next(node for node in graph.node if node.op_type == op_type)


def scale_one_weight(graph: onnx.GraphProto) -> None:
    matmul = [node for node in graph.node if node.op_type == "MatMul"][-1]
    weight = next(tensor for tensor in graph.initializer if tensor.name == matmul.input[1])
    scaled = numpy_helper.to_array(weight) * np.float32(1.01)
    weight.CopyFrom(numpy_helper.from_array(scaled, weight.name))


def count_rows(graph: onnx.GraphProto) -> None:
    """Siblings share a position; a graph that takes rows for positions is right for any chain."""
    one_by_one = [
        onnx.helper.make_node("Shape", ["input_ids"], ["num_nodes"], start=1),
        onnx.helper.make_node("Squeeze", ["num_nodes"], ["limit"]),
        onnx.helper.make_node("Range", ["zero", "limit", "one"], ["steps"]),
        onnx.helper.make_node("Add", ["steps", "write_indices"], ["rows"]),
        onnx.helper.make_node("Reshape", ["rows", "column"], ["row_positions"]),
    ]
    node_of(graph, "Cast").input[0] = "row_positions"
    for node in reversed(one_by_one):
        graph.node.insert(0, node)
    for name, value in (("zero", 0), ("one", 1), ("column", [1, -1, 1])):
        graph.initializer.append(numpy_helper.from_array(np.array(value, np.int64), name))


DAMAGE = [
    (scale_one_weight, r"parity failed.*llama.*prefill.*limit is 0.0001"),
    (lambda graph: node_of(graph, "Attention").input.pop(), "parity failed"),  # the mask
    (count_rows, "case tree after 1 tokens"),
]


@pytest.mark.parametrize(("edit", "words"), DAMAGE)
def test_a_damaged_graph_fails(folder, checkpoint, wanted, edit, words):
    damage(folder, edit)
    with pytest.raises(ExportError, match=words):
        check_parity(folder, checkpoint, wanted, LIMIT)


def test_no_number_and_another_shape_fail(exported, checkpoint, wanted):
    for change, words in (
        (lambda logits: logits * np.nan, "differs from the checkpoint by nan"),
        (lambda logits: logits[:, :-1], "by inf"),
    ):
        others = [replace(reference, logits=change(reference.logits)) for reference in wanted]
        with pytest.raises(ExportError, match=words):
            check_parity(exported.config.output / "target", checkpoint, others, LIMIT)


def test_a_prune_graph_that_misses_a_cache_and_one_that_cannot_run_fail(folder, checkpoint, wanted):
    model = onnx.load(folder / "prune.onnx")
    node_of(model.graph, "Gather").input[0] = "past_key_values.1.value"
    onnx.save(model, folder / "prune.onnx")
    with pytest.raises(ExportError, match=r"prune\.onnx.*moves cache rows wrongly"):
        check_parity(folder, checkpoint, wanted, LIMIT)
    (folder / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(ExportError, match="parity failed: onnxruntime cannot run the graph"):
        check_parity(folder, checkpoint, wanted, LIMIT)


def test_rounding_of_the_checkpoint_alone_is_allowed(exported, folder, checkpoint, wanted):
    """Large activations round more than a fixed limit knows: fp32 is judged by float64."""
    source = source_of(checkpoint)
    model = source.load("fp32", silent)
    tight = ParityLimit("max_abs_error", 1e-9)  # as if the model were a million times larger

    computed = []

    def in_float64(cases):
        for case in cases:
            computed.append(case)
            yield source.logits_in_float64(model, case)

    target = exported.config.output / "target"
    with pytest.raises(ExportError, match="the limit is 1e-09"):
        check_parity(target, checkpoint, wanted, tight)
    report = check_parity(target, checkpoint, wanted, tight, in_float64)
    assert report.max_abs_error <= report.limit < 2e-4
    # float64 is slow: the case with the largest error comes first, and few others are needed
    errors = [each.max_abs_error for each in report.cases]
    assert computed[0] is wanted[int(np.argmax(errors))].case
    assert len(computed) <= len(errors) / 2
    damage(folder, scale_one_weight)
    with pytest.raises(ExportError, match="parity failed"):
        check_parity(folder, checkpoint, wanted, tight, in_float64)


ADVICE = [  # (quantize, KL, what is named)
    ("int8-dynamic", 9e-3, None),
    ("int8-dynamic", 0.035, "nearer is --quantize int8-blocks"),
    ("int8-blocks", 0.015, "nearer is fp32 or fp16 without --quantize"),
    ("int4", 0.05, None),
    ("int4", 0.2, "nearer is --quantize int8"),
]


@pytest.mark.parametrize(("quantize", "kl", "named"), ADVICE)
def test_a_model_that_is_far_gets_advice(checkpoint, quantize, kl, named):
    report = ParityReport(
        measure=MEAN_KL, limit=1.0, max_abs_error=0.5, mean_kl=kl, top1_agreement=0.91, cases=[]
    )
    found = advice(checkpoint, ModelOptions(quantize=quantize), report)
    if named is None:
        assert found is None
    else:
        assert found is not None and named in found and f"{kl:.2g}" in found and "91%" in found


def test_a_float64_that_is_another_computation_allows_nothing(exported, checkpoint, wanted):
    tight = ParityLimit("max_abs_error", 1e-9)
    of_case = {id(each.case): each.logits for each in wanted}
    for error in (0.1, np.nan):
        others = partial(map, lambda case, error=error: of_case[id(case)] + error)
        with pytest.raises(ExportError, match="the limit is 1e-09"):
            check_parity(exported.config.output / "target", checkpoint, wanted, tight, others)


def test_a_mean_of_one_row_is_no_mean():
    """In a lower precision; that its structure is right is shown by the cases of more rows."""
    limit = ParityLimit("mean_kl", 0.3)
    shared = {"max_abs_error": 9.0, "top1_agreement": 0.0}
    one_row = [("prefill", 1), ("decode", 1), ("decode", 128)]
    for name, length in one_row:
        assert limit.admits(ParityCase(name=name, prompt_length=length, mean_kl=1.7, **shared))
        nothing = ParityCase(name=name, prompt_length=length, mean_kl=float("nan"), **shared)
        assert not limit.admits(nothing)
    for name, length in (("prefill", 17), ("tree", 1), ("text", 320)):
        assert not limit.admits(ParityCase(name=name, prompt_length=length, mean_kl=1.7, **shared))
    exact = ParityLimit("max_abs_error", 1e-4)
    assert not exact.admits(ParityCase(name="decode", prompt_length=1, mean_kl=0.0, **shared))


def logits_of(*rows):
    return np.log(np.array(rows, np.float32))


def test_by_hand():
    wanted, found = logits_of([0.5, 0.5], [0.9, 0.1]), logits_of([0.25, 0.75], [0.9, 0.1])
    distance = divergence(found, wanted)
    first = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    assert distance.mean_kl == pytest.approx(first / 2)
    assert distance.max_abs_error == pytest.approx(math.log(2))
    assert distance.top1_agreement == 0.5
    # A constant changes logits and no distribution.
    wanted = np.random.default_rng(0).standard_normal((3, 7)).astype(np.float32) * 20
    distance = divergence(wanted + 1, wanted)
    assert distance.max_abs_error == pytest.approx(1, abs=1e-5)
    assert distance.mean_kl < 1e-10 and distance.top1_agreement == 1


def test_no_number_is_no_distance_and_another_shape_is_infinitely_far():
    for place in ("found", "wanted"):
        arrays = {name: np.zeros((2, 3), np.float32) for name in ("found", "wanted")}
        arrays[place][0, 0] = np.nan
        distance = divergence(**arrays)
        assert math.isnan(distance.max_abs_error) and math.isnan(distance.mean_kl)
    distance = divergence(np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32))
    assert (distance.max_abs_error, distance.mean_kl) == (math.inf, math.inf)


@pytest.fixture(scope="module")
def folding(tmp_path_factory, captures):
    """A hybrid model's folder, checkpoint and entry, and the tree after the longest prefix."""

    def export(folder):
        source = write_family_checkpoint("granite_hybrid", folder / "checkpoint")
        return folder / "target", source, export_alone(source, folder, captures)[1]

    folder, source, entry = made_once(tmp_path_factory, "fold-graph", export)
    checkpoint = replace(opened(source), caches=tuple(entry.caches))
    case = forest_cases(checkpoint)[-1]
    assert (case.name, case.prompt_length) == ("tree", 128)
    return folder, checkpoint, entry, references(load_model(checkpoint), checkpoint, [case])


def test_the_gate_looks_after_a_fold(folding, tmp_path):
    folder, checkpoint, entry, wanted = folding
    shutil.copytree(folder, tmp_path / "target")
    check_parity(tmp_path / "target", checkpoint, wanted, LIMIT)
    model = onnx.load(folder / "fold.onnx")
    layer = next(cache.layer for cache in entry.caches if cache.kind == "recurrent rows")
    decay = f"folded_{state_decay_name(layer)}"
    squeeze = next(node for node in model.graph.node if node.output[0] == decay)
    squeeze.op_type = "Identity"  # the decay at a checkpoint is that of the one before
    squeeze.input[:] = [state_decay_name(layer)]
    onnx.save(model, tmp_path / "target" / "fold.onnx")
    with pytest.raises(ExportError, match="in case tree after 128 tokens"):
        check_parity(tmp_path / "target", checkpoint, wanted, LIMIT)


def test_the_engine_of_the_gate_has_folded(folding):
    """The nodes of a long prefix are after a checkpoint, a stranger in the same call is not."""
    folder, checkpoint, _, [reference] = folding
    with parity_engine(bundle_of(folder, checkpoint), "target") as engine:
        engine.logits(reference.case)
        rows = engine.model.part(RecentRows)._paths
        assert rows.num_checkpoints == 2
        after = rows._checkpoints[-len(reference.case.node_ids) - 1 :]
        assert after.tolist() == [0, *([1] * len(reference.case.node_ids))]


def test_no_engine_is_built_of_it(folding):
    words = r"the target \(family granitemoehybrid\) has convolutions or recurrences, whose rows"
    with pytest.raises(ExportError, match=words):
        check_buildable("target", folding[2])


ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MEGABYTES = 16


def resident_megabytes(file: Path) -> float:
    """Memory that the mappings of a file take."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    total, is_own = 0, False
    for line in lines:
        if line.startswith("Rss:"):
            total += int(line.split()[1]) if is_own else 0
        elif "-" in line.split()[0]:
            is_own = line.endswith(str(file))
    return total / 1024


@pytest.fixture
def mapped(tmp_path):
    file = tmp_path / "weights of a model"
    np.arange(MEGABYTES * 2**17, dtype=np.int64).tofile(file)
    with file.open("rb") as opened:
        yield file, mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)


@ON_LINUX
def test_pages_are_dropped_and_come_back(mapped):
    file, mapping = mapped
    numbers = np.frombuffer(mapping, np.int64)
    wanted = int(numbers.sum())
    assert resident_megabytes(file) == MEGABYTES
    with dropped_pages(file, period_s=0.01):
        deadline = time.monotonic() + 10
        while resident_megabytes(file) > 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert resident_megabytes(file) == 0
        assert int(numbers.sum()) == wanted
    assert int(numbers.sum()) == wanted
    time.sleep(0.05)
    assert resident_megabytes(file) == MEGABYTES


@ON_LINUX
def test_other_files_stay(mapped, tmp_path):
    file, mapping = mapped
    assert np.frombuffer(mapping, np.int64).sum() > 0
    with dropped_pages(tmp_path / "weights"), dropped_pages(file.with_name("weights of")):
        time.sleep(0.05)
        assert resident_megabytes(file) == MEGABYTES
