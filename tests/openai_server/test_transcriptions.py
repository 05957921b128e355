"""/v1/audio over a model that hears loudness: OpenAI's client, formats, streams, bad audio."""

import asyncio
import contextlib
import gc
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

import httpx2
import numpy as np
import openai
import pytest

from dsbd_ort.audio.audio_files import read_audio
from dsbd_ort.engine import ServiceLimits
from dsbd_ort.openai_server.transcription import in_place
from dsbd_ort.speech.formats import FORMATS
from dsbd_runtime.errors import EngineError, InputError
from tests.openai_server.running_server import MODEL, running_server
from tests.speech.audio_files import FLOAT, wav_bytes
from tests.speech.fakes import FakeSpeechPipeline, FakeSpeechService, heard
from tests.speech.sounds import speech_like

AUDIO = wav_bytes(speech_like(25.0))
WANTED = heard(read_audio(AUDIO))
TEXT = WANTED.text.strip()
FILE = ("a.wav", AUDIO)


@contextlib.contextmanager
def served(pipeline=None, limits=None, **settings):
    service = FakeSpeechService(pipeline, limits)
    with running_server(service, **settings) as server:
        yield server


@pytest.fixture(scope="module")
def server():
    with served(max_body_bytes=1000, max_audio_bytes=2**20, max_audio_s=60) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with server.client() as opened:
        yield opened


@pytest.fixture
def calls(server):
    """The options of the calls of a test."""
    made = server.service.pipeline.calls
    made.clear()
    return made


def posted(server, path="transcriptions", **fields):
    data = {"model": MODEL, **fields}
    return server.http.post(f"/v1/audio/{path}", data=data, files={"file": FILE})


def transcribed(client, **fields):
    return client.audio.transcriptions.create(**{"file": FILE, "model": MODEL, **fields})


def test_the_text(client, calls):
    answer = transcribed(client)
    assert answer.text == TEXT
    assert answer.usage.to_dict() == {"type": "duration", "seconds": 25.0}
    assert calls == [{"task": "transcribe"}]


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
def test_a_translation(client, calls):
    answer = client.audio.translations.create(file=FILE, model=MODEL, prompt="Kafka")
    assert answer.text == TEXT
    assert calls == [{"task": "translate", "initial_prompt": "Kafka"}]


def test_verbose_json(client, calls):
    answer = transcribed(
        client,
        response_format="verbose_json",
        timestamp_granularities=["segment"],
        language="de",
        temperature=0,
    )
    assert (answer.text, answer.language, answer.duration) == (TEXT, "en", 25.0)
    assert [each.start for each in answer.segments] == [0.0, 10.0, 20.0]
    assert answer.segments[2].to_dict() == {
        **json.loads(FORMATS["verbose_json"](WANTED))["segments"][2]
    }
    assert answer.model_extra["dsbd"]["stats"]["num_output_tokens"] == 4
    assert calls == [{"task": "transcribe", "language": "de", "return_timestamps": True}]


@pytest.mark.parametrize("granularities", [["word"], ["segment", "word"]])
def test_words(client, calls, granularities):
    answer = transcribed(
        client,
        response_format="verbose_json",
        timestamp_granularities=granularities,
    )
    assert calls == [{"task": "transcribe", "return_timestamps": "word"}]
    assert len(answer.segments) == 3 and "words" not in answer.segments[0].to_dict()
    assert [(each.word, each.start, each.end) for each in answer.words[:3]] == [
        ("loud", 0.0, 5.0),
        (WANTED.segments[0].text.split()[1], 5.0, 10.0),
        ("loud", 10.0, 15.0),
    ]
    assert answer.words[0].to_dict()["probability"] == 0.5


