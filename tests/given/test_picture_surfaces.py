"""A tiny model that reads pictures over HTTP and on the command line: results and refusals."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from dsbd_ort import Pipeline
from tests.commands.test_run import assert_one_line_error, dsbd_run
from tests.given.pictures import QUESTION, asked, asked_by_url, data_url, picture, png
from tests.given.test_surfaces import part as sound_part
from tests.openai_server.running_server import MODEL, client_of, refused
from tests.speech.audio_files import wav_bytes
from tests.speech.sounds import tone

NAME = "granite_docling"
PAGE, OTHER = png(picture(90, 60)), png(picture(40, 130, 1))
SMALL = png(picture(30, 20))
OPTIONS: dict[str, Any] = {"temperature": 0.0, "num_beams": 3, "max_new_tokens": 10}
CHAT: dict[str, Any] = {"temperature": 0, "extra_body": {"num_beams": 3}, "max_tokens": 10}
FLAGS = ["--temperature", 0, "--num-beams", 3, "--max-new-tokens", 10, "--threads", 1]


@pytest.fixture(scope="module")
def bundle(media_folder: Callable[[str], Path]) -> Path:
    return media_folder(NAME) / "bundle"


@pytest.fixture(scope="module")
def pipe(media_pipe: Callable[[str], Pipeline]) -> Pipeline:
    return media_pipe(NAME)


@pytest.fixture(scope="module")
def client(bundle: Path) -> Iterator[openai.OpenAI]:
    with client_of(bundle, fetches_urls=True, max_body_bytes=2**17) as opened:
        yield opened


def texts_of(client: openai.OpenAI, messages: Any) -> str | None:
    answer = client.chat.completions.create(model=MODEL, messages=messages, **CHAT)
    return answer.choices[0].message.content


def test_chats_with_pictures_are_the_pipelines(client: openai.OpenAI, pipe: Pipeline) -> None:
    chats = [asked_by_url(data_url(data)) for data in (PAGE, OTHER, PAGE)]
    chats += [[{"role": "user", "content": "The fox"}]]
    chats += [[*chats[0], {"role": "assistant", "content": "the page"}, *chats[1]]]
    with ThreadPoolExecutor(len(chats)) as threads:
        found = list(threads.map(lambda chat: texts_of(client, chat), chats))
    for chat, text in zip(chats, found, strict=True):
        assert text == pipe.generate(chat, **OPTIONS).sequences[0].text
    assert found[0] == found[2] and len({*found}) > 1
    chunks = client.chat.completions.create(
        model=MODEL, messages=cast(Any, chats[0]), stream=True, **CHAT
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == found[0]


def shown(part: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]


BAD_CHATS: list[tuple[Any, str]] = [
    (shown(sound_part(wav_bytes(tone(0.1)))), "type 'input_audio', which this model cannot read"),
    (asked_by_url(data_url(wav_bytes(tone(0.1)))), "is not readable as a picture"),
    (asked_by_url("/etc/passwd"), "expected a data URL"),
    (asked_by_url("http://127.0.0.1:1/page.png"), "'127.0.0.1' is a private address"),
    (asked_by_url("https://[::ffff:10.0.0.1]/"), "is a private address"),
    (shown({"type": "image", "image": "/etc/passwd"}), "type 'image' is not supported"),
    (shown({"type": "image_url", "image_url": "x"}), "image_url"),
    (shown({"type": "image_url", "image_url": {"url": 7}}), "url"),
    (
        [{"role": "user", "content": asked_by_url(data_url(SMALL))[0]["content"][:1] * 40}],
        "is 1024 tokens, the prompt has at least 1036, 1036 of them the rows of 37 pictures; give",
    ),
    (
        [*asked_by_url(data_url(PAGE)), {"role": "tool", "content": "x", "tool_call_id": "a"}],
        "media cannot be combined with tools",
    ),
]


@pytest.mark.parametrize(("messages", "words"), BAD_CHATS)
def test_bad_chats(client: openai.OpenAI, messages: Any, words: str) -> None:
    error = refused(client.chat.completions.create, messages=messages, **CHAT)
    assert words in error["message"]


def test_urls_are_refused_unless_they_are_allowed(bundle: Path) -> None:
    with client_of(bundle) as client:
        messages: Any = asked_by_url("https://example.com/page.png")
        with pytest.raises(openai.BadRequestError, match=r"not fetched; .* --allow-media-urls"):
            client.chat.completions.create(model=MODEL, messages=messages, **CHAT)
        with pytest.raises(openai.NotFoundError):
            client.audio.transcriptions.create(file=("a.wav", PAGE), model=MODEL)


def test_sounds_of_chats_have_the_servers_limit(given_pair: Path) -> None:
    with client_of(given_pair / "bundle", max_audio_s=1.0) as client:
        short, long = ([sound_part(wav_bytes(tone(seconds)))] for seconds in (0.9, 1.2))
        assert texts_of(client, [{"role": "user", "content": short}]) is not None
        with pytest.raises(openai.BadRequestError, match="more than the 1 s"):
            texts_of(client, [{"role": "user", "content": long}])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "page.png").write_bytes(PAGE)
    (folder / "other.png").write_bytes(OTHER)
    (folder / "cut.png").write_bytes(PAGE[:-200])
    (folder / "sound.png").write_bytes(wav_bytes(tone(0.1)))
    return folder


def test_on_the_command_line(bundle: Path, files: Path, pipe: Pipeline, tmp_path: Path) -> None:
    page, other = files / "page.png", files / "other.png"
    one = pipe.generate(asked(page), **OPTIONS).sequences[0].text
    both = pipe.generate(asked(page, other), **OPTIONS).sequences[0].text
    done = dsbd_run(bundle, "--image", page, "--prompt", QUESTION, *FLAGS)
    assert done.exit_code == 0 and done.stdout == f"{one}\n", done.stderr
    done = dsbd_run(bundle, "--image", page, *FLAGS, text=QUESTION)
    assert done.stdout == f"{one}\n"
    for arguments in (["--image", page, other], ["--image", page, "--image", other]):
        done = dsbd_run(bundle, *arguments, "--prompt", QUESTION, "--json", *FLAGS)
        assert json.loads(done.stdout)["sequences"][0]["text"] == both
    nothing_asked = [{"role": "user", "content": [{"type": "image", "image": page}]}]
    wanted = pipe.generate(nothing_asked, **OPTIONS).sequences[0].text
    assert dsbd_run(bundle, "--image", page, *FLAGS).stdout == f"{wanted}\n"
    lines, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chats = asked(str(page)), asked_by_url(data_url(PAGE)), asked(str(files / "cut.png"))
    lines.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    dsbd_run(bundle, "--input", lines, "--output", answers, "--concurrency", 2, *FLAGS)
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [each["sequences"][0]["text"] for each in found[:2]] == [one, one]
    assert "damaged, cut" in json.dumps(found[2])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--image", "{cut}", "--prompt", "a"], "cut.png is damaged, cut or too large"),
        (["--image", "{sound}", "--prompt", "a"], "sound.png is not readable as a picture"),
        (["--image", "/no/such.png", "--prompt", "a"], "/no/such.png cannot be read"),
        (["--image", "{page}", "--input", "a", "--output", "b"], "contradict each other"),
        (["--image", "{page}", "--audio", "a.wav"], "contradict each other"),
        (["--prompt", "a", "{page}"], "files follow the first of --audio or --image"),
        (["--audio", "{sound}"], "reads text; use a bundle"),
    ],
)
def test_what_the_command_line_refuses(
    bundle: Path, files: Path, arguments: list[str], words: str
) -> None:
    paths = {name: files / f"{name}.png" for name in ("page", "cut", "sound")}
    assert_one_line_error(dsbd_run(bundle, *(each.format(**paths) for each in arguments)), words)


def test_a_picture_for_a_model_that_reads_none(given_pair: Path, files: Path) -> None:
    done = dsbd_run(given_pair / "bundle", "--image", files / "page.png", "--prompt", "a")
    assert_one_line_error(done, "is a part of type 'image', which this model cannot read")
