"""Captures: the caches of layers, found by running the model, and graphs that tests share."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from dsbd_export.capture.caches import probed_caches
from dsbd_export.checkpoints.checkpoint import Checkpoint
from dsbd_export.errors import ExportError
from dsbd_export.model_source import EngineGraph, ModelSource
from dsbd_runtime.parts.attention.cache_entries import AttentionRows, equal_caches
from scripts.shared_captures import SharedCaptures
from tests.export.conftest import opened


class StubModel(nn.Module):
    def __init__(self, rows_by_layer):
        super().__init__()
        self._rows_by_layer = rows_by_layer

    def forward(self, input_ids, cache):
        for layer, (key, value) in self._rows_by_layer.items():
            cache.update(torch.zeros(key), torch.zeros(value), layer)


@pytest.fixture(scope="module")
def checkpoint(llama_folder):
    return opened(llama_folder)


def entry(layer, num_heads, key_width, value_width):
    widths = {"key_width": key_width, "value_width": value_width}
    return AttentionRows(layer=layer, num_heads=num_heads, **widths, dtype="fp16")


def test_layers_have_caches_of_their_own_shapes(checkpoint):
    """Grouped heads, one head of another width, a latent; layer 2 shares the rows of another."""
    model = StubModel(
        {
            0: ((1, 4, 2, 16), (1, 4, 2, 16)),
            1: ((1, 1, 2, 32), (1, 1, 2, 32)),
            3: ((1, 1, 2, 8), (1, 1, 2, 24)),
        }
    )
    assert probed_caches(model, checkpoint, "fp16") == (
        entry(0, 4, 16, 16),
        entry(1, 1, 32, 32),
        entry(3, 1, 8, 24),
    )


REFUSED = [  # (what layer 0 caches, words of the refusal)
    ({}, "hands no keys and values to a cache"),
    ({0: ((1, 2, 16), (1, 2, 16))}, r"layer 0 .*caches \[1, 2, 16\] and \[1, 2, 16\] of 2 tokens"),
    ({0: ((1, 4, 1, 16), (1, 4, 1, 16))}, "expected a key and a value of each token"),
    ({0: ((1, 4, 2, 16), (1, 2, 2, 16))}, "expected a key and a value of each token"),
]


@pytest.mark.parametrize(("rows_by_layer", "words"), REFUSED)
def test_what_is_no_row_of_each_token_is_refused(checkpoint, rows_by_layer, words):
    with pytest.raises(ExportError, match=words):
        probed_caches(StubModel(rows_by_layer), checkpoint, "fp32")


def keep_a_state(cache):
    """Attend in layer 0, and keep a state in layer 1 by arithmetic of its own."""
    cache.update(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), 0)
    cache.get_recurrent_state(1)
    cache.update_recurrent_state(torch.zeros(1, 4, 4), 1)


def keep_convolutions_in_a_way_of_its_own(cache):
    cache.update_conv_state(torch.zeros(1, 4, 2), 0)  # as ZAYA and MiniMax do


UNKNOWN = [
    (keep_a_state, "layer 1 keeps a recurrent state of another kind"),
    (
        keep_convolutions_in_a_way_of_its_own,
        r"family llama\) keeps more than rows .*TypeError: .*conv_kernel_size.*choose another",
    ),
]


@pytest.mark.parametrize(("keep", "words"), UNKNOWN)
def test_a_cache_that_is_used_in_an_unknown_way_is_refused(checkpoint, keep, words):
    model = StubModel({})
    model.forward = lambda input_ids, cache: keep(cache)
    with pytest.raises(ExportError, match=words):
        probed_caches(model, checkpoint, "fp16")


@pytest.fixture
def num_captures(monkeypatch):
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
def test_copies_are_captured_once_in_any_role(checkpoint, num_captures, tmp_path, is_in_memory):
    folder = Path(shutil.copytree(checkpoint.folder, tmp_path / "copy"))
    (tmp_path / "graphs").mkdir()
    captures = SharedCaptures(None if is_in_memory else tmp_path / "graphs")
    capture(captures, checkpoint)
    capture(captures, replace(checkpoint, folder=folder, role="draft"))
    assert num_captures == [1]
    if not is_in_memory:
        capture(SharedCaptures(tmp_path / "graphs"), checkpoint)  # as another process does
        assert num_captures == [1]


OTHERS = [
    {"vocab_size": 301},
    {"context_length": 128},
    {"feature_layers": (0,)},
    {"proposed_tokens": np.arange(40)},
    {"caches": equal_caches(1, num_heads=2, head_dim=12, dtype="fp16")},
    {"folder": "of other weights"},
]


@pytest.mark.parametrize("change", OTHERS, ids=str)
def test_other_graphs_and_weights_are_captured_anew(checkpoint, num_captures, change, tmp_path):
    if "folder" in change:
        change = {"folder": Path(shutil.copytree(checkpoint.folder, tmp_path / "copy"))}
        weights = change["folder"] / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    captures = SharedCaptures()
    capture(captures, checkpoint)
    capture(captures, replace(checkpoint, **change))
    assert num_captures == [2]
