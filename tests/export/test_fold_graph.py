"""The parity gate looks after a fold, and a bundle has the graph that folds."""

import shutil
from dataclasses import replace

import onnx
import pytest

from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.errors import ExportError
from dsbd_export.gate.parity import MAX_ABS_ERROR, ParityLimit
from dsbd_export.gate.parity_engine import parity_engine
from dsbd_export.parity_cases import forest_cases
from dsbd_export.tensorrt.tensorrt_build import check_buildable
from dsbd_runtime.parts.attention.cache_entries import state_decay_name
from dsbd_runtime.parts.recent.recent_rows import RecentRows
from scripts.family_checkpoints import write_family_checkpoint
from tests.export.conftest import opened
from tests.export.gate import bundle_of, check_parity, export_alone, references
from tests.made_once import made_once

LIMIT = ParityLimit(MAX_ABS_ERROR, 1e-4)


@pytest.fixture(scope="module")
def exported(tmp_path_factory, captures):
    """A hybrid model's folder, checkpoint and entry, and the tree after the longest prefix."""

    def export(folder):
        source = write_family_checkpoint("granite_hybrid", folder / "checkpoint")
        return folder / "target", source, export_alone(source, folder, captures)[1]

    folder, source, entry = made_once(tmp_path_factory, "fold-graph", export)
    checkpoint = replace(opened(source), caches=tuple(entry.caches))
    case = forest_cases(checkpoint)[-1]
    assert (case.name, case.prompt_length) == ("tree", 128)
    return folder, checkpoint, entry, references(load_model(checkpoint), checkpoint, [case])


def test_the_gate_looks_after_a_fold(exported, tmp_path):
    folder, checkpoint, entry, wanted = exported
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


def test_the_engine_of_the_gate_has_folded(exported):
    """The nodes of a long prefix are after a checkpoint, a stranger in the same call is not."""
    folder, checkpoint, _, [reference] = exported
    with parity_engine(bundle_of(folder, checkpoint), "target") as engine:
        engine.logits(reference.case)
        rows = engine.model.part(RecentRows)._paths
        assert rows.num_checkpoints == 2
        after = rows._checkpoints[-len(reference.case.node_ids) - 1 :]
        assert after.tolist() == [0, *([1] * len(reference.case.node_ids))]


def test_no_engine_is_built_of_it(exported):
    words = r"the target \(family granitemoehybrid\) has convolutions or recurrences, whose rows"
    with pytest.raises(ExportError, match=words):
        check_buildable("target", exported[2])
