"""Whole transcriptions drawn at random, and what must hold of each."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from dsbd_errors import DsbdError
from dsbd_ort import Service
from dsbd_ort.speech.speech_request import TEMPERATURES
from dsbd_ort.speech.transcript import Segment, Transcript
from tests.robustness.demo_requests import Pipes
from tests.robustness.whole_requests import VALUES
from tests.speech.sounds import chirp, noise, speech_like, tone

SOUNDS: dict[str, Callable[[float, int], NDArray[np.float32]]] = {
    "speech": speech_like,
    "noise": noise,
    "tone": lambda seconds, seed: tone(seconds, 90.0 + seed),
    "chirp": lambda seconds, seed: chirp(seconds),
}
OWN: dict[str, st.SearchStrategy[Any]] = {
    "language": st.sampled_from(["en", "german"]),
    "task": st.sampled_from(["transcribe", "translate"]),
    "return_timestamps": st.sampled_from([False, True, "word"]),
    "initial_prompt": st.sampled_from(["The quick", ""]),
    "condition_on_previous_text": st.booleans(),
    "temperature": st.sampled_from([0.9, 0.0, (0.0, 0.7), (0.0, 0.4, 1.0), TEMPERATURES]),
    "best_of": st.integers(1, 3),
    "num_return_sequences": st.integers(1, 2),
    "hot_words": st.sampled_from([["brown fox", "Haus"], []]),
    "hot_word_gain": st.sampled_from([0.0, 3.0]),
    "compression_ratio_threshold": st.sampled_from([None, 1.1]),
    "logprob_threshold": st.sampled_from([None, -1.0, -100.0]),
    "no_speech_threshold": st.sampled_from([None, 0.0, 0.5]),
}
OF_EVERY_REQUEST = (
    *("length_penalty", "early_stopping", "repetition_penalty", "presence_penalty"),
    *("no_repeat_ngram_size", "bad_words_ids", "logit_bias", "min_new_tokens"),
    *("logits_processors", "suppress_tokens", "begin_suppress_tokens", "top_logprobs"),
)
OF_DRAFTS = ("drafter", "draft_policy", "draft_length", "draft_beams")
DRAFTED = "speculative-beam-search"


@dataclass(frozen=True)
class SpeechRequest:
    """An audio, the options of its transcription, and whether a Service is to answer as well."""

    sound: str
    seconds: float
    seed: int
    options: dict[str, Any]
    is_shared: bool

    @property
    def samples(self) -> NDArray[np.float32]:
        return SOUNDS[self.sound](self.seconds, self.seed)

    def undrafted(self) -> list[dict[str, Any]]:
        """Return options that must give the same without drafts."""
        options = {name: value for name, value in self.options.items() if name not in OF_DRAFTS}
        drafting_none = {**options, "strategy": DRAFTED, "drafter": "none"}
        if options["num_beams"] > 1:
            return [drafting_none, {**options, "strategy": "beam-search"}]
        options.pop("early_stopping", None)  # of beams
        return [drafting_none, {**options, "strategy": "greedy"}]


@st.composite
def speech_requests(draw: st.DrawFn) -> SpeechRequest:
    """Draw a request; few have options that contradict each other."""
    num_beams = draw(st.sampled_from([1, 2, 4]))
    own = draw(st.lists(st.sampled_from([*OWN]), max_size=6, unique=True))
    general = draw(st.lists(st.sampled_from(OF_EVERY_REQUEST), max_size=3, unique=True))
    of_drafts = draw(st.lists(st.sampled_from(OF_DRAFTS), max_size=3, unique=True))
    seed = draw(st.integers(0, 2**31))
    options: dict[str, Any] = {
        "num_beams": num_beams,
        "max_new_tokens": draw(st.sampled_from([9, 3, 20])),
        "temperature": 0.0,
        "seed": seed,
        **{name: draw(OWN[name]) for name in own},
        **{name: draw(VALUES[name]) for name in (*general, *of_drafts)},
    }
    temperature = np.atleast_1d(options["temperature"])
    most = num_beams if 0.0 in temperature else options.get("best_of", 1)
    if options.get("num_return_sequences", 1) > most:
        options["num_return_sequences"] = most
    if draw(st.booleans()):
        options["strategy"] = DRAFTED
    return SpeechRequest(
        sound=draw(st.sampled_from([*SOUNDS])),
        seconds=draw(st.sampled_from([0.3, 0.9, 1.7, 0.05, 2.3])),
        seed=seed % 100,
        options=options,
        is_shared=draw(st.booleans()),
    )


def check_speech_request(pipes: Pipes, request: SpeechRequest) -> bool:
    """Transcribe in every way there is and compare; False: the request is refused.

    What it is compared with is preempted again and again.
    """
    samples, options = request.samples, request.options
    segments: list[Segment] = []
    try:
        wanted = pipes.calm.transcribe(samples, on_segment=segments.append, **options)
    except DsbdError as error:
        assert 10 < len(str(error)) < 600, error
        return False
    assert tuple(segments) == wanted.segments
    check_transcript(wanted, request)
    others = [pipes.forced.transcribe(samples, **options)]
    others += [pipes.forced.transcribe(samples, **each) for each in request.undrafted()]
    if request.is_shared:
        others += of_a_service(pipes, request)
    for other in others:
        check_alike(other, wanted)
    return True


def of_a_service(pipes: Pipes, request: SpeechRequest) -> list[Transcript]:
    """Return the transcripts of two that share the engine calls with another audio's."""
    samples, options = request.samples, request.options
    with Service(pipes.forced) as service, ThreadPoolExecutor(3) as threads:
        begin = threads.submit(service.transcribe, speech_like(1.2), num_beams=2, seed=1)
        found = [threads.submit(service.transcribe, samples, **options) for _ in range(2)]
        assert begin.result().duration > 1.0
        return [each.result() for each in found]


