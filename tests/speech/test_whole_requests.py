"""Whole transcriptions drawn at random, every option beside every other; what holds of each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from dsbd_ort import Pipeline
from dsbd_ort.engine import Service
from dsbd_ort.speech.transcript import Transcript
from tests.speech.sounds import chirp, noise, speech_like

PLAIN = {1: "greedy", 2: "beam-search", 4: "beam-search"}
DRAFTED = "speculative-beam-search"


def drawn(seed: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Return an audio and the options of a request; each option may be left out."""
    rng = np.random.default_rng(seed)
    seconds = float(rng.choice([0.3, 0.9, 1.7]))
    samples = [speech_like, noise][int(rng.integers(2))](seconds, seed=seed)
    num_beams = int(rng.choice([1, 2, 4]))
    choices: dict[str, list[Any]] = {
        "language": ["en", "german"],
        "task": ["transcribe", "translate"],
        "return_timestamps": [False, True],
        "initial_prompt": ["The quick", ""],
        "condition_on_previous_text": [False, True],
        "temperature": [0.0, (0.0, 0.7), 0.9],
        "best_of": [1, 3],
        "num_return_sequences": [1, 2],
        "hot_words": [["brown fox", "Haus"], []],
        "hot_word_gain": [0.0, 3.0],
        "compression_ratio_threshold": [None, 1.1],
        "logprob_threshold": [None, -1.0, -100.0],
        "no_speech_threshold": [None, 0.0, 0.5],
        "length_penalty": [0.5, 1.5],
        "max_new_tokens": [3, 9],
    }
    options = {
        name: values[int(rng.integers(len(values)))]
        for name, values in choices.items()
        if rng.random() < 0.6
    }
    options = {"max_new_tokens": 9, "seed": seed, **options, "num_beams": num_beams}
    least = num_beams if 0.0 in np.atleast_1d(options.get("temperature", 0.0)) else 1
    if least == 1 and options.get("temperature") == 0.9:
        least = options.get("best_of", 1)
    options["num_return_sequences"] = min(options.get("num_return_sequences", 1), least)
    if options.get("return_timestamps") and rng.random() < 0.6:
        options["return_timestamps"] = "word"
    return samples, options


def check_alike(one: Transcript, other: Transcript) -> None:
    """Equal, but for the rounding of calls with other rows beside these."""
    for found, wanted in ((one.segments, other.segments), (one.alternatives, other.alternatives)):
        for a, b in zip(found, wanted, strict=True):
            assert vars(a) == {**vars(b), **{n: pytest.approx(p) for n, p in _probs_of(b).items()}}
    assert one.language == other.language


def _probs_of(part: Any) -> dict[str, float]:
    names = ("avg_logprob", "no_speech_prob")
    return {name: getattr(part, name) for name in names if hasattr(part, name)}


def check_whole(found: Transcript, options: dict[str, Any]) -> None:
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
    by_window: dict[int, list[Any]] = {}
    for each in found.alternatives:
        by_window.setdefault(each.seek, []).append(each)
    assert bool(by_window) <= (options["num_return_sequences"] > 1)
    for seek, texts in by_window.items():
        assert len(texts) <= options["num_return_sequences"]
        assert len({each.token_ids for each in texts}) >= len(texts) - (texts[0].temperature > 0)
        of_window = [each for each in found.segments if each.seek == seek]
        assert all(each.avg_logprob == texts[0].avg_logprob for each in of_window)
        if options.get("return_timestamps") is False and found.duration <= 1.0:
            assert [each.text for each in of_window] == [texts[0].text]


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(n, marks=pytest.mark.long) for n in range(6, 80))]
)
def test_drafted_is_plain(seed: int, speech_pipe: Pipeline) -> None:
    samples, options = drawn(seed)
    beams = options["num_beams"]
    plain = speech_pipe.transcribe(samples, strategy=PLAIN[beams], **options)
    drafted = speech_pipe.transcribe(samples, strategy=DRAFTED, draft_length=3, **options)
    for found in (plain, drafted):
        check_whole(found, options)
    if all(each.temperature == 0.0 for each in (*plain.segments, *drafted.segments)):
        check_alike(drafted, plain)


def test_requests_at_a_time_are_those_alone(speech_pipe: Pipeline) -> None:
    requests = [drawn(seed) for seed in range(100, 104)]
    requests.append(
        (chirp(1.5), {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 6, "seed": 1})
    )
    words: dict[str, Any] = {"return_timestamps": "word", "max_new_tokens": 9, "seed": 2}
    requests += [(chirp(1.5), words), (speech_like(0.8), {**words, "temperature": 0.7})]
    alone = [speech_pipe.transcribe(samples, **options) for samples, options in requests]
    with Service(speech_pipe) as service, ThreadPoolExecutor(len(requests)) as threads:
        futures = [
            threads.submit(service.transcribe, samples, **options) for samples, options in requests
        ]
        together = [future.result() for future in futures]
    for one, other in zip(alone, together, strict=True):
        check_alike(one, other)
