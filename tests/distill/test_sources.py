"""Drafts for encoder-decoders: sources, targets that the teacher makes of them, the draft."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from dsbd_distill.config import DistillConfig
from dsbd_distill.draft_kind import TextSourceDrafts
from dsbd_distill.lesson import NUM_TOP
from dsbd_distill.sources import (
    SourceRowReader,
    SourceRows,
    SourceTeacher,
    SourceTokens,
    decoder_parameters,
    sources_of,
)
from dsbd_distill.teacher import Sampling, TorchDevice
from dsbd_distill.teaching import target_begin
from dsbd_export.checkpoints.checkpoint_files import read_proposed_tokens
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import ExportConfig
from dsbd_export.encoder_decoder.source import fingerprint
from dsbd_export.errors import ExportError
from dsbd_export.pipeline import export_bundle
from dsbd_export.progress import silent
from dsbd_export.texts import TextFile, is_held_out
from dsbd_ort import Pipeline
from dsbd_ort.commands.distill import record_rows
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.bundle_files.draft_record import RECORD_FILE, read_record
from scripts.family_checkpoints import write_family_checkpoint
from tests.distill.conftest import Distilled, assert_same_ids, drafts_of, opened, run
from tests.made_once import made_once

EXACT = TorchDevice("cpu", uses_bf16=False)
STEPS = 40


def write_lines(file, number=300):
    lines = [f"def f{i}(x): return x * {7 * i} + {'abcdefg'[i % 7]}" for i in range(number)]
    file.write_text("\n".join(lines) + "\n\n")
    return file


@pytest.fixture(scope="module")
def marian(tmp_path_factory):
    return write_family_checkpoint("marian", tmp_path_factory.mktemp("marian") / "TARGET")


def config_of(target, folder, **options):
    data = write_lines(folder / "lines.txt")
    settings = {"steps": STEPS, **options}
    return DistillConfig(target=str(target), data=(str(data),), output=folder / "draft", **settings)


LINES = [  # (line of a .jsonl file, the source or words of the error)
    ('"a"', "a"),
    ('{"text": "b"}', "b"),
    ('{"source": "c", "target": "d"}', "c"),
    ('{"source": "c", "text": "d"}', "lines.jsonl:1 has both a source and a text"),
    ('{"messages": []}', "is a chat, but the target is an encoder-decoder"),
    ("{", "lines.jsonl:1 is invalid JSON"),
    ("7", "lines.jsonl:1 has no source"),
]


@pytest.mark.parametrize(("line", "wanted"), LINES)
def test_sources_of_json(line, wanted, tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text(line + "\n")
    if "lines.jsonl" not in wanted and " " not in wanted:
        assert list(sources_of(TextFile(file, file.name))) == [("lines.jsonl:1", wanted)]
    else:
        with pytest.raises(ExportError, match=re.escape(wanted)):
            list(sources_of(TextFile(file, file.name)))


def test_every_line_of_a_text_is_a_source(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one\n\n  two words \nthree")
    found = [("a.txt:1", "one"), ("a.txt:3", "two words"), ("a.txt:4", "three")]
    assert list(sources_of(TextFile(file, file.name))) == found


def test_sources_are_read_as_by_requests_and_long_ones_counted(marian):
    reader = SourceTokens(marian, opened(marian), longest=6)
    assert len(reader.token_ids("def f")) <= 6
    assert reader.token_ids("def read(path): return path " * 9) == []
    assert reader.num_left_out == 1


ROWS = [  # (tokens, counted after the last of them, sources, targets, counted of the targets)
    (
        *([[5, 6, 2, 7, 8], [5, 2, 7, 0, 0]], [[0, 1, 1, 1], [1, 1, 0, 0]]),
        *([[5, 6], [5, 0]], [[2, 7, 8], [2, 7, 0]], [[1, 1, 1], [1, 1, 0]], 1),
    ),
    ([[5, 6, 2, 9, 7]], [[0, 1, 1]], [[5, 6]], [[2, 9, 7]], [[0, 1, 1]], 2),
]


@pytest.mark.parametrize(("tokens", "counted", "sources", "targets", "after", "begin"), ROWS)
def test_rows_are_parted(tokens, counted, sources, targets, after, begin):
    reader = SourceRowReader(None, begin)
    found = SourceRows.of(torch.tensor(tokens), torch.tensor(counted).bool(), reader)
    assert found.sources.tolist() == sources
    assert found.is_source.tolist() == [[int(t > 0) for t in row] for row in sources]
    assert found.targets.tolist() == targets
    assert found.counted.int().tolist() == after


@pytest.mark.parametrize("name", ["marian", "t5"])
def test_the_teachers_targets_and_distributions(name, tmp_path):
    """Of sources of several lengths together, they are those of each alone."""
    model = load_model(opened(write_family_checkpoint(name, tmp_path / name)))
    reader = SourceRowReader(model, 2)
    teacher = SourceTeacher(model, 300, 64, EXACT, reader=reader)
    rng = np.random.default_rng(0)
    prompts = [np.array([*rng.integers(3, 290, n), 2, 9]) for n in (3, 9, 1, 20)]
    found = teacher.answer(prompts, 12, Sampling(temperature=1.0, top_k=5), ends=(1,), seed=3)
    rows = SourceRows.of(
        torch.from_numpy(found.tokens.astype(np.int64)), torch.from_numpy(found.counted), reader
    )
    assert rows.sources[1, :9].tolist() == prompts[1][:-2].tolist()
    for index, prompt in enumerate(prompts):
        target = rows.targets[index][: int(rows.counted[index].sum()) + 1]
        ids = {"input_ids": torch.tensor(prompt[None, :-2]), "decoder_input_ids": target[None]}
        with torch.no_grad():
            logits = model(**ids, use_cache=False).logits[0, 1:]
        best = logits.log_softmax(-1).topk(NUM_TOP)
        counted = found.counted[index]
        assert np.allclose(found.log_probs[index][counted], best.values.numpy(), atol=2e-4)
        for place, drawn in enumerate(target[2:].tolist()):
            assert drawn in best.indices[place, :5].tolist() and drawn != 1
        assert target[:2].tolist() == [2, 9] and 1 <= counted.sum() <= 12


@pytest.mark.parametrize("name", ["marian", "t5"])
def test_a_decoder_of_some_layers(name, tmp_path):
    checkpoint = opened(write_family_checkpoint(name, tmp_path / name))
    target = load_model(checkpoint)
    layers = "block" if name == "t5" else "layers"
    for number, kept in ((1, [2]), (2, [0, 2])):
        drafts = drafts_of(TextSourceDrafts, checkpoint, target, target_layers=number)
        draft = drafts.first_draft()
        own, theirs = (dict(m.get_decoder().named_parameters()) for m in (draft, target))
        for name_of, weight in own.items():
            layer = re.match(rf"{layers}\.(\d+)\.", name_of)
            wanted = name_of
            if layer and "relative_attention_bias" not in name_of:
                wanted = name_of.replace(layer[0], f"{layers}.{kept[int(layer[1])]}.", 1)
            assert torch.equal(weight, theirs[wanted])
        assert fingerprint(draft) == fingerprint(target)
        trained = {each for each, weight in draft.named_parameters() if weight.requires_grad}
        assert trained and all("decoder" in each for each in trained)
        assert not any("embed_tokens" in each or "shared" in each for each in trained)
        assert decoder_parameters(draft) < decoder_parameters(target)


@pytest.fixture(scope="module")
def distilled(marian, tmp_path_factory):
    def make(folder):
        folder.mkdir()
        config = config_of(marian, folder, draft_vocab=100, coverage=2)
        return Distilled(config, *run(config))

    return made_once(tmp_path_factory, "distilled-sources", make)


def test_the_draft_is_better_than_before(distilled):
    config, record, report = distilled.config, distilled.record, distilled.report
    assert record.acceptance > record.curve[0].acceptance + 0.05
    assert record.acceptance > record.curve[0].acceptance + 5 * record.acceptance_error
    assert record.are_sources and not record.are_chats
    assert (record.temperature, record.top_p) == (0.7, 0.9)
    names = [f"lines.txt:{number}" for number in range(1, 301)]
    held_out = sum(map(is_held_out, names))
    assert record.num_train_prompts == 300 - held_out
    assert any(line.startswith(f"{300 - held_out} sources to learn from") for line in report)
    assert any(line.endswith("1 layers of 32") for line in report)
    assert "held-out sources" in record_rows(record)["of"]
    assert read_record(config.output / RECORD_FILE) == record
    assert len(read_proposed_tokens(config.output, 300)) == record.num_proposed_tokens == 100
    content = json.loads((config.output / "config.json").read_text())
    assert (content["decoder_layers"], content["encoder_layers"]) == (1, 2)


def test_the_export_shares_the_encoder_of_the_draft(distilled, marian, captures, tmp_path):
    config = distilled.config
    output = tmp_path / "bundle"
    pair = ExportConfig(target=str(marian), draft=str(config.output), output=output)
    export_bundle(pair, report=silent, source_of=captures)
    bundle = open_bundle(output)
    assert bundle.entry("draft").encoder.is_shared
    assert f"draft/{RECORD_FILE}" in bundle.manifest.files
    with Pipeline.from_bundle(output, num_threads=1) as pipe:
        for source in ("def f1(x)", "return x * 7"):
            options = {"num_beams": 3, "max_new_tokens": 10, "num_return_sequences": 3}
            strategies = ("speculative-beam-search", "beam-search")
            assert_same_ids(pipe, *strategies, source=source, **options)


REFUSED = [
    ({"kind": "feature"}, "kind='feature' is not supported for the target (family marian)"),
    ({"params": "1M"}, "params='1M' is not supported for the target (family marian)"),
    ({"learn_answers": True}, "learn_answers has no meaning for the target"),
    ({"target_layers": 3}, "target_layers=3 makes no draft: the target has 3 layers"),
    ({"draft_vocab": 300}, "draft_vocab=300 leaves out none of 300 tokens"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_options_that_are_refused(options, words, marian, tmp_path):
    with pytest.raises(ExportError, match=re.escape(words)):
        run(config_of(marian, tmp_path, **options))
    assert [path.name for path in tmp_path.iterdir()] == ["lines.txt"]


def test_too_few_sources_are_refused(marian, tmp_path):
    config = config_of(marian, tmp_path)
    write_lines(tmp_path / "lines.txt", 19)
    with pytest.raises(ExportError, match="data has 19 sources, at least 20 are needed"):
        run(config)


def test_a_language_of_targets_must_be_known(marian):
    checkpoint = opened(marian)
    assert target_begin(checkpoint) == [2]
    encoder = replace(checkpoint.encoder, languages={"eng_Latn": 290})
    checkpoint = replace(checkpoint, encoder=encoder)
    with pytest.raises(ExportError, match="translates between 1 languages"):
        target_begin(checkpoint)
    checkpoint.config.forced_bos_token_id = 290
    assert target_begin(checkpoint) == [2, 290]