@pytest.mark.parametrize("brackets", ["", "[]"])
def test_lists_with_and_without_brackets(server, calls, brackets):
    fields = {
        f"timestamp_granularities{brackets}": ["word", "segment"],
        f"hot_words{brackets}": ["Kafka", "Max Brod"],
        "response_format": "verbose_json",
    }
    assert len(posted(server, **fields).json()["words"]) == 6
    words = {"hot_words": ["Kafka", "Max Brod"], "return_timestamps": "word"}
    assert calls == [{"task": "transcribe", **words}]


def test_a_bundle_that_knows_no_times_of_words():
    pipeline = FakeSpeechPipeline()
    pipeline.prompts.encoder.speech.alignment = None
    with served(pipeline) as server:
        answer = posted(
            server,
            **{"timestamp_granularities[]": "word", "response_format": "verbose_json"},
        )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "timestamp_granularities")
    assert "times of words are asked for" in error["message"]
    assert "export it again" in error["message"] and not pipeline.calls


@pytest.mark.parametrize(
    ("format", "kind", "has_times"),
    [("text", "text/plain", False), ("srt", "text/plain", True), ("vtt", "text/vtt", True)],
)
def test_formats_of_text(client, server, calls, format, kind, has_times):
    wanted = FORMATS["txt" if format == "text" else format](WANTED)
    wanted = wanted if wanted.endswith("\n") else f"{wanted}\n"
    answer = transcribed(client, response_format=format)
    assert answer == wanted
    raw = posted(server, response_format=format)
    assert raw.headers["content-type"] == f"{kind}; charset=utf-8" and raw.text == wanted
    assert calls[0] == {"task": "transcribe", **({"return_timestamps": True} if has_times else {})}


def test_a_stream_begins_before_its_end():
    may_go_on = threading.Event()

    def wait(segment):
        if segment.id:
            assert may_go_on.wait(20)

    with served(FakeSpeechPipeline(wait)) as server, server.client() as client:
        events = iter(transcribed(client, stream=True))
        first = next(events)
        may_go_on.set()
        *deltas, done = [first, *events]
    assert [event.type for event in deltas] == ["transcript.text.delta"] * 3
    assert "".join(event.delta for event in deltas) == TEXT
    assert (done.type, done.text) == ("transcript.text.done", TEXT)


def test_options_beyond_openai_s(client, calls):
    options = {
        "num_beams": 3,
        "seed": 7,
        "length_penalty": 0.5,
        "condition_on_previous_text": False,
        "logprob_threshold": -0.5,
        "compression_ratio_threshold": 2.0,
        "no_speech_threshold": 0.25,
        "best_of": 2,
        "hot_words": ["Kafka", "Max Brod"],
        "hot_word_gain": 3.0,
        "vad": True,
    }
    transcribed(client, temperature=0.4, extra_body=options)
    assert calls == [{"task": "transcribe", "temperature": (0.4,), **options}]


def test_defaults_of_the_server():
    with served(defaults={"num_beams": 2, "temperature": 0.2}) as server:
        for fields in ({}, {"num_beams": "3", "temperature": "0"}, {"temperature": "0.5"}):
            assert posted(server, **fields).status_code == 200
        assert server.service.pipeline.calls == [
            {"task": "transcribe", "num_beams": 2, "temperature": (0.2,)},
            {"task": "transcribe", "num_beams": 3},
            {"task": "transcribe", "num_beams": 2, "temperature": (0.5,)},
        ]


BAD_AUDIO = {
    "text": b"What is said here?" * 9,
    "empty": b"",
    "NaN": wav_bytes(np.full(99, np.nan), kind=FLOAT, bits=32),
    "cut": AUDIO[:-999],
    "too long": wav_bytes(np.zeros(61 * 4000), 4000, bits=8),
}


@pytest.mark.parametrize("kind", BAD_AUDIO)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_audio_is_a_400(client, kind, stream):
    with pytest.raises(openai.BadRequestError) as raised:
        client.audio.transcriptions.create(
            file=("a.wav", BAD_AUDIO[kind]), model=MODEL, stream=stream
        )
    error = raised.value.body
    assert (error["param"], error["code"]) == ("file", "invalid_audio")
    assert error["message"].startswith("the audio ") and "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"


