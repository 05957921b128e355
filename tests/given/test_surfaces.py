"""A tiny Qwen3-ASR over HTTP and on the command line: what the pipeline returns, and refusals."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from dsbd_ort import Pipeline
from dsbd_ort.speech.transcript import Transcript
from dsbd_runtime.bundle_files.bundle import Bundle
from dsbd_runtime.errors import InputError
from tests.commands.test_run import assert_one_line_error, dsbd_run
from tests.openai_server.running_server import (
    MODEL,
    RunningServer,
    client_of,
    refused,
    served_bundle,
)
from tests.runtime.bundle_edits import with_files
from tests.speech.audio_files import FLOAT, wav_bytes
from tests.speech.sounds import noise, speech_like

LONG = wav_bytes(speech_like(40.0), kind=FLOAT, bits=32)
SHORT = wav_bytes(speech_like(1.2), kind=FLOAT, bits=32)
QUICK: dict[str, Any] = {"num_beams": 2, "max_new_tokens": 10}
BEAMS = {"num_beams": 2}
QUICK_FLAGS = ["--num-beams", 2, "--max-new-tokens", 10, "--threads", 1]


@pytest.fixture(scope="module")
def wanted(given_pipe: Pipeline) -> dict[str, Transcript]:
    files = {"long": LONG, "short": SHORT}
    return {name: given_pipe.transcribe(data, **QUICK) for name, data in files.items()}


@pytest.fixture(scope="module")
def server(given_pair: Path) -> Iterator[RunningServer]:
    settings = {"defaults": {"max_new_tokens": 10}, "max_body_bytes": 2**16}
    with served_bundle(given_pair / "bundle", **settings) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with server.client().with_options(timeout=300) as opened:
        yield opened


def part(data: bytes | str) -> dict[str, Any]:
    encoded = data if isinstance(data, str) else base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}}


def heard(*parts: object, **more: object) -> list[Any]:
    return [{"role": "user", "content": [*parts], **more}]


def test_transcriptions_over_http(client: openai.OpenAI, wanted: dict[str, Transcript]) -> None:
    create = client.audio.transcriptions.create
    for name, data in (("long", LONG), ("short", SHORT)):
        file = (f"{name}.wav", data)
        assert create(file=file, model=MODEL, extra_body=BEAMS).text == wanted[name].text
        text = create(file=file, model=MODEL, response_format="text", extra_body=BEAMS)
        assert str(text).rstrip("\n") == wanted[name].text
        verbose = create(file=file, model=MODEL, response_format="verbose_json", extra_body=BEAMS)
        assert verbose.text == wanted[name].text and verbose.language == wanted[name].language
        assert [(each.start, each.end) for each in verbose.segments or ()] == [
            (each.start, each.end) for each in wanted[name].segments
        ]


def test_language_and_prompt_over_http(client: openai.OpenAI, given_pipe: Pipeline) -> None:
    asked = {"language": "de", "initial_prompt": "the fox", "hot_words": ["Haus"]}
    found = given_pipe.transcribe(SHORT, **asked, **QUICK)
    answer = client.audio.transcriptions.create(
        file=("a.wav", SHORT),
        model=MODEL,
        language="de",
        prompt="the fox",
        extra_body={"hot_words": ["Haus"], **BEAMS},
    )
    assert answer.text == found.text


def test_a_stream_has_the_text_of_each_part(
    client: openai.OpenAI, wanted: dict[str, Transcript]
) -> None:
    *deltas, done = client.audio.transcriptions.create(
        file=("long.wav", LONG), model=MODEL, stream=True, extra_body=BEAMS
    )
    assert cast(Any, done).text == wanted["long"].text
    assert len(deltas) == len(wanted["long"].segments) > 1
    assert "".join(cast(Any, each).delta for each in deltas).strip() == wanted["long"].text


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": "srt"}, "response_format", "this model writes no times"),
        (
            {"response_format": "verbose_json", "timestamp_granularities": ["word"]},
            "timestamp_granularities",
            "this model writes no times",
        ),
        ({"language": "tlh"}, "language", "30 languages"),
        ({"extra_body": {"no_speech_threshold": 0.5}}, "no_speech_threshold", "no probability"),
        ({"file": ("a.wav", b"\x89PNG\r\n" + bytes(99))}, "file", "is not audio"),
        ({"file": ("a.wav", SHORT[:9000])}, "file", "is cut"),
    ],
)
def test_refused_transcriptions(
    client: openai.OpenAI, fields: dict[str, Any], param: str, words: str
) -> None:
    given = {"file": ("a.wav", SHORT), **fields}
    error = refused(client.audio.transcriptions.create, **given)
    assert error["param"] == param and words in error["message"]


@pytest.mark.parametrize("content", ['"' + "a" * 2**16 + '"', "[" + "1," * 2**16 + "1]"])
def test_only_the_sounds_may_make_a_body_large(server: RunningServer, content: str) -> None:
    body = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": {content}}}]}}'
    answer = server.http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 413, answer.text
    assert "without its sounds and pictures" in answer.json()["error"]["message"]


def test_translations_are_refused(server: RunningServer) -> None:
    files = {"file": ("a.wav", SHORT)}
    answer = server.http.post("/v1/audio/translations", data={"model": MODEL}, files=files)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert "task is 'translate', but this model writes the language that is spoken" in message


CHAT: dict[str, Any] = {"temperature": 0, "extra_body": {"num_beams": 3}, "max_tokens": 10}


def test_a_chat_with_sound_is_the_pipelines(client: openai.OpenAI, given_pipe: Pipeline) -> None:
    system = {"role": "system", "content": "the fox <|audio_pad|>"}
    messages = [system, *heard(part(SHORT))]
    options = {"temperature": 0.0, "num_beams": 3, "max_new_tokens": 10}
    found = given_pipe.generate(messages, **options)
    answer = client.chat.completions.create(model=MODEL, messages=cast(Any, messages), **CHAT)
    assert answer.choices[0].message.content == found.sequences[0].text
    num_prompt = len(given_pipe.chat_prompt(messages))
    assert answer.usage is not None and answer.usage.prompt_tokens == num_prompt
    chunks = client.chat.completions.create(
        model=MODEL, messages=cast(Any, messages), stream=True, **CHAT
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == found.sequences[0].text
    other = [system, *heard(part(wav_bytes(noise(1.2), kind=FLOAT, bits=32)))]
    assert given_pipe.generate(other, **options).sequences[0].score != pytest.approx(
        found.sequences[0].score, abs=1e-3
    )


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (
            heard({"type": "image_url", "image_url": {"url": "x"}}),
            "type 'image_url', which this model",
        ),
        (heard({"type": "audio", "audio": "/etc/passwd"}), "part of type 'audio' is not supported"),
        (heard({"type": "input_audio"}), "input_audio"),
        (heard({"type": "input_audio", "input_audio": {"data": 7}}), "data"),
        (heard(part("no base64!")), "is not base64"),
        (heard(part(LONG)), "520 of them the rows of 1 sounds; "),
        (heard("Hello"), "messages.0.content"),
        ([{"role": "user", "content": "Hello"}], "leaves no trace"),
        (
            [*heard(part(SHORT)), {"role": "tool", "content": "rain", "tool_call_id": "a"}],
            "media cannot be combined with tools",
        ),
    ],
)
def test_chats_with_bad_sounds(client: openai.OpenAI, messages: Any, words: str) -> None:
    error = refused(client.chat.completions.create, messages=messages, **CHAT)
    assert words in error["message"]


def test_who_may_send_a_sound_and_without_tools(client: openai.OpenAI) -> None:
    create, messages = client.chat.completions.create, heard(part(SHORT))
    for allowed in (
        heard(part(SHORT), tool_calls=[]),
        [{"role": "assistant", "content": [part(SHORT)]}],
    ):
        assert create(model=MODEL, messages=allowed, **CHAT).choices
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    error = refused(create, messages=messages, tools=[tool], **CHAT)
    assert "media cannot be combined with tools" in error["message"]


def test_completions_of_text_alone(client: openai.OpenAI, given_pipe: Pipeline) -> None:
    answer = client.completions.create(model=MODEL, prompt="The quick", **CHAT)
    options = {"temperature": 0.0, "num_beams": 3, "max_new_tokens": 10}
    assert answer.choices[0].text == given_pipe.generate("The quick", **options).sequences[0].text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("audio")
    (made / "long.wav").write_bytes(LONG)
    (made / "short.wav").write_bytes(SHORT)
    return made


def test_on_the_command_line(
    given_pair: Path, folder: Path, wanted: dict[str, Transcript], tmp_path: Path
) -> None:
    bundle, files = given_pair / "bundle", [folder / "long.wav", folder / "short.wav"]
    done = dsbd_run(bundle, "--audio", files[1], *QUICK_FLAGS)
    assert done.exit_code == 0 and done.stdout == f"{wanted['short'].text}\n"
    arguments = ["--concurrency", 2, "--output-format", "json", "--output-dir", tmp_path]
    done = dsbd_run(bundle, "--audio", *files, *QUICK_FLAGS, *arguments)
    assert done.exit_code == 0, done.stderr
    for file in files:
        fields = json.loads((tmp_path / f"{file.stem}.json").read_text())
        assert fields["text"] == wanted[file.stem].text
        assert fields["language"] == wanted[file.stem].language


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--audio", "{short}", "--output-format", "srt"], "this model writes no times"),
        (["--audio", "{short}", "--timestamps", "word"], "this model writes no times"),
        (["--audio", "{short}", "--task", "translate"], "task is 'translate'"),
        (["--audio", "{short}", "--language", "tlh"], "30 languages"),
        (["--audio", "{short}", "--condition-on-previous-text"], "reads each part"),
        (["--audio", "{short}", "--no-speech-threshold", "0.5"], "no probability"),
        (["--audio", "{short}", "--prompt", "Hello"], "contradict each other"),
        (["--prompt", "Hello", "--chat"], "leaves no trace"),
    ],
)
def test_what_the_command_line_refuses(
    given_pair: Path, folder: Path, arguments: list[str], words: str
) -> None:
    filled = [each.format(short=folder / "short.wav") for each in arguments]
    assert_one_line_error(dsbd_run(given_pair / "bundle", *filled), words)


def test_sound_for_a_bundle_without_sound(
    tiny_bundle: Bundle, folder: Path, tmp_path: Path
) -> None:
    template = {"chat_template.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    bundle = with_files(tiny_bundle.path, tmp_path / "bundle", template)
    with Pipeline.from_bundle(bundle, num_threads=1) as pipe:
        with pytest.raises(InputError, match="reads text, not sound"):
            pipe.transcribe(SHORT)
        with pytest.raises(InputError, match="is a part of type 'audio': images and audio cannot"):
            pipe.generate([{"role": "user", "content": [{"type": "audio", "audio": SHORT}]}])
    with client_of(bundle) as client:
        error = refused(client.chat.completions.create, messages=heard(part(SHORT)))
        assert "is a part of type 'input_audio': images and audio" in error["message"]
        with pytest.raises(openai.NotFoundError):
            client.audio.transcriptions.create(file=("a.wav", SHORT), model=MODEL)
    assert_one_line_error(
        dsbd_run(bundle, "--audio", folder / "short.wav"), "reads text; use a bundle"
    )
