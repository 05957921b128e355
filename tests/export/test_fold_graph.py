"""The parity gate looks after a fold, and a bundle has the graph that folds."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import ExportConfig
from dsbd_export.errors import ExportError
from dsbd_export.gate.parity import MAX_ABS_ERROR, ParityLimit
from dsbd_export.gate.parity_engine import parity_engine
from dsbd_export.opening import open_checkpoint
from dsbd_export.parity_cases import Reference, forest_cases, reference_logits
from dsbd_export.pipeline import export_model
from dsbd_export.tensorrt.tensorrt_build import check_buildable
from dsbd_runtime.parts.cache_entries import state_decay_name
from dsbd_runtime.parts.recent_rows import RecentRows
from scripts.family_checkpoints import write_family_checkpoint
from tests.export.gate import bundle_of, check_parity
from tests.made_once import made_once

LIMIT = ParityLimit(MAX_ABS_ERROR, 1e-4)


@pytest.fixture(scope="module")
def exported(tmp_path_factory, captures):
    """A hybrid model's folder, checkpoint and entry, and the tree after the longest prefix."""

    def export(folder: Path) -> tuple[Any, ...]:
        source = write_family_checkpoint("granite_hybrid", folder / "checkpoint")
        options = ExportConfig(target="", draft="", output=folder)
        checkpoint = open_checkpoint("target", source, options)
        entry = export_model(checkpoint, folder, options, lambda _line: None, captures)
        return folder / "target", source, entry

    folder, source, entry = made_once(tmp_path_factory, "fold-graph", export)
    checkpoint = open_checkpoint("target", source, ExportConfig(target="", draft="", output=folder))
    checkpoint = replace(checkpoint, caches=tuple(entry.caches))
    case = forest_cases(checkpoint)[-1]
    assert (case.name, case.prompt_length) == ("tree", 128)
    model = load_model(checkpoint)
    return folder, checkpoint, entry, [Reference(case=case, logits=reference_logits(model, case))]


def without_decay(graph: onnx.GraphProto, layer: int) -> None:
    """The decay at a checkpoint is that of the one before."""
    squeeze = next(n for n in graph.node if n.output[0] == f"folded_{state_decay_name(layer)}")
    squeeze.op_type = "Identity"
    del squeeze.input[1:]
    squeeze.input[0] = state_decay_name(layer)


@pytest.mark.parametrize("change", [None, without_decay])
def test_the_gate_looks_after_a_fold(exported, tmp_path, change):
    folder, checkpoint, entry, wanted = exported
    shutil.copytree(folder, tmp_path / "target")
    model = onnx.load(folder / "fold.onnx")
    if change is not None:
        change(model.graph, next(c.layer for c in entry.caches if c.kind == "recurrent rows"))
    onnx.save(model, tmp_path / "target" / "fold.onnx")
    if change is None:
        check_parity(tmp_path / "target", checkpoint, wanted, LIMIT)
        return
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
