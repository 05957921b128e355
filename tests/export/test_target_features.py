"""Targets with features: the graph returns what enters the layers, or the export fails."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from dsbd_export.config import ExportConfig
from dsbd_export.demo import demo_pair
from dsbd_export.errors import ExportError
from dsbd_export.gate.parity_engine import parity_engine
from dsbd_export.opening import open_checkpoint
from dsbd_export.parity_cases import ForestCase, text_case
from dsbd_export.parts.features import LayerInputs, layers_of, relative_error
from dsbd_runtime.bundle_files.bundle import Bundle, open_bundle
from dsbd_runtime.parts.feature_memory import HostFeatures
from dsbd_runtime.parts.features import FeatureEntry
from tests.exports import export_demo_pair


@pytest.fixture(scope="module")
def exported(captures, tmp_path_factory):
    """The demo's target with features and its plain draft."""
    output = tmp_path_factory.mktemp("features") / "bundle"
    export_demo_pair(captures, output, features=True, logits="topk:50")
    return open_bundle(output, verify=True)


def text_of(bundle: Bundle) -> ForestCase:
    checkpoint = open_checkpoint(
        "target",
        demo_pair()[0],
        ExportConfig(target="unused", output=Path("unused")),
    )
    return text_case(checkpoint)


def test_the_graph_returns_the_hidden_states_of_transformers(exported):
    entry = exported.entry("target").features
    assert entry is not None and entry.layers is not None and entry.own_width is None
    model = LlamaForCausalLM.from_pretrained(demo_pair()[0], dtype=torch.float32).eval()
    assert model.config.num_hidden_layers == 6
    assert (entry.layers, entry.width) == ([2, 3, 4], 3 * model.config.hidden_size)
    case = text_of(exported)
    with torch.no_grad():
        states = model(torch.from_numpy(case.node_ids[None]), output_hidden_states=True)
    wanted = np.concatenate([states.hidden_states[layer][0] for layer in entry.layers], axis=1)
    wrong = np.concatenate([states.hidden_states[i][0] for i in (1, 3, 5)], axis=1)
    with parity_engine(exported, "target") as engine:
        found = engine.result(case, with_features=True).features
        assert isinstance(found, HostFeatures)
        np.testing.assert_allclose(found.array, wanted, atol=2e-4, rtol=1e-4)
        assert relative_error(engine, case, wanted) < 1e-4
        assert relative_error(engine, case, np.roll(wanted, 1, axis=0)) > 0.05  # of other rows
        assert relative_error(engine, case, wrong) > 0.05
        assert relative_error(engine, case, wanted[:-1]) == float("inf")


def test_a_bundle_with_features_serves_a_plain_draft(exported):
    from dsbd_ort import Pipeline

    draft = exported.entry("draft")
    assert draft.features is None
    with Pipeline.from_bundle(exported.path, num_threads=1) as pipe:
        options = {"num_beams": 2, "max_new_tokens": 12, "top_k": 20, "seed": 1}
        drafted = pipe.generate("def read_json(", strategy="dsbd", draft_length=3, **options)
        plain = pipe.generate("def read_json(", strategy="beam-sample", **options)
    assert [s.token_ids for s in drafted.sequences] == [s.token_ids for s in plain.sequences]
    assert drafted.stats.num_accepted_tokens > 0


def test_features_have_no_form_for_tensorrt(tmp_path):
    with pytest.raises(ExportError, match="features=True has no form for engine='tensorrt'"):
        ExportConfig(target="t", features=True, dtype="fp16", engine="tensorrt", output=tmp_path)


def tiny(num_layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
    )
    return LlamaForCausalLM(config).eval()


def test_layers_that_cannot_be_told_are_refused():
    model = tiny(2)
    assert layers_of(model) is model.model.layers
    model.other = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    with pytest.raises(ExportError, match=r"2 lists of 2 layers, expected one.*without --features"):
        layers_of(model)


def test_what_enters_a_layer_is_taken_once_and_hooks_are_gone_afterwards():
    model = tiny(3)
    ids = torch.tensor([[1, 2, 3]])
    with LayerInputs(model, (2, 0)) as inputs, torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    found = inputs.rows(torch.tensor([2, 0]))
    assert torch.equal(found, torch.cat([states[2][0], states[0][0]], dim=-1)[[2, 0]])
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)


def test_the_manifest_says_what_is_returned(exported):
    entry = exported.entry("target").features
    assert entry == FeatureEntry(width=entry.width, layers=entry.layers)
