"""Conversations with sounds as prompts, against the processor of transformers."""

import base64
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from dsbd_ort.media.media_prompts import MediaReader
from dsbd_ort.requests.prompts import MediaPrompt
from dsbd_runtime.errors import CapacityError, InputError
from dsbd_runtime.media.given_sound import ChunkedSound
from dsbd_runtime.parts.given.given_prompt import GivenPrompt
from dsbd_runtime.parts.given.given_rows import GivenEntry
from dsbd_runtime.text.chat_template import ChatTemplate
from dsbd_runtime.text.tokenizer import Tokenizer
from scripts.qwen3_asr_checkpoint import (
    CHAT_TEMPLATE,
    CONTEXT,
    NUM_MELS,
    PLACEHOLDER,
    write_qwen3_asr,
)
from tests.speech.audio_files import wav_bytes
from tests.speech.qwen3_asr import processor_of, transformers_inputs
from tests.speech.sounds import noise, speech_like, tone

SOUND = ChunkedSound(
    sampling_rate=16_000,
    num_mels=NUM_MELS,
    n_fft=400,
    hop_length=160,
    chunk_frames=100,
    window_frames=200,
    least_samples=8_000,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_asr(tmp_path_factory.mktemp("qwen3_asr") / "checkpoint")


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint, bos_token_id=None)


@pytest.fixture(scope="module")
def reader_with(tokenizer: Tokenizer) -> Callable[[str], MediaReader]:
    given = SimpleNamespace(medium=SOUND, placeholder_token_id=PLACEHOLDER)

    def made(template: str) -> MediaReader:
        compiled = ChatTemplate(template, {})
        return MediaReader(cast(GivenEntry, given), CONTEXT, tokenizer, lambda: compiled)

    return made


@pytest.fixture(scope="module")
def reader(reader_with: Callable[[str], MediaReader]) -> MediaReader:
    return reader_with(CHAT_TEMPLATE)


def asked(*sounds: object, system: str | None = None) -> list[dict[str, Any]]:
    begun = [] if system is None else [{"role": "system", "content": system}]
    return [*begun, {"role": "user", "content": [{"type": "audio", "audio": s} for s in sounds]}]


def input_audio(data: object) -> list[dict[str, Any]]:
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    return [{"role": "user", "content": [part]}]


def features_of(prompt: MediaPrompt) -> np.ndarray:
    """The frames of all pieces, padding included, (num_mels, frames)."""
    assert isinstance(prompt.inputs.source, GivenPrompt)
    chunks = np.concatenate(
        [piece.inputs["input_features"] for piece in prompt.inputs.source.pieces]
    )
    return chunks.transpose(1, 0, 2).reshape(NUM_MELS, -1)


@pytest.mark.parametrize("context", [None, "Das Haus, <asr_text>"])
@pytest.mark.parametrize(("code", "name"), [(None, None), ("en", "English")])
@pytest.mark.parametrize("seconds", [0.2, 1.0, 3.37, 7.0])
def test_prompt_and_features_are_those_of_transformers(
    reader: MediaReader,
    checkpoint: Path,
    seconds: float,
    code: str | None,
    name: str | None,
    context: str | None,
) -> None:
    samples = speech_like(seconds)
    wanted, frames = transformers_inputs(processor_of(checkpoint, NUM_MELS), samples, code, context)
    answer = "" if name is None else f"language {name}<asr_text>"
    prompt = reader.read(asked(samples, system=context), answer=answer)
    assert prompt == wanted
    assert prompt.count(PLACEHOLDER) == reader.sound.num_rows(len(samples)) > 0
    np.testing.assert_allclose(features_of(prompt)[:, : frames.shape[1]], frames, atol=2e-5)


def test_files_in_base64_are_the_same_prompt(reader: MediaReader) -> None:
    samples = speech_like(1.5)
    data = wav_bytes(samples)
    of_bytes = reader.read(asked(data))
    of_base64 = reader.read(input_audio(base64.b64encode(data).decode()))
    assert of_base64 == of_bytes and of_base64.inputs == of_bytes.inputs
    assert reader.read(asked(io.BytesIO(data))).inputs == of_bytes.inputs
    assert reader.read(asked(samples)).inputs != of_bytes.inputs  # 16 bits are another sound


def test_two_sounds_have_their_rows_in_order(reader: MediaReader) -> None:
    first, second = tone(1.0), noise(2.0)
    prompt = reader.read(asked(first, second))
    assert isinstance(prompt.inputs.source, GivenPrompt)
    alone = [reader.read(asked(each)).inputs.source for each in (first, second)]
    pieces = [piece for each in alone if isinstance(each, GivenPrompt) for piece in each.pieces]
    assert [piece.digest for piece in prompt.inputs.source.pieces] == [
        piece.digest for piece in pieces
    ]
    assert prompt.count(PLACEHOLDER) == 13 + 26


