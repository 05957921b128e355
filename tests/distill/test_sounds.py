"""Drafts for speech models: windows of sound, the teacher's transcripts, the draft."""

import itertools
import json
import re

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from dsbd_distill.config import DistillConfig
from dsbd_distill.draft_kind import SoundDrafts
from dsbd_distill.sounds import SoundSources, open_windows, write_windows
from dsbd_distill.sources import SourceRows, SourceTeacher
from dsbd_distill.teacher import Sampling, TorchDevice
from dsbd_export.checkpoints.checkpoint_files import read_proposed_tokens
from dsbd_export.checkpoints.model_loading import load_model
from dsbd_export.config import ExportConfig
from dsbd_export.encoder_decoder.source import fingerprint
from dsbd_export.errors import ExportError
from dsbd_export.pipeline import export_bundle
from dsbd_export.progress import silent
from dsbd_export.texts import WINDOWS, find_files, open_streams
from dsbd_ort import Pipeline
from dsbd_ort.commands.distill import measure_speed
from dsbd_ort.speech.speech_request import heard_windows
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.bundle_files.draft_record import RECORD_FILE
from scripts.speech_checkpoint import CHUNK_SECONDS, NUM_MELS, TOKENS, write_whisper
from tests.distill.conftest import Distilled, drafts_of, opened, run
from tests.made_once import made_once
from tests.speech.audio_files import wav_bytes
from tests.speech.sounds import chirp, noise, speech_like

EXACT = TorchDevice("cpu", uses_bf16=False)
STEPS = 60


def write_sounds(folder, number=60):
    folder.mkdir()
    for index in range(number):
        seconds = 2.3 if index % 4 == 0 else 0.4 + 0.01 * index
        (folder / f"{index}.wav").write_bytes(wav_bytes(speech_like(seconds, seed=index)))
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_whisper(tmp_path_factory.mktemp("distilled") / "TARGET", deviation=0.3)


@pytest.fixture(scope="module")
def model(target):
    return load_model(opened(target), "fp32")


def config_of(target, folder, data, **options):
    settings = {"steps": STEPS, **options}
    return DistillConfig(target=str(target), data=(str(data),), output=folder / "draft", **settings)


def sources_of(target, model, folder, sounds, **options):
    checkpoint = opened(target)
    data = folder / "data"
    data.mkdir()
    for index, samples in enumerate(sounds):
        (data / f"{index}.wav").write_bytes(wav_bytes(samples))
    speech = checkpoint.encoder.speech
    files = find_files((str(data),), ())
    write_windows(files, heard_windows, speech, folder / "windows.bin", folder / "tokens")
    features = open_windows(folder / "windows.bin", speech)
    config = config_of(target, folder, data, **options)
    return SoundSources(model, checkpoint, features, folder / "kept", config)


def test_windows_are_those_of_requests(target, tmp_path):
    folder = write_sounds(tmp_path / "audio", 30)
    speech = opened(target).encoder.speech
    files = find_files((str(folder),), ())
    write_windows(files, heard_windows, speech, tmp_path / "windows.bin", tmp_path / "tokens")
    found = open_windows(tmp_path / "windows.bin", speech)
    of_files = [list(heard_windows(file.path, speech)) for file in files]
    assert {len(windows) for windows in of_files} == {1, 3}
    wanted = [window for windows in of_files for window in windows]
    assert found.shape == (len(wanted), NUM_MELS, 100 * CHUNK_SECONDS)
    assert np.allclose(found, wanted, atol=2e-3)
    streams = open_streams(tmp_path / "tokens", WINDOWS)
    prompts = [
        prompt.tolist()
        for side in (streams.train_prompts, streams.held_out_prompts)
        for prompt in side.at(range(len(side)))
    ]
    firsts, number = [], 0
    for windows in of_files:
        firsts += [[number + place, number] for place in range(len(windows))]
        number += len(windows)
    assert sorted(prompts) == firsts


def test_what_is_no_audio_is_refused_and_counted(target, tmp_path):
    folder = write_sounds(tmp_path / "audio", 4)
    (folder / "notes.wav").write_text("no sound")
    (folder / "more.wav").write_bytes(b"RIFF")
    words = r"2 of 6 files of data cannot be heard, the first: .*more"
    with pytest.raises(ExportError, match=words):
        run(config_of(target, tmp_path, folder), hear=heard_windows)
    assert [path.name for path in tmp_path.iterdir()] == ["audio"]


