"""dsbd-run --audio: transcripts on stdout and in files, errors in one line, interruption."""

import json
import os
import signal
from dataclasses import replace

import click
import numpy as np
import pytest

from dsbd_ort.audio.audio_files import read_audio
from dsbd_ort.cli import run
from dsbd_ort.commands.options import command, given_flags
from dsbd_ort.commands.run_arguments import RunArguments
from dsbd_ort.commands.transcription import transcribe_files
from tests.commands.calls import assert_one_line_error, called
from tests.speech.audio_files import wav_bytes
from tests.speech.fakes import FakeSpeechPipeline, heard
from tests.speech.sounds import speech_like


@pytest.fixture
def pipeline():
    return FakeSpeechPipeline()


@pytest.fixture
def transcribe(pipeline):
    """The command over a fake: its arguments are those of dsbd-run."""

    @command(RunArguments)
    def fake_run(arguments):
        arguments.check(given_flags(click.get_current_context()).values())
        raise SystemExit(transcribe_files(pipeline, arguments))

    def transcribed(*arguments, text=None):
        return called(fake_run, "bundle", *arguments, text=text)

    return transcribed


@pytest.fixture
def files(tmp_path):
    """Two files, of 12 s and of 1 s."""
    paths = [tmp_path / "first.wav", tmp_path / "second.wav"]
    for path, samples in zip(paths, [speech_like(12.0), speech_like(1.0, 1)], strict=True):
        path.write_bytes(wav_bytes(samples))
    return paths


def text_of(file):
    return heard(read_audio(file)).text.strip()


def test_a_text(transcribe, files):
    done = transcribe("--audio", files[0])
    assert (done.exit_code, done.stdout) == (0, f"{text_of(files[0])}\n"), done.stderr
    assert transcribe("--audio", files[0], "--stream").stdout == done.stdout
    assert transcribe("--audio", "-", text=files[0].read_bytes()).stdout == done.stdout


@pytest.mark.parametrize("flags", [(), ("--stream",)])
def test_an_uncertain_language_is_named_on_stderr(flags, transcribe, files, pipeline, monkeypatch):
    usual = pipeline.transcribe

    def uncertain(*arguments, **options):
        changes = {"language": "th", "language_probability": 0.3}
        return replace(usual(*arguments, **options), **changes)

    monkeypatch.setattr(pipeline, "transcribe", uncertain)
    done = transcribe("--audio", files[0], *flags)
    assert (done.exit_code, done.stdout) == (0, f"{text_of(files[0])}\n")
    assert done.stderr == (
        f"{files[0]}: the language was detected as th, with probability 0.30; give --language if "
        "it is another\n"
    )


def test_options_are_those_of_transcribe(transcribe, files, pipeline):
    transcribe("--audio", files[0])
    transcribe(
        *("--audio", files[0], "--task", "translate", "--language", "de", "--timestamps"),
        *("--initial-prompt", "Kafka", "--num-beams", 3, "--temperature", 0),
        *("--no-condition-on-previous-text", "--logprob-threshold", -1.5),
        *("--compression-ratio-threshold", 2, "--no-speech-threshold", 0.5),
        *("--best-of", 3, "--hot-word", "Kafka", "--hot-word", "Max Brod", "--hot-word-gain", 3),
        "--vad",
        *("--num-return-sequences", 2, "--output-format", "json"),
    )
    assert pipeline.calls == [
        {},
        {
            "task": "translate",
            "language": "de",
            "return_timestamps": True,
            "initial_prompt": "Kafka",
            "num_beams": 3,
            "temperature": (0.0,),
            "condition_on_previous_text": False,
            "logprob_threshold": -1.5,
            "compression_ratio_threshold": 2.0,
            "no_speech_threshold": 0.5,
            "best_of": 3,
            "hot_words": ["Kafka", "Max Brod"],
            "hot_word_gain": 3.0,
            "vad": True,
            "num_return_sequences": 2,
        },
    ]


@pytest.mark.parametrize("format", ["srt", "vtt"])
def test_subtitles_have_times(transcribe, files, pipeline, format):
    done = transcribe("--audio", files[0], "--output-format", format)
    assert done.stdout.count(" --> ") == 2 and done.stdout.endswith("\n")
    assert pipeline.calls == [{"return_timestamps": True}]


def test_a_text_with_times(transcribe, files):
    done = transcribe("--audio", files[0], "--timestamps")
    assert [line[:16] for line in done.stdout.splitlines()] == [
        "[0.00 --> 10.00]",
        "[10.00 --> 12.00",
    ]


def test_words_with_times(transcribe, files, pipeline):
    done = transcribe("--audio", files[0], "--timestamps", "word")
    first, *_, last = done.stdout.splitlines()
    assert (first, last[:18]) == ("[0.00 --> 5.00] loud", "[11.00 --> 12.00] ")
    done = transcribe("--audio", files[0], "--timestamps", "word", "--output-format", "json")
    segments = json.loads(done.stdout)["segments"]
    wanted = {"word": " loud", "start": 0.0, "end": 5.0, "probability": 0.5}
    assert segments[0]["words"][0] == wanted
    done = transcribe("--audio", files[0], "--timestamps", "word", "--output-format", "srt")
    assert done.stdout.count(" --> ") == 2  # a cue a segment
    assert pipeline.calls == [{"return_timestamps": "word"}] * 3
    done = transcribe("--audio", files[0], "--timestamps", "--output-format", "json")
    assert pipeline.calls[3:] == [{"return_timestamps": True}]
    assert "words" not in json.loads(done.stdout)["segments"][0]


