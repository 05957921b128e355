"""Equality of our transcripts with those of transformers' generate, on the same samples.

Every case compares segments: tokens, times and the mean log-probability of their window. On demand
it also compares words and their times with those of transformers' ``return_token_timestamps``,
grouped as its pipeline groups them.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizer
from transformers.models.whisper.tokenization_whisper import LANGUAGES, _collate_word_timestamps

from dsbd_ort import Pipeline
from dsbd_ort.audio.audio_files import SAMPLING_RATE, Samples
from lab.transcription.runners.serve import read_samples
from lab.transcription.sounds import sounds
from lab.transcription.speech import Spoken
from scripts.document_sections import table

TOLERANCE = 1e-3  # for mean log-probabilities, which are summed in another order
PLAIN: dict[str, Any] = {
    "temperature": 0.0,
    "compression_ratio_threshold": None,
    "logprob_threshold": None,
    "no_speech_threshold": None,
}
# At such a low temperature sampling is deterministic, whatever the random numbers.
FALLBACK: dict[str, Any] = {
    "temperature": (0.0, 1e-4),
    "compression_ratio_threshold": 1.35,
    "logprob_threshold": -1.0,
    "no_speech_threshold": 0.6,
}
NEVER = -1e9  # threshold that no text falls below; with a threshold transformers returns scores


Words = tuple[tuple[str, float, float], ...]
"""Tuples (word, start, end), times in seconds."""


@dataclass(frozen=True)
class Part:
    """A segment: times in seconds, tokens, mean log-probability of its window; words on demand."""

    start: float
    end: float
    token_ids: tuple[int, ...]
    avg_logprob: float | None
    words: Words | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One case.

    Attributes:
        kind: row of the table.
        name: name of the case.
        is_equal: whether tokens, times and (if compared) words are equal.
        logprob_error: largest difference of log-probabilities of equal segments.
        difference: description of the first difference, or "".
    """

    kind: str
    name: str
    is_equal: bool
    logprob_error: float
    difference: str = ""


def compared(
    kind: str, name: str, parts: Sequence[Part], expected_parts: Sequence[Part]
) -> Outcome:
    """Compare the segments of a transcript with the expected ones."""
    error = 0.0
    for number, (one, other) in enumerate(zip(parts, expected_parts, strict=False)):
        if words := _difference(one, other):
            words = f"segment {number}: {words}"
            return Outcome(
                kind=kind, name=name, is_equal=False, logprob_error=error, difference=words
            )
        if one.avg_logprob is not None and other.avg_logprob is not None:
            error = max(error, abs(one.avg_logprob - other.avg_logprob))
    words = ""
    if len(parts) != len(expected_parts):
        words = f"{len(parts)} segments instead of {len(expected_parts)}"
    elif error > TOLERANCE:
        words = f"log-probabilities differ by {error:.2g}"
    return Outcome(kind=kind, name=name, is_equal=not words, logprob_error=error, difference=words)


def _difference(one: Part, other: Part) -> str:
    """Describe how two segments differ, "" if equal; log-probabilities are not compared here."""
    times = np.allclose((one.start, one.end), (other.start, other.end), atol=1e-6)
    if one.token_ids != other.token_ids or not times:
        return f"{one} instead of {other}"
    if one.words is None or other.words is None:
        return ""
    for word, expected_word in itertools.zip_longest(one.words, other.words):
        if word != expected_word:
            return f"the word {word} instead of {expected_word}"
    return ""


