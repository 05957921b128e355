"""Attempts at a window that are given up, once no continuation can save their text."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dsbd_ort.decoding import DecodeResult, DecodingConfig, DecodingRequest
from dsbd_ort.decoding.request import GIVE_UP_INTERVAL
from dsbd_ort.decoding.result import DecodedSequence
from dsbd_ort.engine import Service, ServiceLimits
from dsbd_ort.requests.prompts import RequestInputs
from dsbd_ort.speech.speech_request import SpeechRequest
from dsbd_ort.speech.window_texts import WindowTexts, compression_ratio, least_compression_ratio
from dsbd_runtime.parts.source.speech_entry import SoundFeatures
from tests.benchmark.fakes import stats
from tests.speech.test_transcription import FEW, NO_FALLBACK, sound

END = 0
LONGEST = 400
LOOP = [7, 8] * (LONGEST // 2)
SPEECH: Any = SimpleNamespace(suppress_tokens=(), begin_suppress_tokens=())


@pytest.mark.parametrize("vocab_size", [300, 51_865])
def test_no_text_is_compressed_worse_than_its_beginning_allows(vocab_size):
    rng = np.random.default_rng(0)
    num_close = 0
    for _ in range(400):
        period, num_tokens = rng.integers(1, 12), int(rng.integers(1, 300))
        begun = np.resize(rng.integers(0, vocab_size, period), num_tokens).tolist()
        bound = least_compression_ratio(begun, 440, vocab_size)
        for num_more in (0, 1, 2, int(rng.integers(0, 440 - num_tokens)), 440 - num_tokens):
            more = rng.integers(0, vocab_size, num_more)
            if rng.random() < 0.3:  # goes on as it began, and then differently
                more[: num_more // 2] = np.resize(begun, num_more // 2)
            ratio = compression_ratio([*begun, *more.tolist()], vocab_size)
            assert ratio >= bound
            num_close += ratio < 1.4 * bound
    assert num_close > 40


def test_texts_that_no_code_compresses():
    """Bytes above 143 are the longest in the fixed code."""
    begun, vocab_size = [144 * 257] * 200, 51_865
    bound = least_compression_ratio(begun, 440, vocab_size)
    for seed in range(20):
        high, low = np.random.default_rng(seed).integers(144, (202, 256), (240, 2)).T
        more = (256 * high + low).tolist()
        assert compression_ratio(begun + more, vocab_size) >= bound
    assert bound > 1.35 > compression_ratio(more, vocab_size)


class Model:
    """Decodes requests whose text is known by temperature and number, until they give up.

    Attributes:
        decoded: the temperature and the tokens of each request.
    """

    def __init__(self, texts: dict[float, Sequence[tuple[list[int], float]]]) -> None:
        """``texts``: by temperature, the tokens and the mean log-probability of each sample."""
        self._texts = texts
        self.decoded: list[tuple[float, int]] = []
        self.has_draft = False

    def request_of(self, inputs: Any, options: Any, *, allowed_mass: Any) -> DecodingRequest:
        options = {name: value for name, value in options.items() if value != ()}
        options = {"strategy": "beam-search", "max_new_tokens": LONGEST, **options}
        config = DecodingConfig(**options, eos_token_id=END)
        return DecodingRequest(
            prompt_ids=inputs.prompt_ids,
            config=config,
            rng=np.random.default_rng(0),
            allowed_mass=allowed_mass,
        )

    def run(self, requests: Sequence[DecodingRequest]) -> list[DecodeResult]:
        return [self._result(request) for request in requests]

    def _result(self, request: DecodingRequest) -> DecodeResult:
        config = request.config
        temperature = 0.0 if config.row.rule == "search" else config.temperature
        number = (config.seed or 0) if temperature else 0
        tokens, avg_logprob = self._texts[temperature][number]
        if request.gives_up is not None:
            for depth in range(GIVE_UP_INTERVAL, len(tokens), GIVE_UP_INTERVAL):
                if request.gives_up([tokens[:depth]], []):
                    tokens = tokens[:depth]
                    break
        self.decoded.append((temperature, len(tokens)))
        sequence = DecodedSequence(
            token_ids=tokens,
            token_logprobs=[avg_logprob] * len(tokens),
            logprob=avg_logprob * len(tokens),
            score=avg_logprob,
            finish_reason="length",
        )
        return DecodeResult([sequence], stats())


def decoded(
    texts: dict[float, Sequence[tuple[list[int], float]]],
    no_speech_prob: float = 0.1,
    **changes: Any,
) -> tuple[Any, list[tuple[float, int]]]:
    """The best answer, and what was decoded for it."""
    model: Any = Model(texts)
    request = SpeechRequest(
        vocab_size=51_865,
        most_previous=10,
        temperature=tuple(texts),
        best_of=max(map(len, texts.values())),
        options={"seed": 0},
        **changes,
    )
    steps = WindowTexts(model, request).answers(RequestInputs([1], None), no_speech_prob)
    requests = next(steps)
    while True:
        try:
            requests = steps.send(model.run(requests))
        except StopIteration as end:
            return end.value[0], model.decoded


SHORT = [5, 6, END]
GIVEN_UP = 160  # of 400


def test_a_text_that_repeats_itself_is_given_up():
    answer, attempts = decoded({0.0: [(LOOP, -0.1)], 0.5: [(SHORT, -0.2)]})
    assert (answer.temperature, answer.token_ids) == (0.5, (5, 6))
    assert attempts == [(0.0, GIVEN_UP), (0.5, 3)]


def test_the_last_temperature_is_decoded_to_its_end():
    answer, attempts = decoded({0.0: [(LOOP, -0.1)], 0.5: [(LOOP, -0.1)]})
    assert len(answer.token_ids) == LONGEST == attempts[-1][1] > attempts[0][1]


NO_THRESHOLD: list[dict[str, Any]] = [
    {"compression_ratio_threshold": None},
    {"compression_ratio_threshold": 1e3},
]


@pytest.mark.parametrize("changes", NO_THRESHOLD)
def test_a_text_that_may_repeat_itself_is_not_given_up(changes):
    answer, attempts = decoded({0.0: [(LOOP, -0.1)], 0.5: [(SHORT, -0.2)]}, **changes)
    assert (answer.temperature, attempts) == (0.0, [(0.0, LONGEST)])


def test_a_good_sample_with_one_that_was_given_up():
    """The most probable is the best: only its whole text tells whether it is the poor one."""
    for of_loop, temperature in ((-0.5, 0.2), (-0.1, 0.8)):
        texts = {0.2: [(SHORT, -0.3), (LOOP, of_loop)], 0.8: [(SHORT, -0.4)] * 2}
        answer, attempts = decoded(texts)
        assert answer.temperature == temperature
        assert [tokens for _, tokens in attempts][:2] == [3, attempts[1][1]]
        assert attempts[1][1] <= GIVEN_UP and attempts[2] == (0.2, LONGEST)


IMPROBABLE = (SHORT, -2.0)


def test_what_may_be_silence_is_decoded_to_its_end_if_speech_is_found_later():
    """A text that was given up may be improbable: then the window has no speech."""
    for of_loop in (-0.1, -2.0):
        first = {0.0: [(LOOP, of_loop)]}
        answer, attempts = decoded({**first, 0.5: [IMPROBABLE]}, no_speech_prob=0.9)
        assert answer.avg_logprob == -2.0 and len(attempts) == 2  # no speech in either case
        answer, attempts = decoded({**first, 0.5: [(SHORT, -0.2)]}, no_speech_prob=0.9)
        assert [temperature for temperature, _ in attempts] == [0.0, 0.5, 0.0]
        assert answer.avg_logprob == pytest.approx(-0.2 if of_loop == -0.1 else -2.0)


def test_the_temperature_of_silence_is_told_to_the_next_window():
    texts = {0.0: [(LOOP, -2.0)], 0.5: [IMPROBABLE]}
    answer, attempts = decoded(texts, no_speech_prob=0.9, condition_on_previous_text=True)
    assert answer.temperature == 0.0
    assert [temperature for temperature, _ in attempts] == [0.0, 0.0]


Text = tuple[tuple[int, ...], float, float]


def texts_of(transcribe: Callable[..., Any], **options: Any) -> list[Text]:
    found = transcribe(sound(1.0), **{**NO_FALLBACK, **options}).segments
    return [(each.token_ids, each.temperature, each.avg_logprob) for each in found]


def test_samples_that_share_their_calls_are_those_of_a_service(speech_pipe):
    options: dict[str, Any] = {**FEW, "temperature": (0.4, 0.8), "seed": 5, "best_of": 3}
    options["logprob_threshold"] = 0.0  # which no text reaches
    wanted = texts_of(speech_pipe.transcribe, **options)
    assert {temperature for _, temperature, _ in wanted} == {0.8}
    limits = ServiceLimits(max_requests=1, max_queued=0)  # the samples of a window count as one
    with Service(speech_pipe, limits) as service:
        found = texts_of(service.transcribe, **options)
    assert [each[:2] for each in found] == [each[:2] for each in wanted]
    assert [each[2] for each in found] == pytest.approx([each[2] for each in wanted], abs=1e-5)


def test_given_up_requests_return_what_they_have(speech_pipe):
    for options in ({"num_beams": 3}, {"strategy": "sample", "temperature": 1.0, "seed": 1}):
        asked: list[int] = []

        def gives_up(beams: list[list[int]], ended: list[Any], asked: list[int] = asked) -> bool:
            asked.append(len(beams[0]))
            return asked[-1] >= 32

        request = _request(speech_pipe, options)
        (whole,) = speech_pipe.models.decoded([request(None)])
        (cut,) = speech_pipe.models.decoded([request(gives_up)])
        assert asked == [16, 32]
        [tokens] = [each.token_ids for each in cut.sequences]
        assert len(tokens) == 32
        if "strategy" in options:
            assert tokens == whole.sequences[0].token_ids[:32]


def _request(pipe: Any, options: dict[str, Any]) -> Callable[[Any], DecodingRequest]:
    encoder = pipe.prompts.encoder
    shape = encoder.speech.num_mels, encoder.speech.num_frames
    source = SoundFeatures(np.zeros(shape, np.float32))
    ended = {"max_new_tokens": 40, "suppress_tokens": [*pipe.config({}).eos_ids]}

    def request(gives_up: Any) -> DecodingRequest:
        inputs = RequestInputs([encoder.start_token_id], source)
        return replace(pipe.request_of(inputs, {**ended, **options}), gives_up=gives_up)

    return request