def check_alike(found: Transcript, wanted: Transcript) -> None:
    """Equal, except for the rounding of calls that compute other rows as well.

    A bias of a million leaves 1e-9 of a log-probability near 0.
    """
    assert (found.text, found.language, found.task) == (wanted.text, wanted.language, wanted.task)
    for ours, theirs in (
        (found.segments, wanted.segments),
        (found.alternatives, wanted.alternatives),
    ):
        for a, b in zip(ours, theirs, strict=True):
            probs = _probs_of(b).items()
            near = {name: pytest.approx(prob, rel=1e-6, abs=1e-8) for name, prob in probs}
            assert vars(a) == {**vars(b), **near}


def _probs_of(part: Any) -> dict[str, float]:
    names = ("avg_logprob", "no_speech_prob")
    return {name: getattr(part, name) for name in names if hasattr(part, name)}


def check_transcript(found: Transcript, request: SpeechRequest) -> None:
    options = request.options
    for times in ([a.start for a in found.segments], [a.end for a in found.segments]):
        assert times == sorted(times)
    assert all(0.0 <= a.start <= a.end for a in found.segments)
    assert np.isfinite([each.avg_logprob for each in found.segments]).all()
    for segment in found.segments:
        assert (segment.words is None) == (options.get("return_timestamps") != "word")
        words = segment.words or ()
        assert not words or "".join(word.word for word in words) == segment.text
        times = [time for word in words for time in (word.start, word.end)]
        assert times == sorted(times)
        assert all(0.0 <= word.probability <= 1.0 for word in words)
    check_alternatives(found, options)


def check_alternatives(found: Transcript, options: dict[str, Any]) -> None:
    by_window: dict[int, list[Any]] = {}
    for each in found.alternatives:
        by_window.setdefault(each.seek, []).append(each)
    num_wanted = options.get("num_return_sequences", 1)
    assert bool(by_window) <= (num_wanted > 1)
    for seek, texts in by_window.items():
        assert len(texts) <= num_wanted
        assert len({each.token_ids for each in texts}) >= len(texts) - (texts[0].temperature > 0)
        of_window = [each for each in found.segments if each.seek == seek]
        assert all(each.avg_logprob == texts[0].avg_logprob for each in of_window)
        if options.get("return_timestamps") is False and found.duration <= 1.0:
            assert [each.text for each in of_window] == [texts[0].text]
