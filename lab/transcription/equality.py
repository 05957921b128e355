"""Equality of our transcripts with those of transformers' generate, on the same samples.

Every case compares segments: their tokens, their times and the mean log-probability of their
window; on demand also the words of segments and their times, with those of transformers'
``return_token_timestamps``, grouped as its pipeline groups them.
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

TOLERANCE = 1e-3  # of a mean log-probability: sums in another order
PLAIN: dict[str, Any] = {
    "temperature": 0.0,
    "compression_ratio_threshold": None,
    "logprob_threshold": None,
    "no_speech_threshold": None,
}
# What is sampled at so low a temperature is certain, whoever draws it.
FALLBACK: dict[str, Any] = {
    "temperature": (0.0, 1e-4),
    "compression_ratio_threshold": 1.35,
    "logprob_threshold": -1.0,
    "no_speech_threshold": 0.6,
}
NEVER = -1e9  # a threshold with which transformers returns scores, and that no text is below


Words = tuple[tuple[str, float, float], ...]
"""Each with its start and end, in seconds."""


@dataclass(frozen=True)
class Part:
    """A segment: its times in seconds, tokens, how sure its window is; words if asked for."""

    start: float
    end: float
    token_ids: tuple[int, ...]
    avg_logprob: float | None
    words: Words | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One case.

    Attributes:
        kind: a row of the table.
        name: of the case.
        is_equal: whether tokens and times are the same, and words where they are compared.
        logprob_error: largest difference of the log-probabilities of equal segments.
        difference: the first one, as text; "" where there is none.
    """

    kind: str
    name: str
    is_equal: bool
    logprob_error: float
    difference: str = ""


def compared(kind: str, name: str, found: Sequence[Part], wanted: Sequence[Part]) -> Outcome:
    """Return how two transcripts compare, of which ``wanted`` is what should have come out."""
    error = 0.0
    for number, (one, other) in enumerate(zip(found, wanted, strict=False)):
        if words := _difference(one, other):
            words = f"segment {number}: {words}"
            return Outcome(
                kind=kind, name=name, is_equal=False, logprob_error=error, difference=words
            )
        if one.avg_logprob is not None and other.avg_logprob is not None:
            error = max(error, abs(one.avg_logprob - other.avg_logprob))
    words = ""
    if len(found) != len(wanted):
        words = f"{len(found)} segments instead of {len(wanted)}"
    elif error > TOLERANCE:
        words = f"log-probabilities differ by {error:.2g}"
    return Outcome(kind=kind, name=name, is_equal=not words, logprob_error=error, difference=words)


