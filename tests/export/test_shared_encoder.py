"""Drafts whose encoder is the target's: recognized, exported without it, gated."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch

from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import DraftConfig
from dsbd_export.draft_export import export_draft
from dsbd_export.encoder_decoder.source import fingerprint, source_cases
from dsbd_export.errors import ExportError
from dsbd_export.gate.parity import MAX_ABS_ERROR, MEAN_KL, ParityLimit
from dsbd_export.progress import silent
from dsbd_runtime.bundle_files.bundle import ENCODER_FILE, open_bundle
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.loading import load_causal_lm
from scripts.family_checkpoints import SOURCE_READERS, write_family_checkpoint
from tests.export.conftest import edit_json, opened
from tests.export.cut_decoders import cut_decoder
from tests.export.gate import check_parity, references, rename_inputs
from tests.exports import export_quietly
from tests.ort_sessions import cpu_session
from tests.runtime.model_calls import logits_of

NAMES = [
    name if name in ("marian", "t5") else pytest.param(name, marks=pytest.mark.long)
    for name in SOURCE_READERS
]


def exported(name, folder, captures, **options):
    target = write_family_checkpoint(name, folder / "target")
    draft = cut_decoder(target, folder / "draft")
    options["max_context"] = SOURCE_READERS[name].max_context
    return open_bundle(export_quietly(captures, folder / "bundle", target, draft, **options))


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_with_the_same_encoder_shares_it(name, captures, tmp_path):
    bundle = exported(name, tmp_path, captures)
    target, draft = (bundle.entry(role) for role in ("target", "draft"))
    assert draft.parity.max_abs_error < 5e-5
    assert draft.num_layers == len(draft.encoder.cross) == 1
    assert draft.encoder.is_shared
    assert target.encoder.is_shared is None
    assert draft.encoder.hidden_width == target.encoder.hidden_width == 32
    files = bundle.manifest.files
    num_bytes = sum(f.size for n, f in files.items() if n == "draft/encoder.onnx.data")
    assert num_bytes <= 2 * (32 * 32 + 32) * 4  # a product for keys and one for values
    source = [5, 6, 7, 8, 1]
    encoder = cpu_session(bundle.model_path("target").with_name(ENCODER_FILE))
    [found] = encoder.run(["hidden_states"], {"source_ids": np.array([source])})
    with torch.no_grad():
        theirs = load_model(opened(tmp_path / "target")).get_encoder()
        wanted = theirs(input_ids=torch.tensor([source])).last_hidden_state.numpy()
    assert np.allclose(found, wanted, atol=1e-5)


VOCABULARIES = [("marian", "full"), ("t5", "full"), ("marian", "topk:8")]


@pytest.mark.parametrize(("name", "logits"), VOCABULARIES)
def test_a_draft_that_proposes_some_tokens(name, logits, captures, tmp_path):
    bundle = exported(name, tmp_path, captures, draft_vocab=90, logits=logits)
    entry = bundle.entry("draft")
    assert entry.encoder.is_shared
    assert entry.parity.max_abs_error < 5e-5
    graph = onnx.load(bundle.model_path("draft"), load_external_data=False).graph
    sizes = [tuple(weight.dims) for weight in graph.initializer]
    assert sizes.count((300, 32)) == 1  # the embedding alone: any token is read
    assert {(32, 90), (90, 32)} & {*sizes}
    start = entry.encoder.start_token_id
    ids = {"input_ids": torch.tensor([[5, 6, 1]]), "decoder_input_ids": torch.tensor([[start]])}
    with torch.no_grad():
        output = load_model(opened(tmp_path / "draft", "draft"))(**ids)
    whole = output.logits[0, 0, :90].numpy()
    step = (np.array([start]), np.zeros(1, np.int64), np.ones((1, 1), bool), np.zeros(1, np.int64))
    with load_causal_lm(bundle, "draft", settings=EngineSettings(num_threads=1)) as draft:
        found = logits_of(draft, *step, source=(5, 6, 1))
    if logits == "full":
        assert np.allclose(found[0, :90], whole, atol=2e-5)
        assert (found[0, 90:] == -np.inf).all()
    else:
        best = np.argsort(-whole)[:8]
        assert found.top_ids[0].tolist() == best.tolist()
        assert np.allclose(found.top_logits[0], whole[best], atol=2e-5)


def nudge(model):
    *_, last = model.get_encoder().parameters()
    last.data[0] += 1e-6


def test_a_draft_that_is_added_later_shares_it_too_or_has_its_own(captures, tmp_path):
    target = write_family_checkpoint("marian", tmp_path / "target")
    output = export_quietly(captures, tmp_path / "bundle", target, quantize="int8-dynamic")
    for name, edit, is_shared in (("same", silent, True), ("other", nudge, None)):
        draft = cut_decoder(target, tmp_path / name, edit)
        options = DraftConfig(bundle=output, draft=str(draft))
        export_draft(options, report=silent, source_of=captures)
        entry = open_bundle(output).entry("draft")
        assert entry.encoder.is_shared is is_shared
        assert entry.encoder.hidden_width == (32 if is_shared else None)
        # What reads the int8 hidden states is judged as int8 is.
        assert entry.parity.measure == (MEAN_KL if is_shared else MAX_ABS_ERROR)


def test_what_a_fingerprint_depends_on(tmp_path):
    folder = write_family_checkpoint("marian", tmp_path / "target")

    def of(edit=lambda _model: None, **config):
        changed = cut_decoder(folder, tmp_path / f"draft{len(list(tmp_path.iterdir()))}", edit)
        edit_json(changed / "config.json", **config)
        return fingerprint(load_model(opened(changed, "draft")))

    own = fingerprint(load_model(opened(folder)))
    assert of() == of(decoder_start_token_id=5) == of(dropout=0.5, num_beams=3) == own
    assert of(nudge) != own
    assert of(scale_embedding=False) != own
    assert of(activation_function="relu") != own
    assert of(encoder_attention_heads=8) != own


def test_rows_of_other_hidden_states_fail(captures, tmp_path):
    bundle = exported("marian", tmp_path, captures)
    entry = bundle.entry("draft")
    checkpoint = opened(tmp_path / "draft", "draft")
    checkpoint = replace(checkpoint, caches=tuple(entry.caches), encoder=entry.encoder)
    trees = [case for case in source_cases(checkpoint) if case.name == "tree"]
    wanted = references(load_model(checkpoint), checkpoint, trees)
    limit, of_target = ParityLimit(MAX_ABS_ERROR, 1e-4), bundle.entry("target")
    check_parity(bundle.path / "draft", checkpoint, wanted, limit, target=of_target)
    file = bundle.model_path("draft").with_name(ENCODER_FILE)
    graph = onnx.load(file, load_external_data=False)
    twice = onnx.helper.make_node("Add", ["hidden_states", "hidden_states"], ["twice"])
    rename_inputs(graph.graph, hidden_states="twice")
    graph.graph.node.insert(0, twice)
    onnx.save(graph, file)
    with pytest.raises(ExportError, match="differs from the checkpoint"):
        check_parity(bundle.path / "draft", checkpoint, wanted, limit, target=of_target)
