"""From a bundle on disk to logits, and engines that contradict their manifest."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dsbd_runtime.bundle_files.bundle import FileEntry, open_bundle, write_manifest
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.loading import SMALL_DRAFT_BYTES, load_causal_lm, load_pair
from dsbd_runtime.parts.attention.attention_rows import ATTENTION_MASK, ATTENTION_MASK_SLIDING
from dsbd_runtime.parts.attention.cache_entries import AttentionRows, equal_caches
from dsbd_runtime.parts.graph_check import check_graph
from dsbd_runtime.parts.head.head import parse_num_top_logits
from dsbd_runtime.parts.source.encoder_entry import EncoderEntry
from tests.runtime.fakes import described
from tests.runtime.model_calls import ONE_THREAD, logits_of, reference_logits
from tests.runtime.tiny_graph import TinyModel


@pytest.mark.parametrize(("role", "seed"), [("target", 0), ("draft", 1)])
def test_target_and_draft_load_and_step(tiny_bundle, role, seed):
    tokens = np.array([10, 20, 30])
    rows, mask = np.arange(3), np.tri(3, dtype=np.bool_)
    with load_causal_lm(tiny_bundle, role, settings=ONE_THREAD) as model:
        found = logits_of(model, tokens, rows, mask, rows)
    wanted = reference_logits(TinyModel(seed=seed), tokens, rows, mask)
    np.testing.assert_allclose(found, wanted, atol=2e-5)


ENTRY = TinyModel().entry()
TINY = {"num_heads": 2, "head_dim": 8, "dtype": "fp32"}
MORE_LAYERS = replace(ENTRY, num_layers=3, caches=equal_caches(3, **TINY))
FEWER_LAYERS = replace(ENTRY, caches=ENTRY.caches[:1])
MORE_HEADS = replace(ENTRY, caches=equal_caches(2, **TINY | {"num_heads": 4}))
OTHER_HEAD_DIM = replace(ENTRY, caches=equal_caches(2, **TINY | {"head_dim": 16}))
OTHER_DTYPE = replace(ENTRY, caches=equal_caches(2, **TINY | {"dtype": "fp16"}))
MORE_MASKS = replace(ENTRY, masks=[ATTENTION_MASK, ATTENTION_MASK_SLIDING], sliding_window=4)
OTHER_MASK = replace(ENTRY, masks=[ATTENTION_MASK_SLIDING], sliding_window=4)
MORE_TOKENS = replace(ENTRY, vocab_size=300)
CONTRADICTIONS = [
    (MORE_LAYERS, "lacks the input past_key_values.2.key"),
    (FEWER_LAYERS, "has an input past_key_values.1.key that the manifest excludes"),
    (MORE_HEADS, r"past_key_values.0.key of shape \[1, 2, 'C', 8\], expected \[1, 4, None, 8\]"),
    (OTHER_HEAD_DIM, r"of shape \[1, 2, 'C', 8\], expected \[1, 2, None, 16\]"),
    (OTHER_DTYPE, r"past_key_values.0.key of tensor\(float\), the manifest says tensor\(float16\)"),
    (MORE_MASKS, "lacks the input attention_mask_sliding"),
    (OTHER_MASK, "lacks the input attention_mask_sliding"),
    (MORE_TOKENS, r"output logits of shape \['R', 258\], expected \[None, 300\]"),
]


@pytest.mark.parametrize(("entry", "said"), CONTRADICTIONS)
def test_an_engine_that_contradicts_the_manifest(bundle_copy, entry, said):
    write_manifest(bundle_copy, versions={}, target=entry, draft=entry)
    with pytest.raises(BundleError, match=said) as caught:
        load_causal_lm(open_bundle(bundle_copy), "target")
    assert "export the bundle again" in str(caught.value)


def session_options_of(model):
    return model._session._engine.get_session_options()


@pytest.mark.parametrize(("more_bytes", "num_threads"), [(0, 1), (1, 2)])
def test_a_large_draft_gets_as_many_threads_as_the_target(tiny_bundle, more_bytes, num_threads):
    files = {"draft/model.onnx.data": FileEntry(size=SMALL_DRAFT_BYTES + more_bytes, sha256="")}
    bundle = replace(tiny_bundle, manifest=replace(tiny_bundle.manifest, files=files))
    target, draft = load_pair(bundle, settings=EngineSettings(num_threads=2))
    with target, draft:
        found = [session_options_of(model).intra_op_num_threads for model in (target, draft)]
        assert found == [2, num_threads]


@pytest.mark.parametrize(("spin_us", "microseconds"), [(None, "20"), (350, "350"), (0, None)])
def test_idle_threads_of_both_engines_wait_busily_for_so_long(tiny_bundle, spin_us, microseconds):
    target, draft = load_pair(tiny_bundle, settings=EngineSettings(num_threads=2, spin_us=spin_us))
    with target, draft:
        for model in (target, draft):
            options = session_options_of(model)
            if microseconds is None:
                assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
            else:
                key = "session.intra_op.spin_duration_us"
                assert options.get_session_config_entry(key) == microseconds


NOT_HAD = [
    ("cuda", {"num_threads": 2}, "num_threads is 2, but provider 'cuda' runs on"),
    ("cuda", {"spin_us": 0}, "spin_us is 0, but provider 'cuda' runs on a GPU"),
    ("cuda", {"engine_cache": "e"}, "engine_cache is e, but provider 'cuda' runs"),
    ("cpu", {"cuda_graphs": True}, "cuda_graphs is set, but provider 'cpu' has none; use a GPU's"),
]


@pytest.mark.parametrize(("provider", "settings", "said"), NOT_HAD)
def test_a_setting_that_no_engine_has_is_refused(tiny_bundle, provider, settings, said):
    options = {"provider": provider, "settings": EngineSettings(**settings)}
    for load in (
        lambda: load_pair(tiny_bundle, **options),
        lambda: load_causal_lm(tiny_bundle, "target", **options),
    ):
        with pytest.raises(InputError, match=said):
            load()


WRONG_NUMBERS = [("spin_us", number) for number in (-1, 10_001, 1.5, True, "20")]
WRONG_NUMBERS += [("num_threads", number) for number in (0, -1, 10**9, 1.5, True)]


@pytest.mark.parametrize(("name", "number"), WRONG_NUMBERS)
def test_no_number_of_microseconds_or_threads(tiny_bundle, name, number):
    with pytest.raises(InputError, match=f"{name} is {number!r}, expected "):
        load_causal_lm(tiny_bundle, "target", settings=EngineSettings(**{name: number}))


KINDS = {"full": 0, "topk:1": 1, "topk:64": 64, "topk:128256": 128256}
NO_KINDS = ["", "Full", "topk", "topk:", "topk:0", "topk:-1", "topk:08", "topk:4.0", "4", "topk:²"]


@pytest.mark.parametrize("kind", NO_KINDS)
def test_what_is_no_kind(kind):
    with pytest.raises(ValueError, match="neither 'full' nor topk:K"):
        parse_num_top_logits(kind)
    assert {known: parse_num_top_logits(known) for known in KINDS} == KINDS


TOP = ["top_logits", "top_ids", "logsumexp"]
HEADS = [  # (model, the output that is not copied, all outputs)
    (TinyModel(), None, ["logits"]),
    (TinyModel(logits="topk:8"), "logits", [*TOP, "logits"]),
    (TinyModel(logits="topk:8", full_logits=False), None, TOP),
]


@pytest.mark.parametrize(("model", "kept", "outputs"), HEADS)
def test_the_full_logits_of_a_topk_engine_are_kept(model, kept, outputs):
    entry = model.entry()
    assert entry.head.keeps_full == (kept is not None)
    assert [name for name in entry.contract.outputs if "present" not in name] == outputs
    assert [output.name for output in entry.head.outputs if output.name != kept] == outputs[:3]


def session(inputs, outputs):
    return SimpleNamespace(get_inputs=lambda: inputs, get_outputs=lambda: outputs)


def test_a_decoder_that_reads_one_source_a_call_is_exported_again():
    """As encoder-decoders were exported before calls had several sources."""
    cross = AttentionRows(layer=0, num_heads=2, key_width=4, value_width=4, dtype="fp32")
    encoder = EncoderEntry(vocab_size=9, context_length=9, start_token_id=0, cross=[cross])
    contract = replace(TinyModel().entry(), encoder=encoder).contract
    outputs = described(contract.outputs)
    inputs = described(contract.inputs)
    check_graph(Path("model.onnx"), contract, session(inputs, outputs))
    names = ("source_rows", "source_places", "source_lengths")
    for name in names:
        without = [tensor for tensor in inputs if tensor.name != name]
        words = f"model.onnx lacks the input {name}; export the bundle again"
        with pytest.raises(BundleError, match=words):
            check_graph(Path("model.onnx"), contract, session(without, outputs))
    of_one = [
        SimpleNamespace(**{**vars(each), "shape": [1, *each.shape[1:]]})
        if "cross" in each.name
        else each
        for each in inputs
    ]
    with pytest.raises(BundleError, match=r"cross.0.key of shape \[1, 2, None, 4\]"):
        check_graph(Path("model.onnx"), contract, session(of_one, outputs))
