"""A tiny Whisper from the command line and over HTTP: the transcripts of the pipeline."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from dsbd_ort import Pipeline
from dsbd_ort.speech.formats import FORMATS
from dsbd_ort.speech.transcript import Transcript
from tests.commands.test_run import assert_one_line_error, dsbd_run
from tests.openai_server.running_server import MODEL, client_of
from tests.speech.audio_files import FLOAT, wav_bytes
from tests.speech.sounds import chirp, noise, speech_like, tone

FILES = {"long": chirp(2.1), "short": speech_like(0.7), "tone": tone(1.3), "noise": noise(1.0)}
BYTES = {name: wav_bytes(samples, kind=FLOAT, bits=32) for name, samples in FILES.items()}
QUICK: dict[str, Any] = {"num_beams": 2, "temperature": 0.0}
QUICK_FLAGS = ["--num-beams", 2, "--temperature", 0, "--threads", 1]


@pytest.fixture(scope="module")
def wanted(speech_pipe: Pipeline) -> dict[str, Transcript]:
    """The pipeline's transcript of every file, with times."""
    return {
        name: speech_pipe.transcribe(data, return_timestamps=True, **QUICK)
        for name, data in BYTES.items()
    }


@pytest.fixture(scope="module")
def client(speech_bundle: Path) -> Iterator[openai.OpenAI]:
    with client_of(speech_bundle, defaults=QUICK) as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("audio")
    for name, data in BYTES.items():
        (made / f"{name}.wav").write_bytes(data)
    return made


def test_eight_at_a_time_over_http(client: openai.OpenAI, wanted: dict[str, Transcript]) -> None:
    with ThreadPoolExecutor(8) as threads:

        def asked(name: str) -> Any:
            return client.audio.transcriptions.create(
                file=(f"{name}.wav", BYTES[name]), model=MODEL, response_format="verbose_json"
            )

        names = [*FILES, *FILES]
        for name, found in zip(names, threads.map(asked, names), strict=True):
            transcript = wanted[name]
            assert found.text == transcript.text.strip()
            assert found.language == transcript.language
            assert [each.tokens for each in found.segments] == [
                list(each.token_ids) for each in transcript.segments
            ]
            assert [each.start for each in found.segments] == [
                each.start for each in transcript.segments
            ]


def test_words_over_http_and_on_the_command_line(
    client: openai.OpenAI, speech_pipe: Pipeline, speech_bundle: Path, folder: Path
) -> None:
    wanted = speech_pipe.transcribe(BYTES["long"], return_timestamps="word", **QUICK)
    words = [vars(word) for segment in wanted.segments for word in segment.words or ()]
    found = client.audio.transcriptions.create(
        file=("long.wav", BYTES["long"]),
        model=MODEL,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    stripped = [{**word, "word": word["word"].strip()} for word in words]
    assert [each.to_dict() for each in found.words or ()] == stripped != []
    arguments = ["--output-format", "json", "--timestamps", "word"]
    done = dsbd_run(speech_bundle, "--audio", folder / "long.wav", *QUICK_FLAGS, *arguments)
    segments = json.loads(done.stdout)["segments"]
    assert [word for segment in segments for word in segment["words"]] == words


def test_a_stream_is_the_text(client: openai.OpenAI, wanted: dict[str, Transcript]) -> None:
    *deltas, done = client.audio.transcriptions.create(  # windows have times in any case
        file=("long.wav", BYTES["long"]), model=MODEL, stream=True
    )
    text = wanted["long"].text.strip()
    assert cast(Any, done).text == text
    assert "".join(cast(Any, each).delta for each in deltas).strip() == text


def test_subtitles_of_several_files(
    speech_bundle: Path, folder: Path, wanted: dict[str, Transcript], tmp_path: Path
) -> None:
    files = [folder / f"{name}.wav" for name in FILES]
    out = ["--output-format", "srt", "--output-dir", tmp_path]
    done = dsbd_run(speech_bundle, "--audio", *files, *QUICK_FLAGS, "--concurrency", 3, *out)
    assert done.exit_code == 0, done.stderr
    for name, transcript in wanted.items():
        text = FORMATS["srt"](transcript)
        assert (tmp_path / f"{name}.srt").read_text() == (text if text.endswith("\n") else "\n")


def test_json_on_stdout(speech_bundle: Path, folder: Path, wanted: dict[str, Transcript]) -> None:
    arguments = ["--output-format", "json", "--timestamps"]
    done = dsbd_run(speech_bundle, "--audio", folder / "short.wav", *QUICK_FLAGS, *arguments)
    fields = json.loads(done.stdout)
    assert fields["text"] == wanted["short"].text
    for found, each in zip(fields["segments"], wanted["short"].segments, strict=True):
        expected = {**vars(each), "token_ids": list(each.token_ids)}
        assert expected.pop("words") is None
        assert found.pop("avg_logprob") == pytest.approx(expected.pop("avg_logprob"), abs=1e-5)
        assert found.pop("no_speech_prob") == pytest.approx(expected.pop("no_speech_prob"))
        assert found == expected
    assert fields["stats"]["num_output_tokens"] == wanted["short"].stats.num_output_tokens


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "Hello"], "reads sound"),
        (["--prompt", "Hello", "--chat"], "chat"),
        (["--audio", "{short}", "--language", "tlh"], "tlh"),
        (["--audio", "{short}", "--strategy", "magic"], "--strategy is 'magic'"),
    ],
)
def test_what_a_speech_bundle_refuses(
    speech_bundle: Path, folder: Path, arguments: list[str], words: str
) -> None:
    filled = [each.format(short=folder / "short.wav") for each in arguments]
    assert_one_line_error(dsbd_run(speech_bundle, *filled), words)


def test_prompts_in_a_file_are_refused_line_by_line(speech_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hello"}\n')
    done = dsbd_run(
        *(speech_bundle, "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    )
    assert done.exit_code == 0
    assert "reads sound" in json.loads((tmp_path / "out.jsonl").read_text())["error"]
