"""Whisper: the whole parity gate over sound, int8, drafts, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tokenizers import Tokenizer

from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import ExportConfig, ModelOptions
from dsbd_export.encoder_decoder.source import source_cases
from dsbd_export.errors import ExportError
from dsbd_export.gate.parity import MAX_ABS_ERROR, ParityLimit
from dsbd_export.opening import source_of
from dsbd_export.parity_cases import reference_logits
from dsbd_export.parts.alignment import alignment_cases, alignment_error, with_alignment
from dsbd_export.parts.sources import fixed_sources
from dsbd_export.pipeline import export_bundle
from dsbd_runtime.bundle_files.bundle import MODEL_FILE
from dsbd_runtime.parts.source.speech_entry import ALIGNMENT_FILE, ALIGNMENT_WEIGHTS
from scripts.family_checkpoints import write_family_checkpoint
from scripts.speech_checkpoint import NUM_MELS, TOKENS, write_whisper
from tests.export.conftest import opened, written_tokenizer
from tests.export.gate import (
    bundle_of,
    check_refused,
    count_positions_from_the_first_new_row,
    export_alone,
    references,
    swap_keys_of_sources,
)
from tests.exports import export_quietly


def exported_whisper(folder, captures, *, multilingual=True, **options):
    source = write_whisper(folder / "checkpoint", multilingual=multilingual)
    return export_alone(source, folder, captures, **options)[:2]


def test_the_whole_gate_over_three_sounds(captures, tmp_path):
    checkpoint, entry = exported_whisper(tmp_path, captures)
    assert entry.parity.max_abs_error < 5e-5
    assert (entry.context_length, entry.num_layers, entry.encoder.context_length) == (96, 3, 100)
    assert [rows.layer for rows in entry.encoder.cross] == [0, 1, 2]
    cases = source_cases(checkpoint)
    assert len({case.values for case in cases}) == 3
    assert cases[-1].name == "text"
    graph = onnx.load(tmp_path / "target" / "encoder.onnx", load_external_data=False).graph
    [features] = graph.input
    assert features.name == "input_features"
    assert [dim.dim_value for dim in features.type.tensor_type.shape.dim] == [1, NUM_MELS, 100]


def test_the_entry_says_what_generation_config_says(captures, tmp_path):
    _, entry = exported_whisper(tmp_path, captures)
    speech = entry.encoder.speech
    assert (speech.sampling_rate, speech.n_fft, speech.hop_length) == (16_000, 400, 160)
    assert (speech.num_mels, speech.chunk_seconds, speech.num_frames) == (NUM_MELS, 1, 100)
    assert speech.languages == {code: TOKENS.of(code) for code in ("en", "de", "fr")}
    assert speech.tasks == {name: TOKENS.of(name) for name in ("transcribe", "translate")}
    assert speech.first_timestamp == TOKENS.end + len(TOKENS.names)
    assert speech.previous_token_id == TOKENS.of("startofprev")
    assert speech.no_speech_token_id == TOKENS.of("nospeech")
    assert speech.begin_suppress_tokens == [5, TOKENS.end]
    assert speech.max_initial_timestamp_index == 10
    assert speech.alignment_heads == [[1, 0], [2, 3]]


def test_english_alone_and_int8_of_both_graphs(captures, tmp_path):
    options = {"quantize": "int8-dynamic", "attention": "fused"}
    _, entry = exported_whisper(tmp_path, captures, multilingual=False, **options)
    assert entry.encoder.speech.languages is entry.encoder.speech.tasks is None
    for file in ("model.onnx", "encoder.onnx"):
        graph = onnx.load(tmp_path / "target" / file, load_external_data=False).graph
        assert any(node.op_type == "MatMulInteger" for node in graph.node)


@pytest.mark.parametrize(
    ("options", "limit"), [({}, 1e-5), ({"quantize": "int8-dynamic", "attention": "fused"}, 0.1)]
)
def test_the_alignment_graph_reads_the_decoders_weights(options, limit, captures, tmp_path):
    _, entry = exported_whisper(tmp_path, captures, **options)
    folder = tmp_path / "target"
    assert 0.0 < entry.encoder.speech.alignment.max_abs_error < limit
    model, aligned = (
        onnx.load(folder / name, load_external_data=False) for name in (MODEL_FILE, ALIGNMENT_FILE)
    )
    assert [output.name for output in aligned.graph.output] == [ALIGNMENT_WEIGHTS, "logits"]
    stored = {w.name: w.external_data for w in model.graph.initializer if w.external_data}
    again = {w.name: w.external_data for w in aligned.graph.initializer if w.external_data}
    assert again == stored != {}
    assert {file.name for file in folder.iterdir() if file.suffix == ".data"} == {
        "model.onnx.data",
        "encoder.onnx.data",
    }


def test_a_graph_that_attends_by_another_head_is_refused(captures, tmp_path):
    checkpoint, _ = exported_whisper(tmp_path, captures)
    folder = tmp_path / "target"
    cases = alignment_cases(load_model(checkpoint), checkpoint)
    error = alignment_error(bundle_of(folder, checkpoint), checkpoint, cases)
    assert with_alignment(checkpoint, error) == checkpoint.encoder
    graph = onnx.load(folder / ALIGNMENT_FILE, load_external_data=False)
    [heads] = [each for each in graph.graph.initializer if each.name == "alignment.0.heads"]
    heads.CopyFrom(onnx.numpy_helper.from_array(np.array([2]), heads.name))
    onnx.save(graph, folder / ALIGNMENT_FILE)
    with pytest.raises(ExportError, match=r"the attention to the sound of the target .* differs"):
        alignment_error(bundle_of(folder, checkpoint), checkpoint, cases)
    rounded = bundle_of(folder, checkpoint, ModelOptions(quantize="int8-dynamic"))
    assert alignment_error(rounded, checkpoint, cases) > 1e-3


def test_drafts_and_checkpoints_without_alignment_heads_have_no_graph(captures, tmp_path):
    checkpoint, _ = exported_whisper(tmp_path, captures)
    model, encoder = load_model(checkpoint), checkpoint.encoder
    assert len(alignment_cases(model, checkpoint)) == 2
    unknown = replace(encoder, speech=replace(encoder.speech, alignment_heads=None))
    assert alignment_cases(model, replace(checkpoint, encoder=unknown)) == []
    assert alignment_cases(model, replace(checkpoint, role="draft")) == []


def test_the_encoder_reads_each_sound_once(captures, tmp_path):
    """It takes most of the time of the references of a large model."""
    checkpoint, _ = exported_whisper(tmp_path, captures)
    source = source_of(checkpoint)
    model = source.load("fp32", lambda _: None)
    sounds = []
    model.get_encoder().register_forward_hook(lambda *_: sounds.append(None))
    found = source.references(model)
    assert len(found) > len(sounds) == len({each.case.values for each in found}) == 3
    alone = reference_logits(model, found[0].case)
    np.testing.assert_array_equal(found[0].logits, alone)


@pytest.mark.parametrize("change", [swap_keys_of_sources, count_positions_from_the_first_new_row])
def test_a_wrong_source_or_wrong_positions_fail(change, captures, tmp_path):
    checkpoint, _ = exported_whisper(tmp_path, captures)
    trees = [case for case in source_cases(checkpoint) if case.name == "tree"]
    wanted = references(load_model(checkpoint), checkpoint, trees)
    limit = ParityLimit(MAX_ABS_ERROR, 1e-4)
    check_refused(change, tmp_path / "target", checkpoint, wanted, limit)


def test_times_are_no_part_of_a_text(captures, tmp_path):
    target = write_whisper(tmp_path / "target")
    bundle = export_quietly(captures, tmp_path / "bundle", target)
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    time = TOKENS.end + len(TOKENS.names)
    ids = [time, *tokenizer.encode("one", add_special_tokens=False).ids, time + 7]
    assert tokenizer.decode(ids) == "one"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|0.00|>one<|0.14|>"


def test_words_that_were_added_after_the_times_are_text(captures, tmp_path):
    words, size = [" Kubernetes", " pgvector"], TOKENS.number
    target = write_whisper(tmp_path / "target", vocab_size=size + len(words))
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    assert tokenizer.add_tokens(words) == len(words)
    tokenizer.save(str(target / "tokenizer.json"))
    checkpoint = opened(target)
    assert checkpoint.encoder.speech.last_timestamp == size - 1
    written_tokenizer(checkpoint, tmp_path / "files")
    written = Tokenizer.from_file(str(tmp_path / "files" / "tokenizer.json"))
    time = checkpoint.encoder.speech.first_timestamp
    assert written.decode([time, size, size + 1, size - 1]) == " Kubernetes pgvector"


def edited(folder: Path, file: str, **changes: Any) -> None:
    """Change the content of a JSON file; None takes an entry away."""
    content = {**json.loads((folder / file).read_text()), **changes}
    given = {name: value for name, value in content.items() if value is not None}
    (folder / file).write_text(json.dumps(given))


WRONG = [  # (file, changes, words)
    ("generation_config.json", {"no_timestamps_token_id": None}, "no_timestamps_token_id None"),
    ("generation_config.json", {"lang_to_id": None}, "neither lang_to_id and task_to_id nor"),
    ("generation_config.json", {"language": "xx"}, "language 'xx', expected the code of one of"),
    ("preprocessor_config.json", {"feature_size": 8}, "8 mels and 100 frames of 1 s, its encoder"),
    ("preprocessor_config.json", {"chunk_length": 2}, "16 mels and 200 frames of 2 s"),
    ("preprocessor_config.json", {"dither": 0.5}, "made with noise \\(dither 0.5\\)"),
    ("preprocessor_config.json", {"n_fft": 10**9}, "n_fft is 1000000000, expected at most 4096"),
    ("preprocessor_config.json", {"feature_size": 10**8}, "num_mels is 100000000, expected at"),
    ("preprocessor_config.json", {"sampling_rate": 10**12}, "sampling_rate is 10{12}, expected"),
    ("preprocessor_config.json", {"hop_length": 0}, "hop_length is 0, expected a number above 0"),
    ("preprocessor_config.json", {"chunk_length": 10**12}, "chunk_seconds is 10{12}, expected"),
    ("preprocessor_config.json", {"n_fft": "400"}, "n_fft is '400', expected an integer"),
    ("preprocessor_config.json", {"n_fft": 0}, "n_fft is 0, expected a number above 0"),
    ("generation_config.json", {"suppress_tokens": 3}, "suppress_tokens is 3, expected"),
    ("generation_config.json", {"suppress_tokens": ["a"]}, r"tokens\[0\] is 'a', expected"),
    ("generation_config.json", {"begin_suppress_tokens": [9999]}, r"tokens\[0\] is 9999, expect"),
    ("generation_config.json", {"task_to_id": {"transcribe": "x"}}, "transcribe is 'x', expected"),
    ("generation_config.json", {"max_initial_timestamp_index": "1"}, "index is '1', expected"),
    ("generation_config.json", {"alignment_heads": 7}, "has 7 in alignment_heads"),
    ("generation_config.json", {"decoder_start_token_id": 9999}, "decoder_start_token_id 9999, "),
    ("generation_config.json", {"decoder_start_token_id": True}, "decoder_start_token_id True, "),
    ("generation_config.json", {"alignment_heads": [[1, 4]]}, "has \\[1, 4\\] in alignment_heads"),
    ("generation_config.json", {"alignment_heads": [3]}, "expected a layer and one of its 4 heads"),
    (
        "generation_config.json",
        {"prev_sot_token_id": None, "suppress_tokens": None},
        "prev_sot_token_id None, expected a token id",
    ),
]


@pytest.mark.parametrize(("file", "changes", "words"), WRONG)
def test_files_that_do_not_say_enough_are_refused(file, changes, words, tmp_path):
    folder = write_whisper(tmp_path / "target")
    edited(folder, file, **changes)
    with pytest.raises(ExportError, match=words):
        opened(folder)


def test_settings_that_are_found_elsewhere(tmp_path):
    folder = write_whisper(tmp_path / "target")
    edited(folder, "generation_config.json", prev_sot_token_id=None, language="<|de|>")
    speech = opened(folder).encoder.speech
    assert speech.previous_token_id == TOKENS.of("startofprev")  # the last but one is suppressed
    assert speech.language == "de"
    features = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ExportError, match="3000 frames of 30 s, its encoder reads 16 and 100"):
        opened(folder)
    (folder / "processor_config.json").write_text(json.dumps({"feature_extractor": features}))
    assert opened(folder).encoder.speech.num_frames == 100


def test_a_draft_that_hears_otherwise_is_refused(tmp_path):
    target = str(write_whisper(tmp_path / "target"))
    other = write_whisper(tmp_path / "other", num_mel_bins=8)
    edited(other, "preprocessor_config.json", feature_size=8)
    reader = write_family_checkpoint("marian", tmp_path / "marian")
    for draft, words in ((other, r"the draft \(family whisper\) sound \(8 mels"), (reader, "text")):
        config = ExportConfig(target=target, draft=str(draft), output=tmp_path / "b")
        with pytest.raises(ExportError, match=f"the target .* reads sound .*{words}"):
            export_bundle(config, report=print)


def test_windows_of_the_gate_have_the_shape_that_the_encoder_reads(tmp_path):
    folder = write_whisper(tmp_path / "target")
    checkpoint = opened(folder)
    sounds = fixed_sources(checkpoint.encoder)
    assert {sound.values.shape for sound in sounds} == {(NUM_MELS, 100)}
    assert np.ptp(sounds[-1].values) == 0  # silence
