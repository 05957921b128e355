"""Drafts for language models that read sound: prompts, given rows, the draft and its bundle."""

import json
import re

import numpy as np
import pytest
import torch

from dsbd_distill.config import DistillConfig
from dsbd_distill.given_sounds import GivenSounds, write_prompts
from dsbd_distill.work_folder import WorkFolder
from dsbd_errors import DsbdError
from dsbd_export.checkpoints.checkpoint_files import read_proposed_tokens
from dsbd_export.errors import ExportError
from dsbd_export.given_prompt.source import GivenPromptSource
from dsbd_export.progress import silent
from dsbd_export.texts import find_files
from dsbd_ort import Pipeline
from dsbd_ort.commands.distill import measure_speed
from dsbd_ort.speech.prompted.prompted_transcription import learned_prompts
from dsbd_runtime.bundle_files.bundle import MANIFEST_NAME, open_bundle
from dsbd_runtime.bundle_files.manifest import manifest_from_file
from dsbd_runtime.errors import BundleError
from dsbd_runtime.loading import load_causal_lm
from dsbd_runtime.parts.given.given_rows import GivenRows
from scripts.qwen3_asr_checkpoint import VOCAB_SIZE, write_qwen3_asr
from scripts.speech_checkpoints import MODELS, write_speech_model
from tests.distill.conftest import Distilled, assert_same_weights, interrupted, opened, run
from tests.exports import export_quietly
from tests.given.checks import check_together
from tests.given.sounds import inputs_of, noise, prompt_of, request_of, requests_of
from tests.given.test_sharing import check_in_turn
from tests.made_once import made_once
from tests.speech.audio_files import wav_bytes
from tests.speech.sounds import speech_like

KINDS = ["qwen3_asr", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS)]
STEPS = 40


def write_target(name, folder):
    if name == "qwen3_asr":
        return write_qwen3_asr(folder, num_hidden_layers=4)
    return write_speech_model(name, folder)


def write_sounds(folder, number=40):
    folder.mkdir()
    for index in range(number):
        seconds = 2.3 if index % 4 == 0 else 0.4 + 0.02 * index
        (folder / f"{index}.wav").write_bytes(wav_bytes(speech_like(seconds, seed=index)))
    return folder


def config_of(target, folder, data, **options):
    settings = {"steps": STEPS, "draft_vocab": 200, **options}
    return DistillConfig(target=str(target), data=(str(data),), output=folder / "draft", **settings)


def written(target, folder, number=6):
    """Return a checkpoint, its prompts of some sounds, and the sounds for its own model."""
    checkpoint, model = opened(target), None
    work = WorkFolder(folder / "work")
    work.path.mkdir()
    asked_of = learned_prompts(checkpoint.given, checkpoint.context_length, target, None, None)
    files = find_files((str(write_sounds(folder / "audio", number)),), ())
    write_prompts(files, asked_of, checkpoint, work)
    model = GivenPromptSource(checkpoint).load("fp32", silent)
    return checkpoint, work, model, [prompt for each in files for prompt in asked_of(each.path)]


def stored_prompts(work):
    tokens = np.fromfile(work.tokens / "train_prompts.bin", np.uint32).astype(np.int64)
    return np.split(tokens, np.fromfile(work.tokens / "train_prompts_ends.bin", np.int64)[:-1])


@pytest.mark.parametrize("name", KINDS)
def test_prompts_and_their_rows_are_those_of_requests(name, tmp_path):
    """In a stored prompt the rows are tokens; the model reads these as its own encoder's rows."""
    checkpoint, work, model, prompts = written(write_target(name, tmp_path / "target"), tmp_path)
    media = checkpoint.kind.media(checkpoint.given.medium)[:3]
    own = [checkpoint.kind.own_rows(model, each.arguments).detach().numpy() for each in media]
    sounds = GivenSounds(model, checkpoint, work, most_begin=200)
    names = checkpoint.given.medium.encoder_inputs
    for medium, wanted in zip(media, own, strict=True):
        inputs = [[torch.tensor(each.inputs[n]) for n in names] for each in medium.pieces]
        found = np.concatenate([sounds._encoder(each)[0].detach().numpy() for each in inputs])
        assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()
    stored = stored_prompts(work)
    assert len(stored) == len(prompts) >= 6
    size, num_rows = checkpoint.vocab_size, 0
    for row, prompt in zip(stored, prompts, strict=True):
        given = row[row >= size] - size
        assert given.tolist() == [*range(num_rows, num_rows + len(given))]
        num_rows += len(given)
        source, ids = sounds.request_of(row)
        assert ids == list(prompt)
        for ours, theirs in zip(source.pieces, prompt.inputs.source.pieces, strict=True):
            assert ours.num_rows == theirs.num_rows
            for each in names:
                assert np.allclose(ours.inputs[each], theirs.inputs[each], atol=2e-3)
    again = GivenSounds(model, checkpoint, work, most_begin=200)
    kept = sorted(file.name for file in work.hidden_states.iterdir())
    assert (sounds.rows(np.arange(num_rows)) == again.rows(np.arange(num_rows))).all()
    assert kept == sorted(f.name for f in work.hidden_states.iterdir()) or not kept