def test_targets_begin_as_requests_have_it(target, model, tmp_path):
    reader = sources_of(target, model, tmp_path, [speech_like(2.5), noise(0.5), chirp(0.8)])
    prompts = [np.array(each) for each in ([0, 0], [2, 0], [3, 3], [4, 4])] * 8
    begun = reader.begun(prompts, seed=3)
    no_times, languages = TOKENS.of("notimestamps"), set()
    for prompt, row in zip(prompts, begun, strict=True):
        source, begin = reader.parted(row)
        assert source.tolist() == prompt.tolist()
        assert begin[0] == TOKENS.of("startoftranscript") and begin[2] == TOKENS.of("transcribe")
        assert begin[3:].tolist() in ([], [no_times])
        languages.add((int(prompt[1]), int(begin[1])))
    assert 8 < sum(no_times in row for row in begun) < 24
    assert len(languages) == 3  # each audio has one
    whole = WhisperForConditionalGeneration.from_pretrained(target, dtype=torch.float32)
    for first, found in languages:
        features = torch.from_numpy(np.array(reader.request_of(np.array([first, 0]))[0].values))
        [wanted] = whole.detect_language(input_features=features[None]).tolist()
        assert found == wanted


@pytest.mark.parametrize("has_times", [False, True])
def test_the_teachers_transcripts_and_distributions(has_times, target, model, tmp_path):
    sounds = [speech_like(0.9, seed=index) for index in range(3)]
    reader = sources_of(target, model, tmp_path, sounds, language="de")
    teacher = SourceTeacher(model, TOKENS.number, 64, EXACT, reader=reader)
    begin = [TOKENS.of(name) for name in ("startoftranscript", "de", "transcribe")]
    begin += [] if has_times else [TOKENS.of("notimestamps")]
    prompts = [np.array([number, number, *begin]) for number in range(3)]
    generator = torch.Generator().manual_seed(0)
    greedy = Sampling(temperature=1.0, top_k=1)
    drawn, labelled = teacher.continued(prompts, 20, greedy, generator, ends=(TOKENS.end,))
    counted = labelled.counted
    labels = zip(labelled.ids[counted], labelled.log_probs[counted], strict=True)
    settings = GenerationConfig.from_pretrained(target)
    for number in range(3):
        features = torch.from_numpy(np.array(reader.request_of(prompts[number])[0].values))
        target_ids = torch.from_numpy(drawn[number][None, 2:])
        with torch.no_grad():
            logits = model(input_features=features[None], decoder_input_ids=target_ids).logits[0]
        processors = [
            SuppressTokensLogitsProcessor(settings.suppress_tokens),
            SuppressTokensAtBeginLogitsProcessor(settings.begin_suppress_tokens, len(begin)),
        ]
        if has_times:
            processors.append(WhisperTimeStampLogitsProcessor(settings, len(begin)))
        for end in range(len(begin), target_ids.shape[1]):
            scores = logits[end - 1 : end]
            for processor in processors:
                scores = processor(target_ids[:, :end], scores)
            wanted = scores.log_softmax(-1)[0]
            ids, log_probs = next(labels)
            assert int(wanted.argmax()) == ids[0] == target_ids[0, end]
            found = wanted[torch.from_numpy(ids.astype(np.int64))]
            assert np.allclose(found.exp(), np.exp(log_probs), atol=1e-3)
            if ids[0] == TOKENS.end:
                break
    assert next(labels, None) is None
    rows = SourceRows.of(
        torch.from_numpy(labelled.tokens.astype(np.int64)),
        torch.from_numpy(labelled.counted),
        reader,
    )
    assert rows.sources.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert rows.targets[:, : len(begin)].tolist() == [begin] * 3


def test_hidden_states_are_kept(target, model, tmp_path):
    reader = sources_of(target, model, tmp_path, [speech_like(0.9), noise(0.7)])
    sources = torch.tensor([[1, 1], [0, 0], [1, 1]])
    with torch.autocast("cpu", dtype=torch.bfloat16):  # as a training has it
        first, mask = reader.hidden_states(sources, torch.ones_like(sources))
    assert mask is None and torch.equal(first[0], first[2])
    kept = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert kept == ["0000000.npy", "0000001.npy"]
    features = np.stack([reader.request_of(np.array([n, n]))[0].values for n in (1, 0)])
    with torch.no_grad():
        wanted = model.get_encoder()(torch.from_numpy(features)).last_hidden_state
    assert torch.allclose(first[:2], wanted, atol=2e-3)
    again, _ = reader.hidden_states(sources, torch.ones_like(sources))
    assert torch.equal(first, again)
    (tmp_path / "kept" / kept[0]).write_bytes(b"")
    with pytest.raises(ExportError, match=r"0000000\.npy is damaged"):
        reader.hidden_states(sources, torch.ones_like(sources))


def test_embedding_and_encoder_stay_as_they_are(target, model):
    draft = drafts_of(SoundDrafts, opened(target), model).first_draft()
    assert fingerprint(draft) == fingerprint(model)
    trained = {name for name, weight in draft.named_parameters() if weight.requires_grad}
    assert trained and all(".decoder." in name for name in trained)
    assert not any("embed_tokens" in name or "proj_out" in name for name in trained)


