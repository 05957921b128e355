"""Published EAGLE-3 drafts: the exported graph computes what their definition says."""

from dataclasses import replace
from functools import partial

import numpy as np
import onnx
import pytest
import torch

from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import DraftConfig
from dsbd_export.draft_export import export_draft
from dsbd_export.errors import ExportError
from dsbd_export.feature_draft.model import load_feature_draft
from dsbd_export.feature_draft.source import feature_logits
from dsbd_export.gate.parity import divergence
from dsbd_export.gate.parity_engine import parity_engine
from dsbd_export.gate.unwritten_bundle import unwritten_bundle
from dsbd_export.parity_cases import TREE_PARENTS, ForestCase
from dsbd_export.parts.features import default_layers
from dsbd_export.pipeline import export_model
from dsbd_export.progress import silent
from dsbd_ort.pipeline import Pipeline
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.parts.feature.features import FeatureEntry
from scripts.family_checkpoints import VOCAB_SIZE
from tests.export.feature_checkpoints import (
    HIDDEN,
    NUM_DRAFT,
    NUM_LAYERS,
    WIDTH,
    opened,
    random_weights,
    write_flat,
    write_library,
    written,
)
from tests.export.published_drafts import Eagle3
from tests.exports import export_quietly

FC_NORM = {"fc_norm": True}
NO_EMBEDDING, NO_HEAD = ("embed_tokens.weight",), ("lm_head.weight",)
ALL_TOKENS = {"num_draft": VOCAB_SIZE}
OWN_LAYERS = "eagle_aux_hidden_state_layer_ids"
VARIANTS = {  # name: (target, layout, parts of the weights, left out, config)
    "flat": ("llama", write_flat, {}, (), {}),
    "flat, a Qwen3 target": ("qwen3", write_flat, {}, (), {"rope_scaling": None}),
    "flat, shared embedding": ("qwen3", write_flat, {}, NO_EMBEDDING, {}),
    "flat, shared both": ("llama", write_flat, ALL_TOKENS, NO_EMBEDDING + NO_HEAD, {}),
    "flat, tied": ("llama", write_flat, ALL_TOKENS, NO_HEAD, {"tie_word_embeddings": True}),
    "flat, 3.1": ("llama", write_flat, FC_NORM, (), {**FC_NORM, "norm_output": True}),
    "flat, biases": ("llama", write_flat, {"bias": True}, (), {"attention_bias": True}),
    "flat, own layers": ("llama", write_flat, {}, (), {"eagle_config": {OWN_LAYERS: [0, 2, 5]}}),
    "library": ("llama", write_library, {}, (), {"norm_before_residual": True}),
    "library, a Qwen3 target": ("qwen3", write_library, {}, (), {}),
    "library, a Qwen3 layer": (
        *("qwen3", write_library, {"qk_norm": True}, NO_EMBEDDING),
        {"layer": {"model_type": "qwen3"}},
    ),
    "library, own layers": (
        *("llama", write_library, {"norm_before_fc": True}, ()),
        {"norm_before_fc": True, OWN_LAYERS: [1, 3, 6]},
    ),
    "library, all tokens": ("llama", write_library, ALL_TOKENS, (), {}),
}
EXPORTED = ("flat, 3.1", "flat, shared both", "library, a Qwen3 layer")
LAYERS = {"flat, own layers": (1, 3, 6), "library, own layers": (1, 3, 6)}


def features_of_target(target, layers, tokens):
    """Return what enters some layers of the target, (num_tokens, 3 * HIDDEN)."""
    with torch.no_grad():
        out = load_model(target)(input_ids=tokens[None], output_hidden_states=True)
    return torch.cat([out.hidden_states[layer][0] for layer in layers], dim=-1)


def case_after(tokens, features, node_ids):
    """Return the tree after a sequence, whose first token has no row."""
    num_nodes, is_root = len(node_ids), np.array(TREE_PARENTS) < 0
    of_nodes = np.full((num_nodes, features.shape[1]), np.nan, np.float32)  # own ones are not read
    of_nodes[is_root] = features[-1]
    return ForestCase(
        name="tree",
        prefix_ids=tokens[1:].numpy(),
        node_ids=node_ids,
        parents=np.array(TREE_PARENTS),
        rows=np.arange(num_nodes),
        features=np.concatenate([features[:-1].numpy(), of_nodes]),
        uses_own=True,
    )