def test_text_alone_has_no_source(reader_with: Callable[[str], MediaReader]) -> None:
    reader = reader_with("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert reader.read([{"role": "user", "content": "The fox"}]).inputs.source is None


def test_texts_of_one_content_are_apart_where_a_template_reads_texts_alone(
    reader_with: Callable[[str], MediaReader],
) -> None:
    reader = reader_with("{% for m in messages %}{{ m.content }}{% endfor %}")
    [sound] = asked(tone(1.0))[0]["content"]
    first, second = (
        [{"role": "user", "content": [*before, sound, *after]}, {"role": "user", "content": again}]
        for before, after, again in (
            (["a", "b"], ["c", {"text": "d"}], ["e", "f"]),
            (["a\nb"], ["c\nd"], "e\nf"),
        )
    )
    assert reader.read(first) == reader.read(second)


@pytest.mark.parametrize("context", ["<|audio_pad|>", "a<|audio_pad|>b <|audio_pad|><|audio_pad|>"])
@pytest.mark.parametrize("as_parts", [False, True])
def test_a_typed_placeholder_stays_text(
    reader: MediaReader, tokenizer: Tokenizer, context: str, as_parts: bool
) -> None:
    samples = speech_like(1.0)
    content: Any = [{"type": "text", "text": context}] if as_parts else context
    prompt = reader.read([{"role": "system", "content": content}, *asked(samples)])
    assert prompt.count(PLACEHOLDER) == reader.sound.num_rows(len(samples))
    assert context in tokenizer.decode(prompt)  # which skips special tokens
    clean = reader.read(asked(samples, system="The fox"))
    sound, of_clean = prompt.index(PLACEHOLDER), clean.index(PLACEHOLDER)
    assert prompt[sound:] == clean[of_clean:] and prompt[:5] == clean[:5]


def test_a_typed_placeholder_without_sound_stays_text(
    reader_with: Callable[[str], MediaReader], tokenizer: Tokenizer
) -> None:
    reader = reader_with("{% for m in messages %}{{ m.content|upper }}{% endfor %}")
    prompt = reader.read([{"role": "user", "content": "a <|audio_pad|>"}])
    assert PLACEHOLDER not in prompt and tokenizer.decode(prompt) == "A <|audio_pad|>"


LONG = noise(60.0)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (
            asked(b"\x89PNG\r\n\x1a\n" + bytes(200)),
            "messages[0].content[0]: the audio is not audio",
        ),
        (asked(b""), "messages[0].content[0]: the audio is an empty file"),
        (asked(wav_bytes(tone(1.0))[:2000]), "is cut"),
        (asked(np.zeros(0, np.float32)), "at least one"),
        (asked("/no/such/file.wav"), "cannot be read"),
        (asked(None), "has 0 sounds; expected one"),
        (input_audio("%%%"), "messages[0].content[0].input_audio.data is not base64"),
        (input_audio(None), "is not base64 (it is a NoneType)"),
        (input_audio(""), "is an empty file"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "is a part of type 'image_url', which this model cannot read; expected parts of type",
        ),
        ([{"role": "user", "content": [{"type": ["audio"]}]}], "is a part of type ['audio']"),
        ([{"role": "user", "content": [7]}], "messages[0].content[0] is 7; expected a text"),
        ([], "messages is []"),
        ("Hello", "messages is 'Hello'"),
        ([{"role": "user", "content": "Hello"}], "leaves no trace"),
        ([{"role": "user", "content": [{"type": "text", "text": 7}]}], "; expected a text"),
        (
            [{"role": "user", "content": [*asked(tone(1.0))[0]["content"], {"text": "Write it"}]}],
            "leaves no trace",
        ),
    ],
)
def test_bad_messages_are_one_line(reader: MediaReader, messages: Any, words: str) -> None:
    with pytest.raises(InputError) as raised:
        reader.read(messages)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_a_sound_beyond_the_context_is_refused_with_its_rows(reader: MediaReader) -> None:
    with pytest.raises(CapacityError) as raised:
        reader.read(asked(LONG[: 16_000 * 40]))
    words = (
        "this model's maximum context length is 512 tokens, the prompt has at least 520, 520 of "
    )
    assert f"{words}them the rows of 1 sounds" in str(raised.value)
    with pytest.raises(CapacityError, match="546 of them the rows of 2 sounds"):
        reader.read(asked(LONG[: 16_000 * 21], LONG[: 16_000 * 21]))


def test_a_file_much_beyond_the_context_is_not_read(reader: MediaReader) -> None:
    with pytest.raises(InputError, match=r"lasts 100 s, more than the 79 s"):
        reader.read(asked(wav_bytes(noise(100.0))))


def test_a_template_that_shows_no_sound_is_refused(
    reader_with: Callable[[str], MediaReader],
) -> None:
    reader = reader_with("{% for m in messages %}{{ m.role }}{{ m.content|length }}{% endfor %}")
    with pytest.raises(InputError, match="shows 0 of 1 sounds"):
        reader.read(asked(tone(1.0)))