BAD_FIELDS = [  # fields, param, words of the message
    ({"model": "gpt-4o"}, "model", "unknown model 'gpt-4o'"),
    ({"response_format": "docx"}, "response_format", "Input should be 'json', 'text', 'srt'"),
    ({"temperature": "-1"}, "temperature", "greater than or equal to 0"),
    ({"temperature": "nan"}, "temperature", "finite number"),
    ({"num_beams": "0"}, "num_beams", "greater than or equal to 1"),
    ({"num_beams": "17"}, "num_beams", "this server allows 16"),
    ({"num_beams": "many"}, "num_beams", "valid integer"),
    ({"stream": "perhaps"}, "stream", "valid boolean"),
    ({"language": "xx"}, "language", "expected one of en, de"),
    ({"language": "x" * 99}, "language", "at most 64 characters"),
    ({"best_of": "17"}, "best_of", "this server allows 16"),
    ({"num_return_sequences": "2"}, "num_return_sequences", "only verbose_json has several texts"),
    ({"hot_word_gain": "-1"}, "hot_word_gain", "greater than or equal to 0"),
    ({"speed": "2"}, "speed", "Extra inputs are not permitted"),
    ({"include[]": "logprobs"}, "include", "which is not returned"),
    ({"include": "logprobs"}, "include", "which is not returned"),
    ({"chunking_strategy": "vad"}, "chunking_strategy", "leave it out or use auto"),
    ({"stream": "true", "response_format": "srt"}, "stream", "cannot be streamed"),
    ({"timestamp_granularities[]": "segment"}, "timestamp_granularities", "needs response_format"),
    ({"timestamp_granularities": "word"}, "timestamp_granularities", "needs response_format"),
    (
        {"timestamp_granularities[]": "word", "timestamp_granularities": "segment"},
        "timestamp_granularities",
        "timestamp_granularities",
    ),
    (
        {"timestamp_granularities[]": "letter", "response_format": "verbose_json"},
        "timestamp_granularities[].0",
        "Input should be 'segment' or 'word'",
    ),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD_FIELDS)
def test_bad_fields(server, fields, param, words):
    answer = posted(server, **fields)
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"]


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (b"{}", "application/json", "expected multipart/form-data"),
        (b"model=tiny", "application/x-www-form-urlencoded", "expected multipart/form-data"),
        (AUDIO, "audio/wav", "expected multipart/form-data"),
        (b"x", "multipart/form-data", "oundary"),
        (b"--y--\r\n", "multipart/form-data; boundary=y", "file: Field required"),
        (b"x", "multipart/form-data; boundary=y", "Invalid multipart data"),
        (b"--y\r\nnonsense", "multipart/form-data; boundary=y", ""),
    ],
)
def test_bodies_that_are_no_form(server, content, kind, words):
    answer = server.http.post(
        "/v1/audio/transcriptions", content=content, headers={"Content-Type": kind}
    )
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_a_file_that_is_a_text_field(server):
    data = {"model": MODEL, "file": "audio"}
    answer = server.http.post("/v1/audio/transcriptions", data=data, files={"x": b""})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "file"


def test_a_body_that_is_too_large(server):
    data, files = {"model": MODEL}, {"file": ("a.wav", bytes(2**20))}
    answer = server.http.post("/v1/audio/transcriptions", data=data, files=files)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    assert "this server allows 1048576" in answer.json()["error"]["message"]
    small = server.http.post("/v1/models", content=bytes(2000))
    assert small.status_code == 413  # elsewhere the usual limit