def published(name, targets, tmp_path):
    target_name, write, parts, left_out, config = VARIANTS[name]
    folder = written(tmp_path, write, parts, left_out, config)
    options, target, draft = opened(targets[target_name], folder)
    model = load_model(target)
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    weights = zip(NO_EMBEDDING + NO_HEAD, modules, strict=True)
    shared = {name: each.weight.detach() for name, each in weights if name in left_out}
    if config.get("tie_word_embeddings"):
        own = random_weights(VOCAB_SIZE, VOCAB_SIZE, WIDTH)
        shared["lm_head.weight"] = own["embed_tokens.weight"]
    return options, target, draft, Eagle3(folder, VOCAB_SIZE, **shared)


def check_trees(logits_of, features_of, reference):
    """Compare the tree after sequences of several lengths with the reference, path by path."""
    rng = np.random.default_rng(3)
    for num_tokens in (1, 2, 40):
        drawn = rng.integers(0, VOCAB_SIZE, num_tokens + len(TREE_PARENTS))
        tokens, node_ids = torch.from_numpy(drawn[:num_tokens]), drawn[num_tokens:]
        features = features_of(tokens)
        case = case_after(tokens, features, node_ids)
        found = logits_of(case)
        for node in (3, 4, 5, 6):  # the leaves
            path = case.path_to(node)
            along = torch.cat([tokens, torch.from_numpy(node_ids[path])])
            wanted = reference.logits(along, features, num_tokens)[-len(path) :].numpy()
            assert divergence(found[path], wanted).max_abs_error < 1e-4, (num_tokens, node)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_module_is_the_published_draft(name, targets, tmp_path):
    _, target, draft, reference = published(name, targets, tmp_path)
    assert draft.features.target_layers(NUM_LAYERS) == LAYERS.get(name, (2, 3, 4))
    assert (draft.family, draft.context_length) == ("eagle3", target.context_length)
    module = load_feature_draft(draft)
    layers = draft.features.target_layers(NUM_LAYERS)
    features_of = partial(features_of_target, target, layers)
    check_trees(partial(feature_logits, module), features_of, reference)


@pytest.mark.parametrize("name", EXPORTED)
def test_the_graph_is_the_published_draft(name, targets, captures, tmp_path):
    options, target, draft, reference = published(name, targets, tmp_path)
    options = replace(options, logits="full")
    entry = export_model(draft, tmp_path, options, silent, captures)
    assert entry.parity.max_abs_error < entry.parity.limit == 1e-4
    with parity_engine(unwritten_bundle(tmp_path, "draft", entry), "draft") as engine:
        layers = draft.features.target_layers(NUM_LAYERS)
        check_trees(engine.logits, partial(features_of_target, target, layers), reference)


@pytest.mark.parametrize("num_top", [8, NUM_DRAFT + 30])
def test_a_token_that_the_draft_lacks_is_never_proposed(targets, captures, tmp_path, num_top):
    """A head that returns more than the draft's tokens fills up with others, of logit -inf."""
    folder = written(tmp_path, write_flat, {})
    engines, keeps_logits = {}, num_top > NUM_DRAFT
    for kind in ("full", f"topk:{num_top}"):
        options, _, draft = opened(targets["llama"], folder, logits=kind)
        (output := tmp_path / kind).mkdir()
        entry = export_model(draft, output, options, silent, captures)
        assert (entry.vocab_size, entry.logits) == (VOCAB_SIZE, kind)
        assert entry.full_logits == (keeps_logits or kind == "full")
        engines[kind] = unwritten_bundle(output, "draft", entry)
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, VOCAB_SIZE, len(TREE_PARENTS))
    features = torch.from_numpy(rng.standard_normal((1, WIDTH), dtype=np.float32))
    case = case_after(torch.zeros(1, dtype=torch.int64), features, drawn)
    found = []
    for bundle in engines.values():
        with parity_engine(bundle, "draft") as engine:
            found.append(engine.result(case).logits)
    logits, ids, top = found[0].values, found[1].top_ids, found[1].top_logits
    known = random_weights(VOCAB_SIZE, NUM_DRAFT, WIDTH)["t2d"].numpy()
    assert known[ids[:, :NUM_DRAFT]].all() and np.isfinite(top[:, :NUM_DRAFT]).all()
    assert np.isneginf(top[:, NUM_DRAFT:]).all()
    assert np.isneginf(logits[:, ~known]).all() and np.isfinite(logits[:, known]).all()
    assert np.array_equal(np.take_along_axis(logits, ids, axis=1), top)


@pytest.mark.parametrize(
    "options",
    [
        {"quantize": "int8-dynamic", "logits": "topk:8"},
        {"quantize": "int8-blocks"},
        {"quantize": "int8", "dtype": "fp16"},
        {"dtype": "fp16"},
        {"dtype": "bf16"},
        {"attention": "exact"},
    ],
    ids=str,
)
def test_every_precision_and_form(options, targets, captures, tmp_path):
    folder = written(tmp_path, write_library, {"fc_norm": True}, config={"fc_norm": True})
    options, _, draft = opened(targets["llama"], folder, **options)
    entry = export_model(draft, tmp_path, options, silent, captures)
    assert (entry.dtype, entry.quantization) == (options.dtype, options.quantized_form)
    assert getattr(entry.parity, entry.parity.measure) <= entry.parity.limit


