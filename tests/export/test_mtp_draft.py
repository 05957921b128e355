"""Heads for multi-token prediction: the exported draft computes what is published."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import DraftConfig, ModelOptions
from dsbd_export.errors import ExportError
from dsbd_export.feature_draft.multi_token import MtpSource, read_mtp_draft
from dsbd_export.feature_draft.source import feature_logits
from dsbd_export.gate.parity_engine import parity_engine
from dsbd_export.gate.unwritten_bundle import unwritten_bundle
from dsbd_export.opening import kind_of, open_checkpoint, open_draft
from dsbd_export.pipeline import export_model
from dsbd_export.progress import silent
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.parts.attention.attention_rows import ATTENTION_MASK, ATTENTION_MASK_SLIDING
from dsbd_runtime.parts.feature.features import FeatureEntry
from scripts.family_checkpoints import WINDOW, write_family_checkpoint
from tests.export.mtp_checkpoints import FILE, LAYOUTS, with_head
from tests.export.published_drafts import MtpHead
from tests.export.test_feature_draft import check_same_tokens, check_trees
from tests.exports import export_quietly

HIDDEN = 64
EXPORTED = ("qwen3_5", "deepseek_v3", "mimo_v2_flash")


def opened(folder, **options):
    options = ModelOptions(**options)
    target = open_checkpoint("target", folder, options)
    draft = read_mtp_draft(target)
    return options, *kind_of(draft).paired(target, draft, silent)


def last_hidden_states(target):
    """Return a function from tokens to the target's hidden states after its final norm."""
    model = load_model(target)

    def features_of(tokens):
        with torch.no_grad():
            return model.get_decoder()(input_ids=tokens[None]).last_hidden_state[0]

    return features_of


@pytest.mark.parametrize("family", LAYOUTS)
def test_the_module_is_the_published_head(family, tmp_path):
    folder = with_head(family, tmp_path / "target", num_files=2)
    _, target, draft = opened(folder)
    assert target.feature_layers == (target.config.num_hidden_layers,)
    assert (draft.family, draft.layer_masks) == ("mtp", (mask_of(family),))
    assert draft.sliding_window == (WINDOW if family.startswith("mimo") else None)
    module = MtpSource(draft).load("fp32", silent)
    logits_of = partial(feature_logits, module)
    check_trees(logits_of, last_hidden_states(target), MtpHead(family, folder))


def mask_of(family):
    return ATTENTION_MASK_SLIDING if family.startswith("mimo") else ATTENTION_MASK


@pytest.mark.parametrize("family", EXPORTED)
def test_the_graph_is_the_published_head(family, captures, tmp_path):
    folder = with_head(family, tmp_path / "target")
    options, target, draft = opened(folder)
    options = replace(options, logits="full")
    entry = export_model(draft, tmp_path, options, silent, captures)
    assert entry.parity.max_abs_error < entry.parity.limit == 1e-4
    with parity_engine(unwritten_bundle(tmp_path, "draft", entry), "draft") as engine:
        check_trees(engine.logits, last_hidden_states(target), MtpHead(family, folder))


@pytest.mark.parametrize(
    ("family", "is_tied"), [("qwen3_5", True), ("deepseek_v3", False)], ids=str
)
def test_a_head_is_exported_with_its_target(family, is_tied, captures, tmp_path):
    folder = with_head(family, tmp_path / "target", num_files=2, is_tied=is_tied)
    pair = export_quietly(captures, tmp_path / "pair", folder, "mtp", logits="topk:40")
    bundle = open_bundle(pair, verify=True)
    target, entry = bundle.entry("target"), bundle.entry("draft")
    assert target.features == FeatureEntry(width=HIDDEN, layers=[target.num_layers])
    assert entry.features == FeatureEntry(width=HIDDEN, own_width=HIDDEN)
    assert (entry.family, entry.num_layers, len(entry.caches)) == ("mtp", 1, 1)
    assert entry.vocab_size == target.vocab_size
    check_same_tokens(bundle.path)


@pytest.mark.parametrize(
    "options",
    [
        {"quantize": "int8-dynamic", "draft_vocab": 64, "logits": "topk:8"},
        {"dtype": "fp16", "draft_quantize": "int8"},
    ],
    ids=str,
)
def test_options_of_other_drafts(options, captures, tmp_path):
    folder = with_head("qwen3_5", tmp_path / "target")
    pair = export_quietly(captures, tmp_path / "pair", folder, "mtp", max_kl=1.0, **options)
    entry = open_bundle(pair, verify=True).entry("draft")
    form = options.get("draft_quantize", options.get("quantize"))
    assert (entry.dtype, entry.quantization) == (options.get("dtype", "fp32"), form)
    assert getattr(entry.parity, entry.parity.measure) <= entry.parity.limit


def test_another_head_of_several_is_not_read(tmp_path):
    folder = with_head("qwen3_5", tmp_path / "target")
    first = MtpSource(opened(folder)[2]).load("fp32", silent).state_dict()
    stored = load_file(folder / FILE)
    more = {
        name.replace("mtp.layers.0.", "mtp.layers.1."): value.flip(0)
        for name, value in stored.items()
        if name.startswith("mtp.layers.0.")
    }
    save_file(stored | more, folder / FILE, metadata={"format": "pt"})
    again = MtpSource(opened(folder)[2]).load("fp32", silent).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in first.items())


def test_what_a_head_lacks_is_named(tmp_path):
    folder = with_head("deepseek_v3", tmp_path / "target")
    stored = load_file(folder / FILE)
    del stored["model.layers.2.enorm.weight"]
    save_file(stored, folder / FILE, metadata={"format": "pt"})
    with pytest.raises(ExportError, match=r"lacks 1 weights, the first is enorm.weight"):
        MtpSource(opened(folder)[2]).load("fp32", silent)


def adapted(folder):
    (adapter := folder / "adapter").mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    return {"draft_adapter": str(adapter)}


REFUSED = {  # (function that writes a checkpoint, function of further options, words)
    "no head": (
        partial(write_family_checkpoint, "qwen3_5"),
        lambda _: {},
        r"none of mtp\.fc\.weight, model\.layers\.3\.eh_proj\.weight, model\.mtp\.layers\.0\.",
    ),
    "an encoder-decoder": (
        partial(write_family_checkpoint, "t5"),
        lambda _: {},
        "needs a decoder of transformers",
    ),
    "an adapter": (partial(with_head, "qwen3_5"), adapted, "for which there are no adapters"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_head_or_an_adapter_of_one_is_refused(kind, captures, tmp_path):
    write, options, words = REFUSED[kind]
    folder = write(tmp_path / "target")
    with pytest.raises(ExportError, match=words) as caught:
        export_quietly(captures, tmp_path / "bundle", folder, "mtp", **options(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_bundle_has_no_head_to_add(tmp_path):
    with pytest.raises(ExportError, match=r"a part of the target's checkpoint, which .* lacks"):
        open_draft(DraftConfig(bundle=tmp_path, draft="mtp"))
