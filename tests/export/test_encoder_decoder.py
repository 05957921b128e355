"""Encoder-decoders: the whole parity gate of every family, and what must not pass it."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from transformers import T5Config

from dsbd_export.capture.source_attention import source_attention
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import ExportConfig
from dsbd_export.encoder_decoder.source import source_cases
from dsbd_export.errors import ExportError
from dsbd_export.gate.parity import MAX_ABS_ERROR, ParityLimit
from dsbd_export.parts.sources import share_weights
from dsbd_export.pipeline import export_bundle
from scripts.family_checkpoints import SOURCE_READERS, write_checkpoint, write_family_checkpoint
from scripts.speech_checkpoint import write_whisper
from tests.export.conftest import edit_json, opened
from tests.export.gate import (
    check_refused,
    export_alone,
    references,
    rename_inputs,
    swap_keys_of_sources,
)
from tests.exports import export_quietly

NAMES = [
    name if row.is_quick else pytest.param(name, marks=pytest.mark.long)
    for name, row in SOURCE_READERS.items()
]
KINDS = ["prefill", "decode", "tree"]


def export_family(name: str, folder: Path, captures, **options):
    source = write_family_checkpoint(name, folder / "checkpoint")
    context = SOURCE_READERS[name].max_context
    return export_alone(source, folder, captures, max_context=context, **options)[:2]


@pytest.mark.parametrize("name", NAMES)
def test_a_family_passes_the_whole_gate(name, captures, tmp_path):
    checkpoint, entry = export_family(name, tmp_path, captures)
    assert entry.parity.max_abs_error < 5e-5
    cases = [(case.prompt_length, case.name) for case in entry.parity.cases]
    forests = [(n, kind) for n in (1, 17, 128) for kind in KINDS]
    assert cases == [*forests, (1, "sources"), (256, "text")]
    assert entry.num_layers == 3  # the encoder has two
    assert [rows.layer for rows in entry.encoder.cross] == [0, 1, 2]
    shapes = {(rows.num_heads, rows.key_width, rows.value_width) for rows in entry.encoder.cross}
    assert shapes == {(4, 8, 8)}
    assert entry.encoder.reads_positions == ("t5" in name)
    lengths = {len(case.source_ids) for case in source_cases(checkpoint)}
    assert lengths == {1, 9, 40, 150, 256}


@pytest.mark.parametrize("options", [{}, {"quantize": "int8-dynamic"}])
def test_an_embedding_of_both_graphs_is_stored_once(options, captures, tmp_path):
    _, entry = export_family("marian", tmp_path, captures, **options)
    assert entry.quantization == options.get("quantize", "none")
    folder = tmp_path / "target"
    for file in ("model.onnx", "encoder.onnx"):
        graph = onnx.load(folder / file, load_external_data=False).graph
        has_integers = any(node.op_type == "MatMulInteger" for node in graph.node)
        assert has_integers == bool(options)
    places = {
        weight.name: {entry.key: entry.value for entry in weight.external_data}
        for weight in graph.initializer
        if weight.external_data
    }
    by_file = {"model.onnx.data": 0, "encoder.onnx.data": 0}
    for place in places.values():
        by_file[place["location"]] += int(place["length"])
    assert by_file["model.onnx.data"] >= 300 * 32 * (1 if options else 4)
    assert (folder / "encoder.onnx.data").stat().st_size == by_file["encoder.onnx.data"]
    # Each is what the checkpoint has: the embedding of all tokens, read where it lies now.
    whole = onnx.load(folder / "encoder.onnx")
    stored = {w.name: onnx.numpy_helper.to_array(w) for w in whole.graph.initializer}
    model = load_model(opened(tmp_path / "checkpoint"))
    if not options:
        wanted = model.get_encoder().embed_tokens.weight.detach().numpy()
        assert any(np.array_equal(array, wanted) for array in stored.values())


def test_graphs_without_common_weights_stay_as_they_are(captures, tmp_path):
    export_family("marian", tmp_path, captures)
    folder = tmp_path / "target"
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert share_weights(folder) == 0  # what both had is shared already
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    (folder / "encoder.onnx.data").unlink()
    assert share_weights(folder) == 0


def stand_at_rows(graph: onnx.GraphProto) -> None:
    """Take row 2 for every position of the cache."""
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([2], np.int64), "two"))
    rename_inputs(graph, row_positions="two")


def see_after_sources(graph: onnx.GraphProto) -> None:
    """Read what lies after the tokens of the shorter sources of a call."""
    for node in graph.node:
        if "source_lengths" in node.input:
            del node.input[3:]


def take_places_of_others(graph: onnx.GraphProto) -> None:
    """Take for each row what another row has found in the source that it reads."""
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(2, np.int64), "two"))
    rename_inputs(graph, source_places="halves")
    graph.node.insert(0, onnx.helper.make_node("Div", ["source_places", "two"], ["halves"]))


MUTATIONS = [swap_keys_of_sources, stand_at_rows, see_after_sources, take_places_of_others]


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_a_wrong_source_or_wrong_positions_fail(mutate, captures, tmp_path):
    checkpoint, _ = export_family("t5", tmp_path, captures)
    cases = [case for case in source_cases(checkpoint) if case.name in ("tree", "sources")]
    wanted = references(load_model(checkpoint), checkpoint, cases)
    limit = ParityLimit(MAX_ABS_ERROR, 1e-4)
    check_refused(mutate, tmp_path / "target", checkpoint, wanted, limit)


WRONG_OPTIONS = [
    ({"dtype": "fp16"}, "dtype='fp16' is not supported for the target, an encoder-decoder"),
    ({"dtype": "bf16"}, "dtype='bf16' is not supported for .*: its engines run on the CPU; use"),
    ({"attention": "exact"}, "attention='exact' is not supported for .*: exact sums over the rows"),
    (
        {"engine": "tensorrt-rtx", "compute_capability": "8.6"},
        "engine='tensorrt-rtx' is not supported for .*: TensorRT does not",
    ),
    ({"form": "webgpu"}, "not supported for the target, an encoder-decoder.*; use form='portable'"),
    ({"features": True}, "features=True is not supported"),
    ({"max_source": 8}, "max_source=8 is too short"),
]
WRONG = [
    *(("marian", *row) for row in WRONG_OPTIONS),
    ("llama", {"max_source": 64}, "max_source=64 has no meaning for the target"),
    ("whisper", {"max_source": 64}, "max_source=64 has no meaning for the target"),
    ("whisper", *WRONG_OPTIONS[0]),
    ("whisper", *WRONG_OPTIONS[4]),
]


@pytest.mark.parametrize(("name", "options", "words"), WRONG)
def test_options_without_a_form_are_refused(name, options, words, tmp_path):
    write = write_whisper if name == "whisper" else partial(write_family_checkpoint, name)
    target, output = write(tmp_path / "target"), tmp_path / "b"
    with pytest.raises(ExportError, match=words):
        export_bundle(ExportConfig(target=str(target), output=output, **options), report=print)
    assert not output.exists()


@pytest.mark.parametrize("order", [("marian", "llama"), ("llama", "marian")])
def test_a_pair_of_which_one_reads_a_source_is_refused(order, tmp_path):
    target, draft = (str(write_family_checkpoint(name, tmp_path / name)) for name in order)
    with pytest.raises(ExportError, match="expected both or neither"):
        export_bundle(ExportConfig(target=target, draft=draft, output=tmp_path / "b"), report=print)


def test_a_start_token_is_needed(tmp_path):
    folder = write_family_checkpoint("t5", tmp_path / "t5")
    for file in (folder / "config.json", folder / "generation_config.json"):
        edit_json(file, decoder_start_token_id=None)
    with pytest.raises(ExportError, match="decoder_start_token_id None, expected the token id"):
        opened(folder)


LIMITS = [  # (n_positions, max_context, max_source, those that hold)
    (None, None, None, (512, 512)),
    (1024, None, None, (1024, 1024)),
    (None, 2048, None, (2048, 512)),
    (128, 64, 4096, (64, 4096)),
]


@pytest.mark.parametrize(("own", "max_context", "max_source", "wanted"), LIMITS)
def test_limits_of_a_model_that_knows_distances(own, max_context, max_source, wanted, tmp_path):
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 1}
    more = {} if own is None else {"n_positions": own}
    config = T5Config(vocab_size=300, decoder_start_token_id=0, pad_token_id=0, **sizes, **more)
    folder = write_checkpoint(tmp_path / "t5", config)
    checkpoint = opened(folder, max_context=max_context, max_source=max_source)
    assert (checkpoint.context_length, checkpoint.encoder.context_length) == wanted


def test_defaults_that_an_older_checkpoint_has_in_its_config(captures, tmp_path):
    target = write_family_checkpoint("marian", tmp_path / "target")
    (target / "generation_config.json").unlink()
    edit_json(target / "config.json", num_beams=6)
    output = tmp_path / "bundle"
    export_quietly(captures, output, target)
    defaults = json.loads((output / "generation_config.json").read_text())
    assert defaults["num_beams"] == 6
    assert defaults["decoder_start_token_id"] == 2


def test_an_argument_that_attention_does_not_know_is_refused():
    """A position bias of a family that is not known, say: it would be left out without a word."""
    rows = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ExportError, match=r"gives attention the argument window \(5\)"):
        source_attention(torch.nn.Identity(), rows, rows, rows, None, window=5)