@pytest.fixture(scope="module")
def pair(tmp_path_factory, captures):
    """A folder with a target, a draft that was distilled for it, and their bundle."""

    def make(folder):
        target = write_target("qwen3_asr", folder / "target")
        config = config_of(target, folder, write_sounds(folder / "audio"))
        distilled = Distilled(config, *run(config, ask=learned_prompts))
        export_quietly(captures, folder / "bundle", target, config.output)
        return distilled

    return made_once(tmp_path_factory, "distilled-given", make)


@pytest.fixture(scope="module")
def bundle(pair):
    return pair.config.output.parent / "bundle"


@pytest.fixture(scope="module")
def pipe(bundle):
    with Pipeline.from_bundle(bundle, num_threads=1) as opened:
        yield opened


def test_the_draft_is_better_than_before(pair):
    config, record, report = pair.config, pair.record, pair.report
    assert record.acceptance > record.curve[0].acceptance + 0.05
    assert record.are_sources and not record.are_chats
    assert any("windows of sound to learn from" in line for line in report)
    assert any(line.endswith("2 layers of 32") for line in report)
    assert len(read_proposed_tokens(config.output, VOCAB_SIZE)) == 200
    content = json.loads((config.output / "config.json").read_text())
    assert content["text_config"]["num_hidden_layers"] == 2
    assert content["audio_config"]["encoder_layers"] == 2


def test_the_bundle_has_one_encoder(pair, bundle, pipe):
    manifest = open_bundle(bundle).manifest
    assert manifest.draft.given.is_shared and manifest.target.given.is_shared is None
    assert "target/encoder.onnx" in manifest.files and "draft/encoder.onnx" not in manifest.files
    inputs = inputs_of(pipe, prompt_of(1), [noise(237)])
    with pipe.models.engines() as (target, draft):
        encoder = target.part(GivenRows).encoder
        assert draft.part(GivenRows).encoder is encoder
        before, of_draft = encoder.num_read, draft.kv_bytes
    pipe.models.decoded(
        [request_of(pipe, inputs, strategy="speculative-beam-search", draft_length=3)]
    )
    with pipe.models.engines() as (_, draft):
        assert encoder.num_read == before + 2  # windows, each read once for both
        assert draft.part(GivenRows).num_bytes == 0 < draft.kv_bytes >= of_draft
    with load_causal_lm(open_bundle(bundle), "draft") as alone:
        assert alone.part(GivenRows).encoder.num_read == 0


DRAFTED = [
    ({"strategy": "speculative-beam-search", "num_beams": 1}, {"strategy": "greedy"}),
    ({"strategy": "speculative"}, {"strategy": "sample"}),
    ({"strategy": "speculative-beam-search"}, {"strategy": "beam-search"}),
    ({"strategy": "dsbd"}, {"strategy": "beam-sample"}),
]


@pytest.mark.parametrize(("drafted", "plain"), DRAFTED, ids=lambda each: each["strategy"])
def test_drafted_is_plain_alone_together_preempted_and_with_a_prefix(drafted, plain, pipe):
    beams = {}
    if plain["strategy"].startswith("beam"):
        beams = {"num_beams": 3, "num_return_sequences": 3}
    forced = {"draft_policy": "fixed", "draft_length": 3}
    found = check_together(pipe, lambda: requests_of(pipe, {**drafted, **beams, **forced}))
    wanted = check_together(pipe, lambda: requests_of(pipe, {**plain, **beams}))
    assert sum(each.stats.num_draft_tokens for each in found) > 0
    assert sum(each.stats.num_accepted_layers for each in found) > 0
    for ours, theirs in zip(found, wanted, strict=True):
        assert [s.token_ids for s in ours.sequences] == [s.token_ids for s in theirs.sequences]
    if plain["strategy"] == "beam-search":
        check_in_turn(pipe, {**drafted, **forced})


