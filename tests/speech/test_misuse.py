"""Any options of a transcription work or are refused in one line, by pipeline and service."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsbd_errors import DsbdError
from dsbd_ort import Pipeline
from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.engine import Service
from dsbd_ort.engine.errors import InternalError
from dsbd_ort.speech.speech_request import SPEECH_OPTIONS
from dsbd_ort.speech.transcribing import transcription
from dsbd_runtime.errors import InputError
from tests.robustness.odd_values import ODD_VALUES, SENSIBLE
from tests.speech.sounds import speech_like

SAMPLES = speech_like(1.0)
FEW = {"num_beams": 1, "max_new_tokens": 3, "temperature": 0.0, "language": "en"}
SENSIBLE_OF_SPEECH: dict[str, list[Any]] = {
    **{name: [*values] for name, values in SENSIBLE.items()},
    "language": [None, "en", "German", "<|fr|>", "de-AT", "auto"],
    "task": ["transcribe", "translate"],
    "return_timestamps": [False, True],
    "num_beams": [1, 2, np.int64(2)],
    "initial_prompt": [None, "", "a fox"],
    "condition_on_previous_text": [False, True, np.bool_(True)],
    "temperature": [0, 0.0, 0.5, np.float32(0.5), [0.0, 0.5], (0.5,), np.array([0.0, 0.5])],
    "best_of": [1, 2, np.uint8(2)],
    "num_return_sequences": [1, np.int32(1), 2],
    "hot_words": [None, [], ["fox"], ("a fox", "dog")],
    "hot_word_gain": [0, 2.0, np.float16(2.0)],
    "compression_ratio_threshold": [None, 1, 2.5, np.float64(1.35)],
    "logprob_threshold": [None, -1, -0.5, np.float32(-1.0)],
    "no_speech_threshold": [None, 0, 0.5],
    "vad": [None, False, np.bool_(False)],
    "seed": [None, 0, 7, 2**128 - 1, np.uint8(255), np.int64(3)],
    "logits_processors": [[], [lambda path, scores: scores - 1.0]],
}
NAMES = sorted({*SPEECH_OPTIONS, *DecodingConfig.__dataclass_fields__})


def values_of(name: str) -> st.SearchStrategy[Any]:
    return st.one_of(st.sampled_from(SENSIBLE_OF_SPEECH[name]), st.sampled_from(ODD_VALUES))


options_of_requests = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: values_of(name) for name in names})
)


@pytest.fixture(scope="module")
def service(speech_bundle) -> Iterator[Service]:
    with Pipeline.from_bundle(speech_bundle, num_threads=1) as pipe, Service(pipe) as running:
        yield running


def check_any(transcribe: Any, options: dict[str, Any]) -> None:
    try:
        found = transcribe(SAMPLES, **{**FEW, **options})
    except DsbdError as error:
        assert not isinstance(error, InternalError), error
        assert 10 < len(str(error)) < 1000 and "\n" not in str(error)
    else:
        assert found.duration == 1.0
        assert all(math.isfinite(segment.avg_logprob) for segment in found.segments)


@pytest.mark.parametrize("name", NAMES)
def test_every_odd_value_of_every_option(speech_pipe, name):
    """All options are checked before an engine is called."""
    for value in ODD_VALUES:
        for more in ({}, {"hot_words": ["fox"]}, {"best_of": 2, "temperature": (0.0, 0.5)}):
            try:
                transcription(speech_pipe, SAMPLES, {**more, name: value})
            except DsbdError as error:
                assert 10 < len(str(error)) < 1000 and "\n" not in str(error)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(options=options_of_requests)
def test_any_transcription_works_or_is_refused(speech_pipe, options):
    check_any(speech_pipe.transcribe, options)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(options=options_of_requests)
def test_any_transcription_of_a_service_works_or_is_refused(service, options):
    check_any(service.transcribe, options)


@pytest.mark.long
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(options=options_of_requests)
def test_many_transcriptions_work_or_are_refused(speech_pipe, options):
    check_any(speech_pipe.transcribe, options)


FUNCTION = lambda path, scores: scores  # noqa: E731
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"language": "xx"}, "language is 'xx'; expected the code or the English name of one of the 3"),
    ({"language": "engish"}, "did you mean 'english'"),
    ({"language": 5}, "language is a int"),
    ({"task": "sing"}, "task is 'sing'; expected one of transcribe, translate"),
    ({"temperature": ()}, "temperature has 0 values"),
    ({"temperature": (0.0, -1.0)}, "temperature is -1.0; expected a number from 0 to 10"),
    ({"temperature": "hot"}, "temperature is 'hot'; expected a number"),
    ({"logprob_threshold": float("nan")}, "logprob_threshold is nan"),
    ({"return_timestamps": "yes"}, "'yes'; expected one of False, True, 'word'"),
    ({"return_timestamps": np.ones(2)}, r"s is array\(\[1., 1.\]\); expected one of"),
    ({"condition_on_previous_text": "word"}, "text is 'word'; expected one of False, True$"),
    ({"initial_prompt": "<|startoftranscript|> now"}, "initial_prompt has the special token 281"),
    ({"vad": "yes"}, "vad is 'yes'; expected True, False or VadOptions"),
    ({"initial_prompt": 5}, "initial_prompt is a int; expected a text"),
    ({"best_of": 0}, "best_of is 0; expected at least 1"),
    ({"num_return_sequences": 0}, "num_return_sequences is 0; expected at least 1"),
    ({"num_return_sequences": 6}, "num_return_sequences is 6, but num_beams is 5"),
    ({"num_return_sequences": 2, "temperature": 0.5}, "sequences is 2, but best_of is 1"),
    ({"hot_words": "Kafka"}, "hot_words is a str; expected a list of texts"),
    ({"hot_words": [" "]}, "hot_words has ' '; expected words or phrases"),
    ({"hot_words": ["fox " * 99]}, "hot_words has a text of .* tokens"),
    ({"hot_words": ["<|en|>"]}, "hot_words has '<|en|>', with a special token"),
    ({"hot_words": ["fox"], "hot_word_gain": -1.0}, "gain is -1.0; expected a number from 0 to"),
    ({"no_timestamps_token_id": 5}, "no_timestamps_token_id is given, but transcribe decides it"),
    ({"strategy": "speculative", "num_beams": 1}, "temperature is 0, but strategy speculative"),
    ({"num_beams": 0}, "num_beams is 0; expected at least 1"),
    ({"max_new_tokens": 1000}, "maximum context length is 96 tokens"),
    ({"hotwords": ["Kafka"]}, "unknown option 'hotwords'"),
    ({"seed": "7"}, "seed is '7'; expected a whole number"),
    ({"seed": [7]}, r"seed is \[7\]; expected a whole number"),
    ({"seed": 2**128}, "seed is .*; expected at most"),
    ({"temperature": 10**400}, "temperature is a number of 1329 bits; expected a number from 0"),
    ({"logprob_threshold": 10**400}, "logprob_threshold is a number of 1329 bits; expected a fin"),
    ({"hot_word_gain": 10**400}, "hot_word_gain is a number of 1329 bits; expected a number from"),
    ({"logits_processors": FUNCTION, "hot_words": ["fox"]}, "logits_processors is .*; expected"),
    ({"num_beams": "x", "temperature": 0.5}, "num_beams is 'x'; expected a whole number"),
    ({"task": np.ones(2)}, r"task is array\(\[1., 1.\]\); expected one of"),
]


@pytest.mark.parametrize(("options", "words"), WRONG)
def test_wrong_options_are_named(options, words, speech_pipe):
    with pytest.raises(DsbdError, match=words):
        speech_pipe.transcribe(SAMPLES, **options)


NO_SOUND = [
    (np.zeros(0, np.float32), r"float32 of shape \(0,\)"),
    (np.zeros((2, 100), np.float32), "expected floats from -1 to 1 in one dimension"),
    (np.zeros(100, np.int16), "the samples are int16"),
    (np.array([0.0, np.nan]), "sample 1 is nan"),
]


@pytest.mark.parametrize(("samples", "words"), NO_SOUND)
def test_what_is_no_sound_is_refused(samples, words, speech_pipe):
    with pytest.raises(InputError, match=words):
        speech_pipe.transcribe(samples)


def test_a_text_is_no_prompt_of_a_speech_model(speech_pipe):
    for prompt in ("Hello", [1, 2]):
        with pytest.raises(InputError, match=r"reads sound, a .* is given as its prompt; use"):
            speech_pipe.generate(prompt)


def test_a_model_of_texts_transcribes_nothing(demo_bundle):
    with Pipeline.from_bundle(demo_bundle, num_threads=1) as pipe:
        with pytest.raises(InputError, match="reads text, not sound"):
            pipe.transcribe(SAMPLES)


def test_numbers_of_numpy_are_those_of_python(speech_pipe):
    """A uint8 of 255 and one more sample would begin again at seed 0."""
    common = {"temperature": 0.7, "best_of": 2, "num_return_sequences": 2, "max_new_tokens": 6}
    wanted = speech_pipe.transcribe(SAMPLES, language="en", seed=255, **common)
    for kind in (np.uint8, np.int64):
        found = speech_pipe.transcribe(
            SAMPLES,
            language="en",
            seed=kind(255),
            **{name: np.array(value)[()] for name, value in common.items()},
        )
        assert [each.token_ids for each in found.alternatives] == [
            each.token_ids for each in wanted.alternatives
        ]
    assert len({each.token_ids for each in wanted.alternatives}) > 2