def test_weights_of_older_checkpoints(targets, tmp_path):
    """EAGLE's own have pytorch_model.bin, in half precision, and rotary frequencies as weights."""
    folder = written(tmp_path, write_flat, {})
    stored = random_weights(VOCAB_SIZE, NUM_DRAFT, WIDTH)
    renamed = {
        name.replace("layers.0.", "midlayer."): value.half() if value.is_floating_point() else value
        for name, value in stored.items()
    }
    renamed["midlayer.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    (folder / "model.safetensors").unlink()
    torch.save(renamed, folder / "pytorch_model.bin")
    _, _, draft = opened(targets["llama"], folder)
    found = load_feature_draft(draft).state_dict()
    assert found.keys() == stored.keys() - {"t2d"}
    assert torch.equal(found["fc.weight"], stored["fc.weight"].half().float())


def test_default_layers():
    found = [default_layers(number) for number in range(1, 9)]
    of_few = [(0,), (0, 1), (0, 1, 2), (1, 2, 3)]
    assert found == [*of_few, (2, 3, 4), (2, 3, 4), (2, 3, 4), (2, 4, 5)]
    assert [default_layers(number) for number in (32, 36)] == [(2, 16, 29), (2, 18, 33)]


def test_it_is_exported_with_its_target_or_into_its_bundle(targets, captures, tmp_path):
    draft = written(tmp_path, write_library, {}, config={"norm_output": True})
    pair = export_quietly(captures, tmp_path / "pair", targets["llama"], draft)
    bundle = open_bundle(pair, verify=True)
    target, entry = bundle.entry("target"), bundle.entry("draft")
    assert target.features == FeatureEntry(width=WIDTH, layers=[2, 3, 4])
    assert entry.features == FeatureEntry(width=WIDTH, own_width=HIDDEN)
    assert (entry.vocab_size, entry.context_length) == (VOCAB_SIZE, 256)
    check_same_tokens(bundle.path)

    other = write_flat(tmp_path / "other", random_weights(VOCAB_SIZE, NUM_DRAFT, WIDTH), VOCAB_SIZE)
    config = DraftConfig(bundle=bundle.path, draft=str(other))
    export_draft(config, report=silent, source_of=captures)
    assert open_bundle(bundle.path, verify=True).entry("draft").features == entry.features
    check_same_tokens(bundle.path)


def test_a_top_k_head_reads_the_draft_s_own_tokens(targets, captures, tmp_path):
    draft = written(tmp_path, write_library, {})
    pair = export_quietly(captures, tmp_path / "pair", targets["llama"], draft, logits="topk:8")
    bundle = open_bundle(pair, verify=True)
    assert (bundle.entry("target").full_logits, bundle.entry("draft").full_logits) == (True, False)
    graph = onnx.load(bundle.path / "draft" / "model.onnx", load_external_data=False).graph
    assert not {"ScatterElements", "GatherND"} & {node.op_type for node in graph.node}
    check_same_tokens(bundle.path, top_k=8)


def test_a_feature_draft_takes_no_other_vocabulary(targets, captures, tmp_path):
    draft = written(tmp_path, write_library, {})
    with pytest.raises(ExportError, match="draft_vocab=64 has no form for a feature draft"):
        export_quietly(captures, tmp_path / "pair", targets["llama"], draft, draft_vocab=64)


SAMPLING = [  # (with drafts, without)
    ({"strategy": "dsbd", "num_beams": 3}, {"strategy": "beam-sample", "num_beams": 3}),
    ({"strategy": "speculative"}, {"strategy": "sample"}),
]
SEARCH = (
    {"strategy": "speculative-beam-search", "num_beams": 3},
    {"strategy": "beam-search", "num_beams": 3},
)


def check_same_tokens(bundle, **warping):
    settings = {"max_new_tokens": 12, "seed": 1, **warping}
    with Pipeline.from_bundle(bundle, num_threads=1) as pipe:
        for drafting, plain in SAMPLING if warping else [*SAMPLING, SEARCH]:
            drafted = pipe.generate("def f1(", draft_length=3, **drafting, **settings)
            wanted = pipe.generate("def f1(", **plain, **settings)
            ids = [[each.token_ids for each in found.sequences] for found in (drafted, wanted)]
            assert ids[0] == ids[1], drafting
            assert drafted.stats.num_draft_tokens > 0
