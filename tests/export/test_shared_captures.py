"""The captures that exports of the tests share: of the same files, for the same graph."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.config import ModelOptions
from dsbd_export.model_source import EngineGraph, ModelSource
from dsbd_export.opening import open_checkpoint
from dsbd_runtime.parts.cache_entries import equal_caches
from scripts.shared_captures import SharedCaptures


@pytest.fixture
def checkpoint(small_llama_folder):
    return open_checkpoint("draft", small_llama_folder, ModelOptions())


@pytest.fixture
def num_captures(monkeypatch):
    """Counts captures, each of an empty graph."""
    counted = [0]

    def capture(*_: object) -> list[EngineGraph]:
        counted[0] += 1
        return [EngineGraph(ir.Model(ir.Graph((), (), nodes=(), name="empty"), ir_version=10))]

    monkeypatch.setattr(ModelSource, "capture", capture)
    return counted


def capture(captures: SharedCaptures, checkpoint: Checkpoint) -> None:
    [found] = captures(checkpoint).capture(None, [], print)
    assert found.graph.graph.name == "empty"


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_copies_of_a_checkpoint_are_captured_once_in_any_role(
    checkpoint, num_captures, tmp_path, is_in_memory
):
    folder = Path(shutil.copytree(checkpoint.folder, tmp_path / "copy"))
    (tmp_path / "graphs").mkdir()
    captures = SharedCaptures(None if is_in_memory else tmp_path / "graphs")
    capture(captures, checkpoint)
    capture(captures, replace(checkpoint, folder=folder, role="target"))
    assert num_captures == [1]
    if not is_in_memory:
        capture(SharedCaptures(tmp_path / "graphs"), checkpoint)  # as another process does
        assert num_captures == [1]


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 301},
        {"context_length": 128},
        {"feature_layers": (0,)},
        {"proposed_tokens": np.arange(40)},
        {"caches": equal_caches(1, num_heads=2, head_dim=12, dtype="fp16")},
    ],
    ids=str,
)
def test_another_graph_is_captured_anew(checkpoint, num_captures, change):
    captures = SharedCaptures()
    capture(captures, checkpoint)
    capture(captures, replace(checkpoint, **change))
    assert num_captures == [2]


def test_other_weights_are_captured_anew(checkpoint, num_captures, tmp_path):
    folder = Path(shutil.copytree(checkpoint.folder, tmp_path / "copy"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    captures = SharedCaptures()
    capture(captures, checkpoint)
    capture(captures, replace(checkpoint, folder=folder))
    assert num_captures == [2]