@pytest.fixture(scope="module")
def distilled(target, tmp_path_factory):
    def make(folder):
        folder.mkdir()
        config = config_of(target, folder, write_sounds(folder / "audio"), draft_vocab=200)
        return Distilled(config, *run(config, hear=heard_windows))

    return made_once(tmp_path_factory, "distilled-sounds", make)


def test_the_draft_is_better_than_before(distilled):
    config, record, report = distilled.config, distilled.record, distilled.report
    assert record.acceptance > record.curve[0].acceptance + 0.1
    assert record.are_sources and not record.are_chats
    assert any("windows of sound to learn from" in line for line in report)
    assert any(line.endswith("1 layers of 32") for line in report)
    assert len(read_proposed_tokens(config.output, TOKENS.number)) == 200
    content = json.loads((config.output / "config.json").read_text())
    assert (content["decoder_layers"], content["encoder_layers"]) == (1, 2)
    content = json.loads((config.output / "generation_config.json").read_text())
    assert len(content["lang_to_id"]) == 3
    extractor = WhisperFeatureExtractor.from_pretrained(config.output)
    assert extractor.feature_size == NUM_MELS


def test_the_export_shares_the_encoder_and_drafted_is_plain(distilled, target, captures, tmp_path):
    config = distilled.config
    output = tmp_path / "bundle"
    pair = ExportConfig(target=str(target), draft=str(config.output), output=output)
    export_bundle(pair, report=silent, source_of=captures)
    bundle = open_bundle(output)
    assert bundle.entry("draft").encoder.is_shared
    assert bundle.entry("draft").encoder.speech.alignment_heads is None  # of layers it has not
    assert f"draft/{RECORD_FILE}" in bundle.manifest.files
    audio = speech_like(2.2, seed=99)
    kinds = {1: "greedy", 5: "beam-search"}
    with Pipeline.from_bundle(output, num_threads=1) as pipe:
        for (num_beams, plain), times in itertools.product(kinds.items(), (False, True)):
            heard = audio if times else audio[:16_000]
            options = {"num_beams": num_beams, "temperature": 0.0, "return_timestamps": times}
            wanted = pipe.transcribe(heard, strategy=plain, **options)
            found = pipe.transcribe(
                heard, strategy="speculative-beam-search", draft_length=3, **options
            )
            assert found.stats.num_draft_tokens > 0
            segments = [
                [(part.token_ids, part.start, part.end) for part in each.segments]
                for each in (found, wanted)
            ]
            assert segments[0] == segments[1]


def test_a_kill_loses_no_window_that_was_encoded(target, tmp_path):
    data = write_sounds(tmp_path / "audio", 24)
    config = config_of(target, tmp_path, data, draft_vocab=100, steps=2)

    def killed(line):
        if "the draft proposes" in line and "sampling" not in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, report=killed, hear=heard_windows)
    work = tmp_path / "draft.work"
    kept = {path.name: path.stat().st_mtime_ns for path in (work / "hidden_states").iterdir()}
    assert len(kept) >= 16 and list((work / "pool").iterdir())
    for file in data.iterdir():
        file.unlink()  # all that is needed of them is there

    def seen(line):
        now = {path.name: path.stat().st_mtime_ns for path in (work / "hidden_states").iterdir()}
        assert kept.items() <= now.items()

    run(config, report=seen, hear=None)
    assert config.output.is_dir() and not work.exists()


@pytest.mark.slow
def test_speeds_are_measured(distilled, target, tmp_path):
    config = distilled.config
    options = config_of(target, tmp_path, config.data[0], steps=2)
    record, _ = run(options, measure_speed=measure_speed, hear=heard_windows)
    assert {(s.num_beams, s.is_greedy) for s in record.speeds} >= {(1, False), (4, True)}


REFUSED = [
    ({"language": "xx"}, "language='xx' is not known to the target"),
    ({"task": "sing"}, "task='sing' is not known to the target"),
    ({"kind": "feature"}, "kind='feature' is not supported for the target (family whisper)"),
    ({"target_layers": 3}, "target_layers=3 makes no draft: the target has 3 layers"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_options_that_are_refused(options, words, target, tmp_path):
    (tmp_path / "a.wav").write_bytes(b"")
    with pytest.raises(ExportError, match=re.escape(words)):
        run(config_of(target, tmp_path, tmp_path / "a.wav", **options), hear=heard_windows)


def test_a_language_has_no_meaning_for_a_target_of_english(tmp_path):
    english = write_whisper(tmp_path / "english", multilingual=False)
    with pytest.raises(ExportError, match=r"language='en' has no meaning .* of English alone"):
        run(config_of(english, tmp_path, tmp_path, language="en"))


def test_something_must_hear(target, tmp_path):
    folder = write_sounds(tmp_path / "audio", 4)
    with pytest.raises(ExportError, match="hear is missing, which reads audio"):
        run(config_of(target, tmp_path, folder))
