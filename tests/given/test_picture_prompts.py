"""Conversations with pictures: prompts and searches are those of transformers' own processor."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsbd_ort import Pipeline
from dsbd_ort.decoding import DecodingRequest
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.whole_requests import decoded_together
from dsbd_ort.media.media_prompts import MediaReader
from dsbd_ort.media.message_parts import MediaLimits
from dsbd_ort.requests.prompts import MediaPrompt
from dsbd_runtime.errors import CapacityError, InputError
from dsbd_runtime.parts.given.given_rows import GivenRows
from dsbd_runtime.text.chat_template import ChatTemplate
from tests.given.pictures import PictureReference, asked, asked_by_url, data_url, picture, png
from tests.given.shown_pictures import IN_CI
from tests.given.test_sharing import Counted, check_equal
from tests.speech.audio_files import wav_bytes
from tests.speech.sounds import tone

LONG = ("idefics3", "smolvlm", "qwen3_vl")
KINDS = (
    *IN_CI,
    *(pytest.param(name, marks=pytest.mark.long) for name in LONG),
)
SIZES = ((90, 60), (33, 150), (8, 8))  # width, height

Opener = Callable[[str], Pipeline]
References = Callable[[str], PictureReference]


def conversations() -> list[list[dict[str, Any]]]:
    one, two = picture(90, 60), picture(40, 130, 1)
    first, again = asked(one, text="What does it say?"), asked(two)
    system = {"role": "system", "content": [{"type": "text", "text": "The quick fox"}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "the other page"}]}
    text = {"type": "text", "text": "The page shows"}
    between = [{"type": "image", "image": one}, text, {"type": "image", "image": two}, text]
    return [
        [system, *asked(one, two)],
        [*first, answer, *again],
        [{"role": "user", "content": between}],
    ]


@pytest.mark.parametrize("name", KINDS)
def test_prompts_are_transformers(
    picture_pipe: Opener, picture_reference: References, name: str
) -> None:
    pipe, reference = picture_pipe(name), picture_reference(name)
    alone = [asked(picture(*size, seed)) for seed, size in enumerate(SIZES)]
    for messages in (*alone, *conversations()):
        wanted = reference.inputs(messages)["input_ids"][0].tolist()
        assert pipe.chat_prompt(messages) == wanted


def check_searches(pipe: Pipeline, reference: PictureReference, messages: Any) -> None:
    inputs = reference.inputs(messages)
    for beams in (1, 4):
        options: dict[str, Any] = {"strategy": "greedy"}
        if beams > 1:
            options = {"strategy": "beam-search", "num_beams": 4, "num_return_sequences": 4}
        result = pipe.generate(messages, max_new_tokens=10, **options)
        ids, scores = reference.searched(inputs, beams, 10)
        assert [sequence.token_ids for sequence in result.sequences] == ids
        for sequence, score in zip(result.sequences, scores, strict=False):
            assert sequence.score == pytest.approx(score, abs=2e-5)


@pytest.mark.parametrize("name", KINDS)
def test_searches_are_transformers(
    picture_pipe: Opener, picture_reference: References, name: str
) -> None:
    pipe, reference = picture_pipe(name), picture_reference(name)
    check_searches(pipe, reference, asked(picture(90, 60)))
    check_searches(pipe, reference, conversations()[1])


def test_a_picture_in_any_form_is_the_same_prompt(picture_pipe: Opener, tmp_path: Path) -> None:
    pipe, image = picture_pipe("granite_docling"), picture(90, 60)
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


@pytest.mark.parametrize("name", IN_CI)
def test_a_typed_placeholder_stays_text(picture_pipe: Opener, name: str) -> None:
    pipe = picture_pipe(name)
    given = pipe.bundle.manifest.target.given
    assert given is not None
    spelled = pipe.tokenizer.piece(given.placeholder_token_id)
    image, typed = picture(90, 60), f"Is {spelled} or {spelled}{spelled} here?"
    number = pipe.chat_prompt(asked(image)).count(given.placeholder_token_id)
    for messages in (asked(image, text=typed), [{"role": "user", "content": typed}]):
        prompt = pipe.chat_prompt(messages)
        has_picture = messages[0]["content"] != typed
        assert prompt.count(given.placeholder_token_id) == (number if has_picture else 0)
        assert typed in pipe.tokenizer.decode(prompt)  # which skips special tokens


ONLY_PARTS = (
    "{% for m in messages %}{{ m.role }}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% elif p.type == 'text' %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def reader_of(pipe: Pipeline, template: str, context_length: int) -> MediaReader:
    given, compiled = pipe.bundle.manifest.target.given, ChatTemplate(template, {})
    assert given is not None
    return MediaReader(given, context_length, pipe.tokenizer, lambda: compiled)


def test_texts_become_parts_for_templates_that_read_parts_alone(picture_pipe: Opener) -> None:
    reader = reader_of(picture_pipe("granite_docling"), ONLY_PARTS, 1024)
    asked_again = {"role": "user", "content": "Which?"}
    wanted = {"role": "user", "content": [{"type": "text", "text": "Which?"}]}
    messages = asked(picture(90, 60))
    assert reader.read([*messages, asked_again]) == reader.read([*messages, wanted])
    with pytest.raises(InputError, match="leaves no trace"):
        reader.read([*messages, {"role": "user", "content": [{"text": "Which?"}]}])


def test_too_many_pictures_are_refused_with_their_rows(picture_pipe: Opener) -> None:
    reader = reader_of(picture_pipe("granite_docling"), ONLY_PARTS, 60)
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


def test_urls_are_read_by_the_function_that_is_given(picture_pipe: Opener) -> None:
    reader = reader_of(picture_pipe("granite_docling"), ONLY_PARTS, 1024)
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
def test_bad_parts_are_one_line(picture_pipe: Opener, part: dict[str, Any], words: str) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    with pytest.raises(InputError) as raised:
        picture_pipe("granite_docling").generate(messages)
    message = str(raised.value)
    assert message.startswith("messages[0].content[1]") and words in message
    assert "\n" not in message


def test_prompt_logprobs_are_refused(picture_pipe: Opener) -> None:
    with pytest.raises(InputError, match="the prompt has media, whose rows are no tokens"):
        picture_pipe("granite_docling").generate(asked(PNG), prompt_logprobs=True)


def test_transcription_is_refused(picture_pipe: Opener) -> None:
    pipe = picture_pipe("granite_docling")
    assert not pipe.transcribes
    with pytest.raises(InputError, match="not sound, which transcribe needs"):
        pipe.transcribe(tone(0.5))


def prepared(pipe: Pipeline, options: dict[str, Any]) -> list[DecodingRequest]:
    text = [{"role": "user", "content": "The quick fox"}]
    each = [*(asked(picture(*size, seed)) for seed, size in enumerate(SIZES)), text]
    known = {"max_new_tokens": 8, "seed": 1, **options}
    return [pipe.prepare(messages, known) for messages in [*each, *conversations()]]


@pytest.mark.parametrize("name", IN_CI)
@pytest.mark.parametrize("strategy", ["greedy", "beam-search"])
def test_conversations_in_shared_calls_are_as_alone(
    picture_pipe: Opener, name: str, strategy: str
) -> None:
    pipe = picture_pipe(name)
    options: dict[str, Any] = {"strategy": strategy}
    if strategy == "beam-search":
        options |= {"num_beams": 3, "num_return_sequences": 3}
    alone = []
    for request in prepared(pipe, options):
        with pipe.models.engines() as models:
            alone += decoded_together(BatchedDecoder(*models), [request], 1)
    with pipe.models.engines() as models:
        check_equal(decoded_together(BatchedDecoder(*models), prepared(pipe, options), 8), alone)


@pytest.mark.parametrize("name", IN_CI)
def test_another_question_to_a_page_computes_the_question_alone(
    picture_pipe: Opener, name: str
) -> None:
    pipe, page = picture_pipe(name), picture(90, 60)
    counts = []
    with pipe.models.engines() as (target, _):
        counted, encoder = Counted(target), target.part(GivenRows).encoder
        decoder = BatchedDecoder(counted, None)
        for image, text in ((page, "Who?"), (page, "The other fox?"), (picture(90, 60, 1), "Who?")):
            before, runs = counted.num_rows_computed, encoder.num_read
            options = {"strategy": "greedy", "max_new_tokens": 1}
            request = pipe.prepare(asked(image, text=text), options)
            decoded_together(decoder, [request], 1)
            counts.append((counted.num_rows_computed - before, encoder.num_read - runs))
    whole = pipe.chat_prompt(asked(page, text="Who?"))
    given = pipe.bundle.manifest.target.given
    assert given is not None
    assert counts[0][0] == len(whole) and counts[0][1] > 0
    other = pipe.chat_prompt(asked(page, text="The other fox?"))
    alike = next(n for n, (one, two) in enumerate(zip(whole, other, strict=False)) if one != two)
    assert alike > len(whole) - whole[::-1].index(given.placeholder_token_id)
    assert counts[1] == (len(other) - alike, 0)  # no row of the page, and no encoder
    before = whole.index(given.placeholder_token_id)
    assert counts[2][0] == len(whole) - before and counts[2][1] > 0


def test_text_alone_is_transformers(picture_pipe: Opener, picture_reference: References) -> None:
    for name in IN_CI:
        check_searches(picture_pipe(name), picture_reference(name), asked())