def test_another_encoder_is_the_drafts_own(given_pair):
    """A draft of the same kind with a narrower encoder."""
    manifest = open_bundle(given_pair / "bundle").manifest
    assert manifest.draft.given.is_shared is None and manifest.draft.given.fingerprint is None
    assert "draft/encoder.onnx" in manifest.files


WRONG = [
    ("draft", {"width": 31}, "draft: given: width is 31, expected 32, that of the target"),
    ("target", {"is_shared": True}, "target: given: is_shared is True"),
    ("target", None, "draft: given: width is 32, expected null"),
]


@pytest.mark.parametrize(("role", "change", "words"), WRONG)
def test_contradictory_manifests(role, change, words, bundle, tmp_path):
    manifest = json.loads((bundle / MANIFEST_NAME).read_text())
    entry = manifest[role]
    given = None if change is None else {**entry["given"], **change}
    file = tmp_path / MANIFEST_NAME
    file.write_text(json.dumps({**manifest, role: {**entry, "given": given}}))
    with pytest.raises(BundleError, match=re.escape(words)):
        manifest_from_file(file)


REFUSED = [
    ({"language": "xx"}, "language is 'xx'"),
    ({"task": "translate"}, "task is 'translate', but this model writes the language"),
    ({"kind": "feature"}, "kind='feature' is not supported for the target (family qwen3_asr)"),
    ({"learn_answers": True}, "learn_answers has no meaning for the target (family qwen3_asr)"),
    ({"target_layers": 4}, "target_layers=4 makes no draft: the target has 4 layers"),
    ({"draft_vocab": 307}, "draft_vocab=307 leaves out none of 307 tokens"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_options_that_are_refused(options, words, pair, tmp_path):
    data = pair.config.data[0]
    with pytest.raises(DsbdError, match=re.escape(words)):
        run(config_of(pair.config.target, tmp_path, data, **options), ask=learned_prompts)


def test_something_must_ask_and_files_must_be_audio(pair, tmp_path):
    with pytest.raises(ExportError, match="hear is missing, which reads audio"):
        run(config_of(pair.config.target, tmp_path, pair.config.data[0]))
    (tmp_path / "a.wav").write_text("no sound")
    config = config_of(pair.config.target, tmp_path, tmp_path / "a.wav")
    with pytest.raises(ExportError, match="1 of 1 files of data cannot be heard"):
        run(config, ask=learned_prompts)


@pytest.mark.slow
def test_interrupted_it_ends_the_same(pair, tmp_path):
    config = DistillConfig(**{**vars(pair.config), "output": tmp_path / "draft"})
    interrupted(config, "held-out acceptance", ask=learned_prompts)
    record, report = run(config)  # no audio is read again
    assert f"going on from step {STEPS}" in report
    assert record.acceptance == pair.record.acceptance
    assert_same_weights(config.output, pair.config.output)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_drafts_of_other_kinds(name, captures, tmp_path):
    target = write_target(name, tmp_path / "target")
    config = config_of(target, tmp_path, write_sounds(tmp_path / "audio"), target_layers=1)
    record, _ = run(config, ask=learned_prompts, measure_speed=measure_speed)
    assert record.acceptance > record.curve[0].acceptance
    assert {(s.num_beams, s.is_greedy) for s in record.speeds} >= {(1, False), (4, True)}
    export_quietly(captures, tmp_path / "bundle", target, config.output)
    assert open_bundle(tmp_path / "bundle").manifest.draft.given.is_shared
    asked = {"max_new_tokens": 12, "temperature": 0.0, "num_beams": 3}
    with Pipeline.from_bundle(tmp_path / "bundle", num_threads=1) as pipe:
        samples = speech_like(1.7, seed=99)
        wanted = pipe.transcribe(samples, strategy="beam-search", **asked)
        drafted = {"strategy": "speculative-beam-search", "draft_length": 3, "drafter": "model"}
        found = pipe.transcribe(samples, **drafted, **asked)
        assert found.stats.num_draft_tokens > 0
        assert [s.token_ids for s in found.segments] == [s.token_ids for s in wanted.segments]


@pytest.mark.slow
def test_with_params_it_is_a_draft_of_texts(pair, tmp_path):
    """And a draft that reads text alone has no given rows."""
    data = tmp_path / "texts"
    data.mkdir()
    for number in range(40):
        (data / f"{number}.txt").write_text(f"The quick brown fox {number} says. " * 40)
    options = {"params": "60K", "draft_vocab": None, "steps": 2}
    run(config_of(pair.config.target, tmp_path, data, **options))
    content = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert content["model_type"] == "llama"