def test_a_full_queue_is_a_429():
    may_end = threading.Event()
    pipeline = FakeSpeechPipeline(lambda segment: may_end.wait(20))
    limits = ServiceLimits(max_requests=1, max_queued=1)
    with served(pipeline, limits) as server, ThreadPoolExecutor(3) as threads:
        answers = [threads.submit(posted, server) for _ in range(3)]  # whichever is the third
        refused = next(as_completed(answers, timeout=20))
        assert refused.result().status_code == 429
        may_end.set()
        assert sorted(each.result().status_code for each in answers) == [200, 200, 429]


def test_a_request_that_takes_too_long():
    stopped = threading.Event()
    pipeline = FakeSpeechPipeline(lambda segment: stopped.wait(20))
    with served(pipeline, request_timeout_s=0.5) as server:
        answer = posted(server)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        (live,) = server.service.live
        assert live.is_cancelled.wait(5)
        stopped.set()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(stream):
    stopped = threading.Event()
    pipeline = FakeSpeechPipeline(lambda segment: segment.id and stopped.wait(20))
    with served(pipeline) as server:
        with contextlib.suppress(httpx2.TimeoutException):
            server.http.post(
                "/v1/audio/transcriptions",
                data={"model": MODEL, "stream": str(stream).lower()},
                files={"file": FILE},
                timeout=1,
            )
        (live,) = server.service.live
        assert live.is_cancelled.wait(10)
        stopped.set()
        assert posted(server).status_code == 200


def test_reading_holds_its_place_until_it_has_stopped():
    """The thread went on after the place of a client that left was given back."""
    may_stop, was_told = threading.Event(), threading.Event()

    def work(is_over):
        while not is_over() and not may_stop.wait(0.01):
            pass
        was_told.set()
        assert may_stop.wait(20)
        raise InputError("stopped")

    async def leave():
        unseen = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        places = asyncio.Semaphore(1)
        with contextlib.ExitStack() as on_end:
            reading = asyncio.ensure_future(in_place(places, on_end, work))
            await asyncio.sleep(0.05)
            reading.cancel()
        try:
            assert await asyncio.to_thread(was_told.wait, 5)
            assert places.locked()
        finally:
            may_stop.set()
        async with asyncio.timeout(20):
            await places.acquire()
        del reading
        gc.collect()
        assert not unseen  # "exception was never retrieved" on stderr

    async def stay():
        places = asyncio.Semaphore(1)
        with contextlib.ExitStack() as on_end:
            found = await in_place(places, on_end, lambda is_over: 7 if not is_over() else 0)
            assert places.locked()
        await asyncio.sleep(0)
        assert not places.locked()
        return found

    asyncio.run(leave())
    assert asyncio.run(stay()) == 7


def test_an_engine_that_fails_says_no_more_than_that():
    def fail(segment):
        raise EngineError("secret")

    with served(FakeSpeechPipeline(fail)) as server, server.client() as client:
        answer = posted(server)
        assert answer.status_code == 500 and "secret" not in answer.text
        with pytest.raises(openai.APIError, match="the engine failed"):
            list(transcribed(client, stream=True))


def test_metrics(server):
    def seconds():
        page = server.http.get("/metrics").text
        found = re.search(r'^dsbd:audio_seconds_total\{model_name="tiny"\} (\S+)$', page, re.M)
        return float(found[1])

    before = seconds()
    posted(server)
    assert seconds() == before + 25.0
    page = server.http.get("/metrics").text
    assert 'path="/v1/audio/transcriptions",status="200"' in page


def test_a_speech_model_continues_no_text(server):
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = server.http.post(path, json={"model": MODEL, "prompt": "a"})
        assert answer.status_code == 404
        assert "POST /v1/audio/transcriptions" in answer.json()["error"]["message"]
    assert server.http.get("/v1/models").json()["data"][0]["id"] == MODEL


def test_a_text_model_reads_no_audio(serve):
    with serve() as running:
        answer = posted(running)
        assert answer.status_code == 404
        assert "POST /v1/completions" in answer.json()["error"]["message"]
