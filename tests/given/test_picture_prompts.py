"""Conversations with pictures: forms of a picture, templates, URLs, and what is refused."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsbd_ort import Pipeline
from dsbd_ort.media.media_prompts import MediaReader
from dsbd_ort.media.message_parts import MediaLimits
from dsbd_ort.requests.prompts import MediaPrompt
from dsbd_runtime.errors import CapacityError, InputError
from dsbd_runtime.text.chat_template import ChatTemplate
from tests.given.pictures import asked, asked_by_url, data_url, picture, png
from tests.speech.audio_files import wav_bytes
from tests.speech.sounds import tone

NAME = "granite_docling"
Opener = Callable[[str], Pipeline]


@pytest.fixture(scope="module")
def pipe(media_pipe: Opener) -> Pipeline:
    return media_pipe(NAME)


def test_a_picture_in_any_form_is_the_same_prompt(pipe: Pipeline, tmp_path: Path) -> None:
    image = picture(90, 60)
    file = tmp_path / "page.png"
    file.write_bytes(png(image))
    wanted = pipe.chat_prompt(asked(image))
    assert isinstance(wanted, MediaPrompt)
    forms = [np.asarray(image), file, str(file), file.read_bytes(), io.BytesIO(file.read_bytes())]
    by_path = {"type": "image", "path": file}
    by_url = {"type": "image_url", "image_url": {"url": data_url(file.read_bytes())}}
    for part in [*({"type": "image", "image": form} for form in forms), by_path, by_url]:
        [message] = asked()
        found = pipe.chat_prompt([{**message, "content": [part, *message["content"]]}])
        assert found == wanted
        assert isinstance(found, MediaPrompt) and found.inputs == wanted.inputs
    other = pipe.chat_prompt(asked(picture(90, 60, 1)))
    assert isinstance(other, MediaPrompt) and other == wanted and other.inputs != wanted.inputs


ONLY_PARTS = (
    "{% for m in messages %}{{ m.role }}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% elif p.type == 'text' %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def reader_of(pipe: Pipeline, template: str, context_length: int) -> MediaReader:
    given, compiled = pipe.bundle.manifest.target.given, ChatTemplate(template, {})
    assert given is not None
    return MediaReader(given, context_length, pipe.tokenizer, lambda: compiled)


def test_texts_become_parts_for_templates_that_read_parts_alone(pipe: Pipeline) -> None:
    reader = reader_of(pipe, ONLY_PARTS, 1024)
    asked_again = {"role": "user", "content": "Which?"}
    wanted = {"role": "user", "content": [{"type": "text", "text": "Which?"}]}
    messages = asked(picture(90, 60))
    assert reader.read([*messages, asked_again]) == reader.read([*messages, wanted])
    with pytest.raises(InputError, match="leaves no trace"):
        reader.read([*messages, {"role": "user", "content": [{"text": "Which?"}]}])


def test_too_many_pictures_are_refused_with_their_rows(pipe: Pipeline) -> None:
    reader = reader_of(pipe, ONLY_PARTS, 60)
    image = picture(90, 60)
    assert len(reader.read(asked(image, text="What?"))) < 60
    with pytest.raises(CapacityError) as raised:
        reader.read(asked(*[image] * 10, text="What?"))
    words = (
        "length is 60 tokens, the prompt has at least 84, 84 of them the rows of 3 pictures; give"
    )
    assert f"{words} fewer pictures" in str(raised.value)
    with pytest.raises(CapacityError, match=r"has 94, 28 of them the rows of 1 pictures"):
        reader.read(asked(image, text="What is it, and where, and why, and whose, and when is it?"))


def test_urls_are_read_by_the_function_that_is_given(pipe: Pipeline) -> None:
    reader = reader_of(pipe, ONLY_PARTS, 1024)
    data, seen = png(picture(90, 60)), []

    def read_url(url: str) -> bytes:
        seen.append(url)
        if url.endswith("missing"):
            raise InputError("its server answers 404; check the URL")
        return data

    limits = MediaLimits(read_url=read_url)
    url = "HTTPS://example.com/page.png"
    found = reader.read(asked_by_url(url), limits=limits)
    assert seen == [url] and found.inputs == reader.read(asked_by_url(data_url(data))).inputs
    with pytest.raises(InputError, match=r"image_url.url: its server answers 404"):
        reader.read(asked_by_url("http://example.com/missing"), limits=limits)


PNG = png(picture(90, 60))
BAD_PARTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "image"}, "has 0 pictures; expected one, as 'image' (pixels"),
    ({"type": "image", "image": PNG, "path": "x"}, "has 2 pictures"),
    ({"type": "image", "image": wav_bytes(tone(0.1))}, "is not readable as a picture"),
    ({"type": "image", "image": PNG[:-200]}, "is damaged, cut or too large"),
    ({"type": "image", "image": "/no/such/page.png"}, "/no/such/page.png cannot be read"),
    ({"type": "image", "image": 7}, "is a int; expected a path"),
    (
        {"type": "input_audio", "input_audio": {"data": "UklGRg=="}},
        "is a part of type 'input_audio'",
    ),
    ({"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}, "is not fetched"),
    ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "expected a data URL"),
    ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "expected a data URL"),
    ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "expected a data URL"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}}, "is not base64"),
    ({"type": "image_url", "image_url": {"url": data_url(b"")}}, "no bytes"),
    ({"type": "image_url", "image_url": {"url": 5}}, "is 5; expected a data URL"),
    ({"type": "image_url", "image_url": None}, "is None; expected a data URL"),
    ({"type": "video", "video": "x"}, "is a part of type 'video', which this model cannot read"),
]


@pytest.mark.parametrize(("part", "words"), BAD_PARTS)
def test_bad_parts_are_one_line(pipe: Pipeline, part: dict[str, Any], words: str) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    with pytest.raises(InputError) as raised:
        pipe.generate(messages)
    message = str(raised.value)
    assert message.startswith("messages[0].content[1]") and words in message
    assert "\n" not in message


def test_prompt_logprobs_are_refused(pipe: Pipeline) -> None:
    with pytest.raises(InputError, match="the prompt has media, whose rows are no tokens"):
        pipe.generate(asked(PNG), prompt_logprobs=True)


def test_transcription_is_refused(pipe: Pipeline) -> None:
    assert not pipe.transcribes
    with pytest.raises(InputError, match="not sound, which transcribe needs"):
        pipe.transcribe(tone(0.5))
