"""Transcriptions by prompts: those of transformers; languages and refusals of Qwen3-ASR."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from numpy.typing import NDArray

from dsbd_errors import DsbdError
from dsbd_ort import Pipeline
from dsbd_ort.engine import Service
from dsbd_ort.speech.prompted.prompted_transcription import MOST_SECONDS, quiet_parts
from dsbd_ort.speech.transcript import Segment, Transcript
from dsbd_runtime.errors import InputError
from scripts.qwen3_asr_checkpoint import CONTEXT, NUM_MELS, TOKENS
from scripts.speech_checkpoints import MODELS
from tests.given.kinds import opened, params
from tests.speech.audio_files import wav_bytes
from tests.speech.qwen3_asr import processor_of
from tests.speech.sounds import RATE, noise, speech_like, tone
from tests.speech.test_misuse import options_of_requests

FEW = {"max_new_tokens": 12}
END = TOKENS["<|im_end|>"]


@pytest.fixture(scope="module")
def processor(given_pair: Path) -> Any:
    return processor_of(given_pair / "target", NUM_MELS)


@pytest.fixture(scope="module", params=params(["qwen3_asr", *MODELS]))
def kind(request: pytest.FixtureRequest, media_folder: Callable[[str], Path]) -> Iterator[Any]:
    with opened(request.param, media_folder(request.param)) as kind:
        yield kind


ASKED = ({}, {"language": "German"}, {"language": "en", "initial_prompt": "the fox, Haus"})


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("seconds", [0.3, 1.4, 5.1])
def test_tokens_are_those_of_transformers(kind: Any, seconds: float, beams: int) -> None:
    if seconds > kind.most_searched:
        pytest.skip("of several windows transformers' beams are wrong")
    samples = speech_like(seconds)
    for asked in ASKED if kind.name == "qwen3_asr" else ASKED[:1]:
        found = kind.pipe.transcribe(samples, num_beams=beams, **asked, **FEW)
        inputs = kind.requested(samples, **asked)
        with torch.no_grad():
            wanted = kind.model.generate(
                **inputs, num_beams=beams, do_sample=False, max_new_tokens=12
            )
        new = wanted[0, inputs["input_ids"].shape[1] :].tolist()
        ends = kind.pipe.bundle.manifest.target.eos_token_ids
        said = [*found.segments, *found.skipped]
        assert len(said) == 1 and found.duration == pytest.approx(seconds)
        if found.segments:
            assert list(found.segments[0].token_ids) == [each for each in new if each not in ends]
            assert (found.segments[0].start, found.segments[0].end) == (0.0, pytest.approx(seconds))
        language = asked.get("language", "")
        assert found.language == {"German": "de", "en": "en"}.get(language, found.language)
        assert found.language is None or kind.name == "qwen3_asr"


def saying(pipe: Pipeline, text: str, end: int = END) -> dict[str, Any]:
    """Options with which the model says a text, and ends."""
    ids = [*pipe.tokenizer.encode(text, add_special_tokens=False), end]
    lengths: list[int] = []

    def forced(path: NDArray[np.int64], scores: NDArray[np.float64]) -> NDArray[np.float64]:
        lengths.append(len(path))
        wanted = ids[min(len(path) - lengths[0], len(ids) - 1)]
        scores[np.arange(len(scores)) != wanted] = -np.inf
        return scores

    return {"logits_processors": [forced], "num_beams": 1, "max_new_tokens": len(ids) + 4}


@pytest.mark.parametrize(
    ("said", "language", "text"),
    [
        ("language English<asr_text> The quick fox. ", "en", "The quick fox."),
        ("language Filipino<asr_text>Oo", "fil", "Oo"),
        ("language Klingon<asr_text>Qapla", "Klingon", "Qapla"),
        ("language Chinese<asr_text>\u4f60\u597d", "zh", "\u4f60\u597d"),
        ("language None<asr_text>", None, ""),
        ("language None<asr_text>murmur", None, "murmur"),
        ("only text", None, "only text"),
        ("<asr_text>text", None, "text"),
    ],
)
def test_answers_are_split_into_language_and_text(
    given_pipe: Pipeline, processor: Any, said: str, language: str | None, text: str
) -> None:
    found = given_pipe.transcribe(tone(1.0), **saying(given_pipe, said))
    assert (found.language, found.text) == (language, text)
    assert len(found.segments) == bool(text) and len(found.skipped) == (not text)
    theirs = processor.parse_output(said)
    assert theirs["transcription"] == text
    known = {"English": "en", "Filipino": "fil", "Chinese": "zh"}
    assert known.get(theirs["language"], theirs["language"]) == language


def test_a_named_language_begins_the_answer(given_pipe: Pipeline) -> None:
    for name, code in (
        ("Filipino", "fil"),
        (" german ", "de"),
        ("zh-CN", "zh"),
        ("Mandarin", "zh"),
    ):
        assert given_pipe.transcribe(tone(1.0), language=name, **FEW).language == code
    said = given_pipe.transcribe(tone(1.0), language="en-US", **saying(given_pipe, "The fox"))
    assert (said.language, said.text) == ("en", "The fox")
    silent = given_pipe.transcribe(tone(1.0), language="de", **saying(given_pipe, ""))
    assert silent.language == "de" and silent.text == "" and len(silent.skipped) == 1


def test_half_of_the_context_is_for_the_text(given_pipe: Pipeline) -> None:
    def endless(path: NDArray[np.int64], scores: NDArray[np.float64]) -> NDArray[np.float64]:
        scores[[END, TOKENS["<|endoftext|>"]]] = -np.inf
        return scores

    found = given_pipe.transcribe(speech_like(50.0), num_beams=1, logits_processors=[endless])
    parts = [*found.segments, *found.skipped]
    assert len(parts) > 2
    sound = {"role": "user", "content": [{"type": "audio", "audio": tone(1.0)}]}
    num_text = len(given_pipe.chat_prompt([sound])) - 13  # rows of a second
    assert found.stats.num_output_tokens == len(parts) * ((CONTEXT - num_text) // 2)


def test_long_sound_is_cut_at_quiet_places(kind: Any) -> None:
    is_qwen, pipe = kind.name == "qwen3_asr", kind.pipe
    samples = speech_like(50.0 if is_qwen else 9.0)
    samples[RATE * 16 : RATE * 16 + 4000] = 0
    segments: list[Segment] = []
    whole = pipe.transcribe(samples, on_segment=segments.append, num_beams=2, **FEW)
    parts = sorted([*segments, *whole.skipped], key=lambda each: each.start)
    assert [*whole.segments] == segments
    assert len(parts) > {"qwen3_asr": 2, "qwen2_audio": 1}.get(kind.name, 0)
    assert whole.duration == len(samples) / RATE == parts[-1].end and parts[0].start == 0.0
    assert [each.start for each in parts[1:]] == [each.end for each in parts[:-1]]
    assert not is_qwen or 16.0 <= parts[0].end < 16.3
    for segment in segments:
        part = samples[round(segment.start * RATE) : round(segment.end * RATE)]
        alone = pipe.transcribe(part, num_beams=2, **FEW)
        assert alone.segments[0].token_ids == segment.token_ids


def test_parts_are_those_of_coheres_extractor() -> None:
    extractor = transformers.CohereAsrFeatureExtractor()
    for seconds, seed in ((34.0, 0), (35.0, 0), (36.0, 1), (71.3, 2)):
        samples = speech_like(seconds, seed)
        chunks = extractor._split_audio_chunks_energy(torch.from_numpy(samples))
        parts = list(quiet_parts(samples, RATE, 35 * RATE))
        assert [end - begin for begin, end in parts] == [len(chunk) for chunk in chunks]
        assert parts[0][0] == 0 and parts[-1][1] == len(samples)


@pytest.mark.parametrize("most", [1, 7, 1599, 1600, 1601, 3201])
def test_parts_of_any_length_join(most: int) -> None:
    samples = noise(0.5)
    parts = list(quiet_parts(samples, RATE, most))
    assert [begin for begin, _ in parts[1:]] == [end for _, end in parts[:-1]]
    assert parts[0][0] == 0 and parts[-1][1] == len(samples)
    assert all(0 < end - begin <= most for begin, end in parts)


def test_hot_words_and_text_are_the_systems_turn(given_pipe: Pipeline) -> None:
    sound = {"role": "user", "content": [{"type": "audio", "audio": speech_like(1.0)}]}
    system = {"role": "system", "content": "Names:\nfox, Haus"}
    media = given_pipe.media
    assert media is not None
    prompt = media.read([system, sound], answer="language English<asr_text>")
    wanted = given_pipe.generate(prompt, num_beams=3, temperature=0.0, **FEW)
    asked = {"initial_prompt": " Names: ", "hot_words": ["fox", "Haus"], "language": "en"}
    found = given_pipe.transcribe(speech_like(1.0), num_beams=3, **asked, **FEW)
    ids = [token for token in wanted.sequences[0].token_ids if token != END]
    assert [*found.segments[0].token_ids] == ids
    gained = given_pipe.transcribe(
        speech_like(1.0), num_beams=3, hot_word_gain=50.0, **asked, **FEW
    )
    assert "fox" in gained.text or "Haus" in gained.text


def test_several_texts_and_temperatures(given_pipe: Pipeline) -> None:
    found = given_pipe.transcribe(speech_like(1.0), num_beams=4, num_return_sequences=3, **FEW)
    assert len(found.alternatives) == 3
    assert found.alternatives[0].text in found.text
    poor = {"temperature": (0.0, 0.7), "logprob_threshold": 0.0, "seed": 3, "best_of": 2}
    sampled = given_pipe.transcribe(speech_like(1.0), **poor, **FEW)
    assert [each.temperature for each in [*sampled.segments, *sampled.skipped]] == [0.7]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"task": "translate"}, "task is 'translate', but this model writes the language"),
    ({"task": "sing"}, "task is 'sing'"),
    ({"return_timestamps": True}, "return_timestamps is True, but this model writes no times"),
    ({"return_timestamps": "word"}, "this model writes no times"),
    ({"condition_on_previous_text": True}, "reads each part of an audio alone"),
    ({"no_speech_threshold": 0.6}, "0.6, but this model gives no probability"),
    ({"language": "tlh"}, "one of the 30 languages of this model"),
    ({"language": 7}, "language is a int"),
    ({"initial_prompt": 7}, "initial_prompt is a int"),
    ({"initial_prompt": "fox " * 600}, "of them the rows of 1 sounds; "),
    ({"hot_words": "fox"}, "hot_words is a str"),
    ({"prompt_logprobs": True}, "prompt_logprobs is given, but transcribe decides it"),
    ({"max_new_tokens": 600}, "max_new_tokens 600"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_what_this_kind_refuses(given_pipe: Pipeline, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DsbdError) as raised:
        given_pipe.transcribe(tone(1.0), **options)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_neutral_values_are_accepted(given_pipe: Pipeline) -> None:
    neutral = {
        **{"return_timestamps": False, "condition_on_previous_text": np.bool_(False)},
        **{"no_speech_threshold": None, "language": "auto", "task": "transcribe"},
        **{"initial_prompt": None, "hot_words": None},
    }
    wanted = given_pipe.transcribe(tone(1.0), **FEW)
    assert given_pipe.transcribe(tone(1.0), **neutral, **FEW).text == wanted.text


def test_a_conversation_is_a_prompt(given_pipe: Pipeline) -> None:
    data = wav_bytes(speech_like(1.0))
    messages = [{"role": "user", "content": [{"type": "audio", "audio": data}]}]
    options = {"num_beams": 2, "temperature": 0.0, **FEW}
    found = given_pipe.generate(messages, **options).sequences[0]
    prompt = given_pipe.chat_prompt(messages)
    assert given_pipe.generate(prompt, **options).sequences[0].token_ids == found.token_ids
    streamed = "".join(piece.text for piece in given_pipe.stream(prompt, **options))
    assert streamed == found.text
    lost = given_pipe.generate(list(prompt), **options).sequences[0]  # a copy has no sound
    assert lost.score != pytest.approx(found.score, abs=1e-3)
    with pytest.raises(InputError, match="prompt_logprobs is true, but the prompt has media"):
        given_pipe.generate(prompt, prompt_logprobs=True, **FEW)


def test_a_service_transcribes_several_together(given_pair: Path, given_pipe: Pipeline) -> None:
    from concurrent.futures import ThreadPoolExecutor

    sounds = [speech_like(1.0), noise(2.5), tone(0.7), speech_like(30.0, 3)]
    asked = [{"language": "en"}, {}, {"initial_prompt": "fox"}, {"num_beams": 1}]
    wanted = [
        given_pipe.transcribe(sound, **options, **FEW)
        for sound, options in zip(sounds, asked, strict=True)
    ]
    with (
        Pipeline.from_bundle(given_pair / "bundle", num_threads=1) as pipe,
        Service(pipe) as service,
        ThreadPoolExecutor(4) as threads,
    ):

        def transcribed(number: int) -> Transcript:
            return service.transcribe(sounds[number], **asked[number], **FEW)

        for found, alone in zip(threads.map(transcribed, range(4)), wanted, strict=True):
            assert found.text == alone.text and found.language == alone.language
            assert [each.token_ids for each in found.segments] == [
                each.token_ids for each in alone.segments
            ]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(options=options_of_requests)
def test_any_options_work_or_are_refused_in_one_line(
    given_pipe: Pipeline, options: dict[str, Any]
) -> None:
    try:
        found = given_pipe.transcribe(tone(1.0), **{**FEW, "num_beams": 1, **options})
    except DsbdError as error:
        assert "\n" not in str(error) and str(error)
    else:
        assert isinstance(found, Transcript)


def test_a_part_is_a_minute_at_most() -> None:
    assert MOST_SECONDS == 60.0  # docs/speech.md