class Reference:
    """transformers' Whisper in fp32."""

    def __init__(self, checkpoint: Path, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._model: Any = WhisperForConditionalGeneration.from_pretrained(
            checkpoint, dtype=torch.float32
        ).eval()
        self._extractor = WhisperFeatureExtractor.from_pretrained(checkpoint)
        self._tokenizer = WhisperTokenizer.from_pretrained(checkpoint)
        self._is_multilingual = self._model.generation_config.is_multilingual

    def parts(self, samples: Samples, language: str | None, **options: Any) -> list[Part]:
        """Return the segments that begin before the end of the audio."""
        segments = self._segments(samples, language, **options)
        return [self._part(each, options["temperature"]) for each in segments]

    def parts_with_words(
        self, samples: Samples, language: str | None, **options: Any
    ) -> list[Part]:
        """Return the segments of ``parts`` with their words."""
        config = self._model.config
        usual = config._attn_implementation
        try:  # this call changes the attention of the model permanently
            segments = self._segments(samples, language, return_token_timestamps=True, **options)
        finally:
            config._attn_implementation = usual
        parts, before = [], 0.0
        for each in segments:
            words = self._words(each, before, language)
            parts.append(replace(self._part(each, options["temperature"]), words=words))
            before = float(each["token_timestamps"][-1])
        return parts

    def _words(self, segment: dict[str, Any], before: float, language: str | None) -> Words:
        """Return the words of a segment; each token begins at the end of the previous token."""
        special = {*self._tokenizer.all_special_ids}
        first_time = self._model.generation_config.no_timestamps_token_id + 1
        tokens, times = [], []
        ends = segment["token_timestamps"].tolist()
        for token, start, end in zip(
            segment["tokens"].tolist(), [before, *ends[:-1]], ends, strict=True
        ):
            if token < first_time and token not in special:
                tokens.append(token)
                times.append((round(start, 2), round(end, 2)))
        if not tokens:
            return ()
        name = LANGUAGES.get(language or "en")
        made = _collate_word_timestamps(self._tokenizer, tokens, times, name, False)
        return tuple((each["text"], *each["timestamp"]) for each in made)

    @torch.inference_mode()
    def _segments(
        self, samples: Samples, language: str | None, **options: Any
    ) -> list[dict[str, Any]]:
        is_short = len(samples) <= self._extractor.n_samples
        features = self._extractor(
            samples,
            sampling_rate=SAMPLING_RATE,
            return_tensors="pt",
            truncation=False,
            padding="max_length" if is_short else "longest",
            return_attention_mask=True,
        )
        if options.get(
            "return_token_timestamps"
        ):  # only the sound counts, not the padding of its window
            options["attention_mask"] = features.attention_mask
        if self._is_multilingual:
            options |= {"language": language, "task": "transcribe"}
        if options.get("logprob_threshold") is None:
            options["logprob_threshold"] = NEVER
        output = self._model.generate(features.input_features, return_segments=True, **options)
        end = len(samples) / SAMPLING_RATE
        return [each for each in output["segments"][0] if float(each["start"]) < end]

    def _part(self, segment: dict[str, Any], temperature: float | tuple[float, ...]) -> Part:
        return Part(
            round(float(segment["start"]), 6),
            round(float(segment["end"]), 6),
            tuple(segment["tokens"].tolist()),
            self._logprob(segment, temperature),
        )

    def _logprob(
        self, segment: dict[str, Any], temperature: float | tuple[float, ...]
    ) -> float | None:
        """Return the mean log-probability of a segment's window, None if it may be sampled."""
        result = segment["result"]
        if not isinstance(temperature, float) or not isinstance(result, dict):
            return None
        end, scores = self._model.generation_config.eos_token_id, result["scores"]
        tokens = result["sequences"][-len(scores) :]
        ends = (tokens == end).nonzero().flatten().tolist()
        tokens = tokens[: ends[0] + 1] if ends else tokens
        return float(self._model._retrieve_avg_logprobs(scores, tokens, 0.0))


class Cases:
    """All cases of one model."""

    def __init__(
        self,
        checkpoint: Path,
        bundle: Path,
        files: Sequence[Spoken],
        num_threads: int,
        *,
        have_words: bool = False,
    ) -> None:
        """``have_words``: whether words and their times are also compared."""
        self._have_words = have_words
        self._reference = Reference(checkpoint, num_threads)
        self._pipe = Pipeline.from_bundle(bundle, num_threads=num_threads)
        self._files = files

    def close(self) -> None:
        """Release the engines."""
        self._pipe.close()

    def all(self) -> Iterator[tuple[str, str, Callable[[], Outcome]]]:
        """Yield (kind, name, function that runs the case) of every case, long files last."""
        short = [each for each in self._files if not each.utterance.is_long]
        long = [each for each in self._files if each.utterance.is_long]
        for name, samples, num_beams in sounds([read_samples(str(each.path)) for each in short]):
            yield self._with_fallback(name, samples, num_beams)
        for each in short:
            for num_beams in (5, 1):
                for times in (True, False):
                    yield self._of_transformers("an utterance", each, num_beams, times)
                if self._have_words:
                    yield self._of_transformers_words("an utterance", each, num_beams)
        for each in long:
            for num_beams in (1, 5):
                yield self._of_transformers("a long file", each, num_beams, True)
                if self._have_words:
                    yield self._of_transformers_words("a long file", each, num_beams)

    def _of_transformers(
        self, what: str, spoken: Spoken, num_beams: int, times: bool
    ) -> tuple[str, str, Callable[[], Outcome]]:
        kind = f"{what}, {_beams(num_beams)}, {'with' if times else 'without'} times"
        name = spoken.utterance.name

        def run() -> Outcome:
            samples, language = read_samples(str(spoken.path)), spoken.utterance.language
            options = {"num_beams": num_beams, "return_timestamps": times}
            parts = self._parts(samples, language, **options, **PLAIN)
            expected_parts = self._reference.parts(samples, language, temperature=0.0, **options)
            return compared(kind, name, _begun(parts, samples), expected_parts)

        return kind, name, run

    def _of_transformers_words(
        self, what: str, spoken: Spoken, num_beams: int
    ) -> tuple[str, str, Callable[[], Outcome]]:
        kind = f"{what}, {_beams(num_beams)}, times of words"
        name = spoken.utterance.name

        def run() -> Outcome:
            samples, language = read_samples(str(spoken.path)), spoken.utterance.language
            parts = self._parts(
                samples, language, num_beams=num_beams, return_timestamps="word", **PLAIN
            )
            options = {"num_beams": num_beams, "return_timestamps": True, "temperature": 0.0}
            expected_parts = self._reference.parts_with_words(samples, language, **options)
            return compared(kind, name, _begun(parts, samples), expected_parts)

        return kind, name, run

    def _with_fallback(
        self, name: str, samples: Samples, num_beams: int
    ) -> tuple[str, str, Callable[[], Outcome]]:
        kind = f"sounds with fallback, {_beams(num_beams)}"

        def run() -> Outcome:
            options = {"num_beams": num_beams, "return_timestamps": True, **FALLBACK}
            parts = _begun(self._parts(samples, "en", **options), samples)
            return compared(kind, name, parts, self._reference.parts(samples, "en", **options))

        return kind, name, run

    def _parts(self, samples: Samples, language: str, **options: Any) -> list[Part]:
        transcript = self._pipe.transcribe(samples, language=language, **options)
        return [
            Part(
                round(each.start, 6),
                round(each.end, 6),
                each.token_ids,
                each.avg_logprob if each.temperature == 0.0 else None,
                None
                if each.words is None
                else tuple((word.word, word.start, word.end) for word in each.words),
            )
            for each in transcript.segments
        ]


def _begun(parts: Sequence[Part], samples: Samples) -> list[Part]:
    """Return the segments that begin before the end of the audio, as ``Reference`` does."""
    return [each for each in parts if each.start < len(samples) / SAMPLING_RATE]


def _beams(num_beams: int) -> str:
    return "greedy" if num_beams == 1 else f"{num_beams} beams"


def outcomes(
    cases: Cases, kept: Path, seconds: float, report: Callable[[str], None]
) -> list[Outcome]:
    """Return the outcomes of all cases, including those in the file ``kept`` from earlier calls.

    kept: JSON lines; every new outcome is appended at once. seconds: no case starts after them.
    """
    earlier: dict[tuple[str, str], Outcome] = {}
    if kept.exists():
        lines = kept.read_text(encoding="utf-8").splitlines()
        earlier = {
            (each.kind, each.name): each for each in (Outcome(**json.loads(x)) for x in lines)
        }
    until = time.monotonic() + seconds
    all_outcomes = []
    for kind, name, run in cases.all():
        outcome = earlier.get((kind, name))
        if outcome is None:
            if time.monotonic() > until:
                continue
            outcome = run()
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(vars(outcome)) + "\n")
        if not outcome.is_equal:
            report(f"{kind}, {name}: {outcome.difference}")
        all_outcomes.append(outcome)
    return all_outcomes


def equality_table(counted: Sequence[Outcome]) -> list[str]:
    """Return the lines of a table: number of equal cases of each kind."""
    rows = []
    for kind in dict.fromkeys(each.kind for each in counted):
        of_kind = [each for each in counted if each.kind == kind]
        num_equal = sum(each.is_equal for each in of_kind)
        error = max(each.logprob_error for each in of_kind)
        rows.append((kind, f"{num_equal}/{len(of_kind)}", f"{error:.1e}"))
    return table(("what", "equal", "log-probability off by, at most"), rows)