def test_json_has_everything(transcribe, files):
    done = transcribe("--audio", *files, "--output-format", "json")
    first, second = map(json.loads, done.stdout.splitlines())
    assert [first["audio"], second["audio"]] == [str(file) for file in files]
    assert first["segments"][1]["start"] == 10.0 and first["duration"] == 12.0
    assert second["text"].strip() == text_of(files[1])
    assert first["stats"]["num_output_tokens"] == 4 and first["version"] == 1


def test_several_files(transcribe, files):
    wanted = "".join(f"{file}:\n{text_of(file)}\n" for file in files)
    assert transcribe("--audio", *files).stdout == wanted
    repeated = transcribe("--audio", files[0], "--audio", files[1])
    assert repeated.stdout == wanted


def test_a_folder_of_transcripts(transcribe, files, tmp_path):
    folder = tmp_path / "new" / "subtitles"
    done = transcribe("--audio", *files, "--output-format", "vtt", "--output-dir", folder)
    assert (done.exit_code, done.stdout) == (0, "")
    assert f"{files[1]}: {folder / 'second.vtt'}" in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["first.vtt", "second.vtt"]
    assert (folder / "second.vtt").read_text().startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.000")


def test_statistics(transcribe, files):
    done = transcribe("--audio", files[1], "--stats")
    assert "statistics of second.wav" in " ".join(done.stderr.split())
    assert "num_iterations" in done.stderr and "num_iterations" not in done.stdout


def test_one_bad_file_of_several(transcribe, files):
    files[0].write_text("What is said here?")
    done = transcribe("--audio", *files)
    assert done.exit_code == 2
    assert done.stdout == f"{files[1]}:\n{text_of(files[1])}\n"
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert line.startswith(f"Error: the audio {files[0]} is not audio ")
    assert_one_line_error(transcribe("--audio", files[0]), f"the audio {files[0]} is not audio ")


def test_a_wrong_language(transcribe, files):
    done = transcribe("--audio", files[0], "--language", "xx")
    assert_one_line_error(done, "language is 'xx'; expected one of en, de")
    both = transcribe("--audio", *files, "--language", "xx")
    assert both.exit_code == 2 and f"Error: {files[1]}: language is 'xx'" in both.stderr


def test_ctrl_c_ends_between_two_segments(transcribe, files, pipeline):
    def interrupt(segment):
        if segment.id == 1:
            os.kill(os.getpid(), signal.SIGINT)

    pipeline.before_segment = interrupt
    done = transcribe("--audio", *files)
    assert done.exit_code == 130
    assert done.stderr.endswith("interrupted\n") and done.stdout == ""


def test_a_text_model_of_a_bundle_reads_no_audio(tiny_bundle, files):
    done = called(run, tiny_bundle.path, "--audio", files[0])
    assert_one_line_error(done, f"but the model of {tiny_bundle.path} reads text")


USER_ERRORS = [
    (["--language", "de"], "--language needs --audio; add it, or leave --language out"),
    (["--prompt", "x", "--timestamps"], "--timestamps needs --audio"),
    (["--audio", "a.wav", "--timestamps", "letter"], "'letter' is not one of 'segment', 'word'"),
    (["--output-format", "srt"], "--output-format needs --audio"),
    (["--audio", "a.wav", "--prompt", "x"], "--audio and --prompt contradict each other"),
    (["--audio", "a.wav", "--chat"], "--audio and --chat contradict each other"),
    (["--audio", "a.wav", "--json"], "use --output-format json"),
    (["--audio", "a.wav", "--input", "x", "--output", "y"], "repeat --audio for several files"),
    (["--audio", "a.wav", "--src-lang", "de"], "use --language: that of the audio"),
    (["--audio", "a.wav", "--trace", "t.html"], "a trace draws one"),
    (
        ["--audio", "a.wav", "--num-return-sequences", "2"],
        "only json has several texts of a window; use",
    ),
    (["--prompt", "x", "--hot-word", "Kafka"], "--hot-word needs --audio"),
    (["--audio", "a.wav", "--best-of", "0"], "--best-of"),
    (["--audio", "a.wav", "a.wav"], "--audio a.wav is given twice"),
    (
        ["--audio", "a.wav", "b.wav", "--output-format", "srt"],
        "srt of 2 files makes several files; give --output-dir",
    ),
    (["--audio", "a.wav", "b.wav", "--stream"], "--stream prints the text of one audio"),
    (["--audio", "a.wav", "--stream", "--timestamps"], "--stream prints the text of one audio"),
    (
        ["--audio", "a.wav", "x/a.mp3", "--output-dir", "o"],
        "would have one a.txt of a.wav, x/a.mp3",
    ),
    (["--audio", "a.wav", "--task", "summarize"], "'summarize' is not one of"),
    (["--audio", "a.wav", "--logprob-threshold", "nan"], "'nan' is not a finite number"),
    (["--audio", "a.wav", "--num-beams", "0"], "--num-beams is 0; expected at least 1"),
    (["--prompt", "x", "b.wav"], "unexpected argument b.wav; files follow the first of --audio"),
    (["--prompt", "x", "--concurrency", "2"], "--concurrency needs --input or --audio"),
]


@pytest.mark.parametrize(("arguments", "words"), USER_ERRORS)
def test_contradictions_are_one_line(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_one_line_error(called(run, "bundle", *arguments), words)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_there(transcribe):
    assert_one_line_error(
        transcribe("--audio", "none.wav"), "none.wav cannot be read: No such file"
    )


def test_samples_are_read_as_by_read_audio(transcribe, tmp_path):
    file = tmp_path / "stereo.wav"
    file.write_bytes(wav_bytes(np.stack([speech_like(1.0, rate=44_100)] * 2, 1), 44_100))
    assert transcribe("--audio", file).stdout == f"{text_of(file)}\n"
