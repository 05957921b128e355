"""Feature drafts and targets with features: what is returned, and what is refused in one line."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from dsbd_export.checkpoints.model_config import CheckpointFiles
from dsbd_export.config import ModelOptions
from dsbd_export.demo import demo_pair
from dsbd_export.errors import ExportError
from dsbd_export.feature_draft.checkpoint import (
    FeatureDraftConfig,
    check_form,
    check_target,
    layers_read,
    read_feature_config,
)
from dsbd_export.feature_draft.model import load_feature_draft
from dsbd_export.gate.parity_engine import parity_engine
from dsbd_export.opening import open_checkpoint
from dsbd_export.parity_cases import text_case
from dsbd_export.parts.features import LayerInputs, layers_of, relative_error
from dsbd_ort import Pipeline
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.parts.feature.feature_memory import HostFeatures
from dsbd_runtime.parts.feature.features import FeatureEntry
from scripts.family_checkpoints import VOCAB_SIZE
from tests.export.feature_checkpoints import (
    HIDDEN,
    NUM_DRAFT,
    WIDTH,
    opened,
    random_weights,
    write_flat,
    write_library,
    written,
)
from tests.exports import export_demo_pair

WEIGHTS = [  # (weights that are changed, added, or, None, left out; words)
    (
        lambda w: {"d2t": w["d2t"] + torch.arange(NUM_DRAFT)},  # ids
        r"expected differences, target id = draft id \+ d2t",
    ),
    (lambda w: {"t2d": ~w["t2d"]}, "d2t and t2d of the draft at .* name different tokens"),
    (lambda w: {"norm.weight": None}, "lacks 1 weights, the first is norm.weight"),
    (
        lambda w: {"mask_hidden": torch.zeros(1, WIDTH)},
        "1 weights that this version does not support, the first is mask_hidden",
    ),
    (
        lambda w: {"fc.weight": w["fc.weight"][:, :-3]},
        r"weight fc.weight of .* has shape \(48, 141\), expected \(48, 144\)",
    ),
]


@pytest.mark.parametrize(("change", "words"), WEIGHTS)
def test_weights_that_cannot_be_right_are_refused(change, words, targets, tmp_path):
    weights = random_weights(VOCAB_SIZE, NUM_DRAFT, WIDTH)
    weights |= change(weights)
    given = {name: weight for name, weight in weights.items() if weight is not None}
    folder = write_flat(tmp_path / "draft", given, VOCAB_SIZE)
    _, _, draft = opened(targets["llama"], folder)
    with pytest.raises(ExportError, match=words) as caught:
        load_feature_draft(draft)
    assert "\n" not in str(caught.value)


FLAT = [  # (config, words)
    ({"architectures": ["EagleLlamaForCausalLM"]}, "supported is LlamaForCausalLMEagle3"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "before version 3"),
    ({"num_hidden_layers": 2}, "2 transformer layers, expected 1"),
    ({"model_type": "llama4_text"}, "model_type 'llama4_text', supported are"),
    ({"quantization_config": {"bits": 4}}, "already quantized"),
    ({"logit_scale": 0.5}, "logit_scale=0.5, which this version does not"),
    ({"tie_word_embeddings": True}, "vocabulary has 120 of 300 tokens"),
    ({"hidden_size": "wide"}, "the config of the draft at .* cannot be read"),
]
SLIDING = {"model_type": "qwen3", "layer_types": ["sliding_attention"]}
LIBRARY = [
    ({"speculators_model_type": "dflash"}, "'dflash', only 'eagle3' is supported"),
    ({"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
    ({"layer": SLIDING}, "attends by 'sliding_attention'"),
    ({"eagle_aux_hidden_state_layer_ids": ["first"]}, "expected numbers of layers"),
]
WRONG = [*((write_flat, *row) for row in FLAT), *((write_library, *row) for row in LIBRARY)]


@pytest.mark.parametrize(("write", "config", "words"), WRONG)
def test_configs_that_cannot_be_right_are_refused(write, config, words, tmp_path):
    folder = written(tmp_path, write, {}, config=config)
    with pytest.raises(ExportError, match=words) as caught:
        open_checkpoint("draft", folder, ModelOptions())
    assert "\n" not in str(caught.value)


def test_a_residual_is_not_guessed(tmp_path):
    folder = written(tmp_path, write_library, {})
    file = folder / "config.json"
    content = json.loads(file.read_text())
    del content["norm_before_residual"]
    file.write_text(json.dumps(content))
    with pytest.raises(ExportError, match="lacks norm_before_residual, which engines read as true"):
        read_feature_config(CheckpointFiles("draft", folder, ModelOptions()))


def test_a_feature_draft_is_no_target(tmp_path):
    folder = written(tmp_path, write_flat, {})
    with pytest.raises(ExportError, match=r"is a feature draft .*; give it as the draft"):
        open_checkpoint("target", folder, ModelOptions())


def test_another_vocabulary_or_target_is_refused(targets, tmp_path):
    weights = random_weights(VOCAB_SIZE - 1, VOCAB_SIZE - 1, WIDTH)
    folder = write_flat(tmp_path / "draft", weights, VOCAB_SIZE - 1)
    with pytest.raises(ExportError, match="vocab_size is 300 in the target and 299 in the draft"):
        opened(targets["llama"], folder)
    config = read_feature_config(CheckpointFiles("draft", folder, ModelOptions()))
    with pytest.raises(ExportError, match="inputs of 3 layers of its target, which has 2 layers"):
        config.target_layers(2)


def test_a_target_that_returns_other_features_is_refused():
    features = FeatureDraftConfig(
        layer=LlamaConfig(), draft_vocab_size=300, target_hidden_size=HIDDEN, layers=(1, 3, 5)
    )

    def bundle_of(returned):
        entry = SimpleNamespace(features=returned)
        return SimpleNamespace(path="bundle", entry=lambda _role: entry)

    for returned, words in (
        (None, "returns no features, which this draft reads; export both together"),
        (FeatureEntry(width=WIDTH, layers=[2, 3, 4]), r"its layers \[2, 3, 4\], 144 numbers, but "),
        (
            FeatureEntry(width=96, layers=[1, 3, 5]),
            "96 numbers, but this draft reads .* 144 numbers",
        ),
    ):
        with pytest.raises(ExportError, match=words):
            check_target(features, bundle_of(returned))
    check_target(features, bundle_of(FeatureEntry(width=WIDTH, layers=[1, 3, 5])))
    with pytest.raises(
        ExportError, match="reads hidden states of 48 numbers, the target's have 64"
    ):
        layers_read(features, LlamaConfig(hidden_size=64, num_hidden_layers=7))
    with pytest.raises(ExportError, match="does not support engine='tensorrt'"):
        check_form(ModelOptions(engine="tensorrt", dtype="fp16"))


@pytest.fixture(scope="module")
def demo(captures, tmp_path_factory):
    output = tmp_path_factory.mktemp("features") / "bundle"
    export_demo_pair(captures, output, features=True, logits="topk:50")
    return open_bundle(output, verify=True)


def test_the_graph_returns_the_hidden_states_of_transformers(demo):
    entry = demo.entry("target").features
    assert entry is not None and entry.layers is not None and entry.own_width is None
    model = LlamaForCausalLM.from_pretrained(demo_pair()[0], dtype=torch.float32).eval()
    assert model.config.num_hidden_layers == 6
    assert (entry.layers, entry.width) == ([2, 3, 4], 3 * model.config.hidden_size)
    case = text_case(open_checkpoint("target", demo_pair()[0], ModelOptions()))
    with torch.no_grad():
        states = model(torch.from_numpy(case.node_ids[None]), output_hidden_states=True)
    wanted = np.concatenate([states.hidden_states[layer][0] for layer in entry.layers], axis=1)
    wrong = np.concatenate([states.hidden_states[i][0] for i in (1, 3, 5)], axis=1)
    with parity_engine(demo, "target") as engine:
        found = engine.result(case, with_features=True).features
        assert isinstance(found, HostFeatures)
        np.testing.assert_allclose(found.array, wanted, atol=2e-4, rtol=1e-4)
        assert relative_error(engine, case, wanted) < 1e-4
        assert relative_error(engine, case, np.roll(wanted, 1, axis=0)) > 0.05  # of other rows
        assert relative_error(engine, case, wrong) > 0.05
        assert relative_error(engine, case, wanted[:-1]) == float("inf")


def test_a_bundle_with_features_serves_a_plain_draft(demo):
    draft = demo.entry("draft")
    assert draft.features is None
    with Pipeline.from_bundle(demo.path, num_threads=1) as pipe:
        options = {"num_beams": 2, "max_new_tokens": 12, "top_k": 20, "seed": 1}
        drafted = pipe.generate("def read_json(", strategy="dsbd", draft_length=3, **options)
        plain = pipe.generate("def read_json(", strategy="beam-sample", **options)
    assert [s.token_ids for s in drafted.sequences] == [s.token_ids for s in plain.sequences]
    assert drafted.stats.num_accepted_tokens > 0


def tiny(num_layers: int) -> LlamaForCausalLM:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
    layers = {"num_hidden_layers": num_layers, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **layers)).eval()


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