def _difference(one: Part, other: Part) -> str:
    """Return how two segments differ, "" if equal; log-probabilities are not compared here."""
    times = np.allclose((one.start, one.end), (other.start, other.end), atol=1e-6)
    if one.token_ids != other.token_ids or not times:
        return f"{one} instead of {other}"
    if one.words is None or other.words is None:
        return ""
    for found, wanted in itertools.zip_longest(one.words, other.words):
        if found != wanted:
            return f"the word {found} instead of {wanted}"
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
        """Return the segments as ``parts``, and their words."""
        config = self._model.config
        usual = config._attn_implementation
        try:  # it changes the attention of the model, for good
            segments = self._segments(samples, language, return_token_timestamps=True, **options)
        finally:
            config._attn_implementation = usual
        found, before = [], 0.0
        for each in segments:
            words = self._words(each, before, language)
            found.append(replace(self._part(each, options["temperature"]), words=words))
            before = float(each["token_timestamps"][-1])
        return found

    def _words(self, segment: dict[str, Any], before: float, language: str | None) -> Words:
        """Return the words of a segment; a token begins where the one before it ends."""
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
        if options.get("return_token_timestamps"):  # of the sound, not of what fills its window
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
        """Return the mean log-probability of a segment's window, None of one that was sampled."""
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
        """``have_words``: words and their times are compared too."""
        self._have_words = have_words
        self._reference = Reference(checkpoint, num_threads)
        self._pipe = Pipeline.from_bundle(bundle, num_threads=num_threads)
        self._files = files

    def close(self) -> None:
        """Release the engines."""
        self._pipe.close()

    def all(self) -> Iterator[tuple[str, str, Callable[[], Outcome]]]:
        """Yield kind and name of every case, and what runs it; the long files last."""
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
            found = self._parts(samples, language, **options, **PLAIN)
            wanted = self._reference.parts(samples, language, temperature=0.0, **options)
            return compared(kind, name, _begun(found, samples), wanted)

        return kind, name, run

    def _of_transformers_words(
        self, what: str, spoken: Spoken, num_beams: int
    ) -> tuple[str, str, Callable[[], Outcome]]:
        kind = f"{what}, {_beams(num_beams)}, times of words"
        name = spoken.utterance.name

        def run() -> Outcome:
            samples, language = read_samples(str(spoken.path)), spoken.utterance.language
            found = self._parts(
                samples, language, num_beams=num_beams, return_timestamps="word", **PLAIN
            )
            options = {"num_beams": num_beams, "return_timestamps": True, "temperature": 0.0}
            wanted = self._reference.parts_with_words(samples, language, **options)
            return compared(kind, name, _begun(found, samples), wanted)

        return kind, name, run

    def _with_fallback(
        self, name: str, samples: Samples, num_beams: int
    ) -> tuple[str, str, Callable[[], Outcome]]:
        kind = f"sounds with fallback, {_beams(num_beams)}"

        def run() -> Outcome:
            options = {"num_beams": num_beams, "return_timestamps": True, **FALLBACK}
            found = _begun(self._parts(samples, "en", **options), samples)
            return compared(kind, name, found, self._reference.parts(samples, "en", **options))

        return kind, name, run

    def _parts(self, samples: Samples, language: str, **options: Any) -> list[Part]:
        found = self._pipe.transcribe(samples, language=language, **options)
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
            for each in found.segments
        ]


def _begun(parts: Sequence[Part], samples: Samples) -> list[Part]:
    """Return the segments that begin before the end of the audio, as those of ``Reference``."""
    return [each for each in parts if each.start < len(samples) / SAMPLING_RATE]


def _beams(num_beams: int) -> str:
    return "greedy" if num_beams == 1 else f"{num_beams} beams"


def outcomes(
    cases: Cases, kept: Path, seconds: float, report: Callable[[str], None]
) -> list[Outcome]:
    """Return the outcomes of all cases, those included that a file has from earlier calls.

    kept: JSON lines, to which every new outcome is added at once. seconds: no case begins later.
    """
    known: dict[tuple[str, str], Outcome] = {}
    if kept.exists():
        lines = kept.read_text(encoding="utf-8").splitlines()
        known = {(each.kind, each.name): each for each in (Outcome(**json.loads(x)) for x in lines)}
    until = time.monotonic() + seconds
    found = []
    for kind, name, run in cases.all():
        outcome = known.get((kind, name))
        if outcome is None:
            if time.monotonic() > until:
                continue
            outcome = run()
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(vars(outcome)) + "\n")
        if not outcome.is_equal:
            report(f"{kind}, {name}: {outcome.difference}")
        found.append(outcome)
    return found


def equality_table(found: Sequence[Outcome]) -> list[str]:
    """Return the lines of a table: equal cases of each kind."""
    rows = []
    for kind in dict.fromkeys(each.kind for each in found):
        of_kind = [each for each in found if each.kind == kind]
        num_equal = sum(each.is_equal for each in of_kind)
        error = max(each.logprob_error for each in of_kind)
        rows.append((kind, f"{num_equal}/{len(of_kind)}", f"{error:.1e}"))
    return table(("what", "equal", "log-probability off by, at most"), rows)
