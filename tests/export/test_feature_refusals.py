"""Feature drafts that cannot be right, or do not fit their target, are refused in one line."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig

from dsbd_export.config import ModelOptions
from dsbd_export.errors import ExportError
from dsbd_export.feature_draft.checkpoint import (
    FeatureDraftConfig,
    check_form,
    check_target,
    layers_read,
    read_feature_config,
)
from dsbd_export.feature_draft.model import load_feature_draft
from dsbd_export.opening import open_checkpoint
from dsbd_runtime.parts.features import FeatureEntry
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


def shuffled_d2t(weights):
    weights["d2t"] += torch.arange(NUM_DRAFT)  # ids, not differences


def other_t2d(weights):
    weights["t2d"] = ~weights["t2d"]


def without_norm(weights):
    del weights["norm.weight"]


def with_mask(weights):
    weights["mask_hidden"] = torch.zeros(1, WIDTH)


def narrow_fc(weights):
    weights["fc.weight"] = weights["fc.weight"][:, :-3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (shuffled_d2t, r"expected differences, target id = draft id \+ d2t"),
        (other_t2d, "d2t and t2d of the draft at .* name different tokens"),
        (without_norm, "lacks 1 weights, the first is norm.weight"),
        (with_mask, "1 weights that this version does not support, the first is mask_hidden"),
        (narrow_fc, r"weight fc.weight of .* has shape \(48, 141\), expected \(48, 144\)"),
    ],
)
def test_weights_that_cannot_be_right_are_refused(change, words, targets, tmp_path):
    weights = random_weights(VOCAB_SIZE, NUM_DRAFT, WIDTH)
    change(weights)
    folder = write_flat(tmp_path / "draft", weights, VOCAB_SIZE)
    _, _, draft = opened(targets["llama"], folder)
    with pytest.raises(ExportError, match=words) as caught:
        load_feature_draft(draft)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("write", "config", "words"),
    [
        (
            write_flat,
            {"architectures": ["EagleLlamaForCausalLM"]},
            "supported is LlamaForCausalLMEagle3",
        ),
        (write_flat, {"eagle_config": {"use_aux_hidden_state": False}}, "before version 3"),
        (write_flat, {"num_hidden_layers": 2}, "2 transformer layers, expected 1"),
        (write_flat, {"model_type": "llama4_text"}, "model_type 'llama4_text', supported are"),
        (write_flat, {"quantization_config": {"bits": 4}}, "already quantized"),
        (write_flat, {"logit_scale": 0.5}, "logit_scale=0.5, which this version does not"),
        (write_flat, {"tie_word_embeddings": True}, "vocabulary has 120 of 300 tokens"),
        (write_flat, {"hidden_size": "wide"}, "the config of the draft at .* cannot be read"),
        (
            write_library,
            {"speculators_model_type": "dflash"},
            "'dflash', only 'eagle3' is supported",
        ),
        (write_library, {"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
        (
            write_library,
            {"layer": {"model_type": "qwen3", "layer_types": ["sliding_attention"]}},
            "attends by 'sliding_attention'",
        ),
        (
            write_library,
            {"eagle_aux_hidden_state_layer_ids": ["first"]},
            "expected numbers of layers",
        ),
    ],
)
def test_configs_that_cannot_be_right_are_refused(write, config, words, tmp_path):
    folder = written(tmp_path, write, {}, config=config)
    with pytest.raises(ExportError, match=words) as caught:
        open_checkpoint("draft", folder, ModelOptions())
    assert "\n" not in str(caught.value)


def test_a_residual_is_not_guessed(tmp_path):
    folder = written(tmp_path, write_library, {})
    content = json.loads((folder / "config.json").read_text())
    del content["norm_before_residual"]
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(ExportError, match="lacks norm_before_residual, which engines read as true"):
        read_feature_config(folder)


def test_a_feature_draft_is_no_target(tmp_path):
    folder = written(tmp_path, write_flat, {})
    with pytest.raises(ExportError, match=r"is a feature draft .*; give it as the draft"):
        open_checkpoint("target", folder, ModelOptions())


def test_another_vocabulary_or_target_is_refused(targets, tmp_path):
    weights = random_weights(VOCAB_SIZE - 1, VOCAB_SIZE - 1, WIDTH)
    folder = write_flat(tmp_path / "draft", weights, VOCAB_SIZE - 1)
    with pytest.raises(ExportError, match="vocab_size is 300 in the target and 299 in the draft"):
        opened(targets["llama"], folder)
    config = read_feature_config(folder)
    with pytest.raises(ExportError, match="inputs of 3 layers of its target, which has 2 layers"):
        config.target_layers(2)


def test_a_target_that_returns_other_features_is_refused():
    features = FeatureDraftConfig(
        layer=LlamaConfig(), draft_vocab_size=300, target_hidden_size=HIDDEN, layers=(1, 3, 5)
    )
    for returned, words in (
        (None, "returns no features, which this draft reads; export both together"),
        (FeatureEntry(width=WIDTH, layers=[2, 3, 4]), r"its layers \[2, 3, 4\], 144 numbers, but "),
        (
            FeatureEntry(width=96, layers=[1, 3, 5]),
            "96 numbers, but this draft reads .* 144 numbers",
        ),
    ):
        with pytest.raises(ExportError, match=words):
            check_target(features, FakeBundle(returned))
    check_target(features, FakeBundle(FeatureEntry(width=WIDTH, layers=[1, 3, 5])))
    with pytest.raises(
        ExportError, match="reads hidden states of 48 numbers, the target's have 64"
    ):
        layers_read(features, LlamaConfig(hidden_size=64, num_hidden_layers=7))
    with pytest.raises(ExportError, match="does not support engine='tensorrt'"):
        check_form(ModelOptions(engine="tensorrt", dtype="fp16"))


class FakeBundle:
    """A bundle whose target returns these features."""

    path = "bundle"

    def __init__(self, features):
        self.features = features

    def entry(self, role):
        return self
