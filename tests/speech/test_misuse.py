"""Any options of a transcription work or are refused in one line, by pipeline and service."""

from __future__ import annotations

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
                speech_pipe.transcription(SAMPLES, {**more, name: value})
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
RAW: list[tuple[dict[str, Any], str]] = [  # what used to end raw, or to mean something else
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


@pytest.mark.parametrize(("options", "words"), RAW)
def test_wrong_types_are_named(options, words, speech_pipe):
    with pytest.raises(DsbdError, match=words):
        speech_pipe.transcription(SAMPLES, options)


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
