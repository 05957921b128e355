"""Transcription of an audio, window by window, as transformers' Whisper does it.

A window is decoded by beams; if its text compresses too well or is improbable, it is sampled at
higher and higher temperatures until one is not, or skipped where nobody seems to speak. The times
in its text say where the next one begins. Each window is one or a few requests, which are yielded:
whoever runs the engines sends their results back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.forward import Source
from dsbd_ort.decoding import STRATEGIES, DecodeResult, DecodingConfig, DecodingRequest
from dsbd_ort.decoding.logits_processing.allowed_mass import AllowedMass
from dsbd_ort.decoding.request import DecodedSequence
from dsbd_ort.decoding.stats import DecodingStats, summed_stats
from dsbd_ort.model_defaults import DRAFTING
from dsbd_ort.sources import RequestInputs
from dsbd_ort.speech.hot_words import HotWords
from dsbd_ort.speech.languages import ENGLISH
from dsbd_ort.speech.log_mel import LogMel, Samples
from dsbd_ort.speech.segmentation import (
    WindowParts,
    compression_ratio,
    parts_of_window,
    without_second_end,
)
from dsbd_ort.speech.speech_request import SpeechRequest
from dsbd_ort.speech.transcript import TASKS, Alternative, Segment, SpokenWord, Transcript
from dsbd_ort.speech.words import Align, TokenTimes, token_times, words_of_segment
from dsbd_runtime.speech_entry import SoundFeatures, SpeechEntry
from dsbd_runtime.tokenizer import Tokenizer

_LOW_TEMPERATURE = 0.5  # below it a text is good enough to be told to the next window
_OF_BEAMS = ("strategy", "num_beams", "early_stopping", "draft_beams")

Steps = Generator[DecodingRequest, DecodeResult, Transcript]
"""Yields requests, is sent their results, and returns the transcript."""


class SpeechPipeline(Protocol):
    """What a transcription needs of a pipeline."""

    tokenizer: Tokenizer

    @property
    def has_draft(self) -> bool:
        """Whether the bundle has a draft model."""

    def held_source(self, source: Source) -> AbstractContextManager[None]:
        """Let no engine read a window again between two of its requests."""

    def request_of(
        self,
        inputs: RequestInputs,
        options: Mapping[str, Any] | DecodingConfig,
        *,
        allowed_mass: AllowedMass | None = None,
    ) -> DecodingRequest:
        """Return a validated request."""


@dataclass(frozen=True)
class _Heard:
    """What the model says behind the start token: who speaks, if anybody.

    Attributes:
        no_speech_prob: the probability that nobody does.
        languages: the probability of each language, among them; empty of a model of English.
    """

    no_speech_prob: float
    languages: dict[str, float]


@dataclass(frozen=True)
class _Answer:
    """A window's text at one temperature.

    Attributes:
        sequence: the best one.
        token_ids: without the token that ends it.
        temperature, avg_logprob, compression_ratio: see ``Segment``.
    """

    sequence: DecodedSequence
    token_ids: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float

    def is_poor(self, request: SpeechRequest) -> bool:
        """Return whether the next temperature is tried."""
        most, least = request.compression_ratio_threshold, request.logprob_threshold
        return (most is not None and self.compression_ratio > most) or (
            least is not None and self.avg_logprob < least
        )

    def is_silence(self, request: SpeechRequest, no_speech_prob: float) -> bool:
        """Return whether nobody seems to speak: the text is improbable, and speech is too."""
        most, least = request.no_speech_threshold, request.logprob_threshold
        if most is None or least is None:
            return False
        return self.avg_logprob < least and no_speech_prob > most


class Transcription:
    """One audio on its way to a transcript."""

    def __init__(
        self,
        pipeline: SpeechPipeline,
        speech: SpeechEntry,
        start_token_id: int,
        samples: Samples,
        request: SpeechRequest,
    ) -> None:
        self._pipeline = pipeline
        self._speech = speech
        self._start = start_token_id
        self._request = request
        self._windows = LogMel(speech).windows(samples)
        self._num_samples = len(samples)
        self._language = request.language
        self._language_probability: float | None = None
        self._segments: list[Segment] = []
        self._alternatives: list[Alternative] = []
        self._hot_words = None
        if request.hot_words and request.hot_word_gain:
            self._hot_words = HotWords(request.hot_words, request.hot_word_gain)
        self._said: list[tuple[int, ...]] = []  # the tokens of each segment so far
        self._prompt = request.prompt_ids
        self._stats: list[DecodingStats] = []
        self._conditions = request.condition_on_previous_text

    def steps(self, on_segment: Callable[[Segment], None] | None, align: Align) -> Steps:
        """Decode window after window; call ``on_segment`` with each segment once it is known.

        align: says how the model attends to a window, where words are to have times.
        """
        seek, num_frames = 0, self._windows.num_frames
        num_heard = -(-self._num_samples // self._speech.hop_length)  # the rest is padding
        while seek < min(num_frames, num_heard):
            part = min(num_frames - seek, self._speech.num_frames)
            source = SoundFeatures(self._windows.window(seek, self._speech.num_frames))
            before, times = self._previous(), None
            with self._pipeline.held_source(source):
                heard = yield from self._hear(source, before)
                answers = yield from self._answered(source, before, heard)
                answer = answers[0]
                is_silence = answer.is_silence(self._request, heard.no_speech_prob)
                if self._request.has_word_times and not is_silence:
                    num_sound = min(min(num_frames, num_heard) - seek, part)
                    times = self._times(source, before, answer, seek, num_sound, align)
            self._conditions = (
                self._request.condition_on_previous_text and answer.temperature < _LOW_TEMPERATURE
            )
            if is_silence:
                seek += part
                continue
            if self._request.num_return_sequences > 1:
                self._alternatives += [self._alternative(each, seek) for each in answers]
            found = parts_of_window(
                answer.token_ids, seek, part, self._speech, has_times=self._has_times
            )
            for segment in self._new_segments(found, seek, answer, heard, times):
                if on_segment is not None:
                    on_segment(segment)
            seek += found.num_frames
        return self._transcript()

    def _previous(self) -> list[int]:
        """Return what stands before the start token: the prompt, and what was said before."""
        most = self._request.most_previous
        said = [token for segment in self._said for token in segment]
        if self._conditions and (said or self._prompt):
            return [self._speech.previous_token_id, *[*self._prompt, *said][-most:]]
        if self._prompt:
            return [self._speech.previous_token_id, *self._prompt[-most:]]
        return []

    def _hear(
        self, source: SoundFeatures, before: list[int]
    ) -> Generator[DecodingRequest, DecodeResult, _Heard]:
        """Find out whether somebody speaks and, in the first window, in which language."""
        heard = yield from self._heard_behind(source, [*before, self._start])
        if self._language is None and self._speech.languages is not None:
            first = heard
            if before:  # a language is detected without what was said before
                first = yield from self._heard_behind(source, [self._start])
            self._language = max(first.languages, key=first.languages.__getitem__)
            self._language_probability = first.languages[self._language]
        return heard

    def _heard_behind(
        self, source: SoundFeatures, prompt_ids: list[int]
    ) -> Generator[DecodingRequest, DecodeResult, _Heard]:
        scores: list[NDArray[np.float64]] = []

        def listen(_: NDArray[np.int64], found: NDArray[np.float64]) -> NDArray[np.float64]:
            scores.append(found.copy())
            return found

        config = DecodingConfig(strategy="greedy", max_new_tokens=1, logits_processors=(listen,))
        request = self._pipeline.request_of(RequestInputs(prompt_ids, source), config)
        self._stats.append((yield request).stats)
        probs = _softmax(scores[0])
        languages = self._speech.languages or {}
        tokens = list(languages.values())
        shares = _softmax(scores[0][tokens]).tolist() if tokens else []
        no_speech_prob = float(probs[self._speech.no_speech_token_id])
        return _Heard(no_speech_prob, dict(zip(languages, shares, strict=True)))

    def _answered(
        self, source: SoundFeatures, before: list[int], heard: _Heard
    ) -> Generator[DecodingRequest, DecodeResult, list[_Answer]]:
        """Return a window's texts at the first temperature at which it is not poor, or the last.

        The best is the first; there are as many as are to be returned, or were sampled.
        """
        inputs = RequestInputs([*before, *self._first_tokens()], source)
        for temperature in self._request.temperature:
            answers = []
            for number in range(1 if temperature == 0.0 else self._request.best_of):
                mass, options = AllowedMass(), self._options_at(temperature)
                if options.get("seed") is not None:
                    options["seed"] = (options["seed"] + number) % 2**128
                request = self._pipeline.request_of(inputs, options, allowed_mass=mass)
                result = yield request
                self._stats.append(result.stats)
                answers += [
                    self._rated(sequence, request, mass, temperature)
                    for sequence in result.sequences
                ]
            if temperature > 0.0:  # the beams of a search are in their order
                answers.sort(key=lambda each: -each.avg_logprob)
            if not answers[0].is_poor(self._request) or answers[0].is_silence(
                self._request, heard.no_speech_prob
            ):
                break
        return answers[: self._request.num_return_sequences]

    def _first_tokens(self) -> list[int]:
        """Return what says which text is wanted: start, language, task, without times or with."""
        tokens = [self._start]
        if self._speech.languages is not None and self._speech.tasks is not None:
            assert self._language is not None  # detected before
            tokens += [self._speech.languages[self._language]]
            tokens += [self._speech.tasks[self._request.task]]
        return tokens if self._has_times else [*tokens, self._speech.no_timestamps_token_id]

    @property
    def _has_times(self) -> bool:
        """Whether texts have times: where wanted, and where they lead to the next window."""
        is_long = self._windows.num_frames > self._speech.num_frames
        return bool(self._request.return_timestamps) or is_long

    def _options_at(self, temperature: float) -> dict[str, Any]:
        """Return the options of a window's request: a search at 0, samples above."""
        speech = self._speech
        options: dict[str, Any] = {
            "suppress_tokens": speech.suppress_tokens,
            "begin_suppress_tokens": speech.begin_suppress_tokens,
            **self._request.options,
        }
        if self._has_times:
            options["no_timestamps_token_id"] = speech.no_timestamps_token_id
            options["max_initial_timestamp_index"] = speech.max_initial_timestamp_index
            options["last_timestamp_token_id"] = speech.last_timestamp
        if self._hot_words is not None:
            given = options.get("logits_processors") or ()
            options["logits_processors"] = (*given, self._hot_words)
        if temperature == 0.0:
            wanted = self._request.num_return_sequences
            more: dict[str, Any] = {"num_return_sequences": wanted} if wanted > 1 else {}
            strategy = options.get("strategy")
            if isinstance(strategy, str) and strategy in STRATEGIES:
                if STRATEGIES[strategy].rule == "sample":  # refused with a sentence at 0
                    more["temperature"] = temperature
            return {**options, "num_beams": self._request.num_beams, **more}
        drafts = self._pipeline.has_draft or any(options.get(name) for name in DRAFTING)
        left_out = _OF_BEAMS if drafts else (*_OF_BEAMS, *DRAFTING)
        kept = {name: value for name, value in options.items() if name not in left_out}
        sampled = "speculative" if drafts else "sample"
        return {**kept, "strategy": sampled, "temperature": temperature}

    def _rated(
        self,
        sequence: DecodedSequence,
        request: DecodingRequest,
        mass: AllowedMass,
        temperature: float,
    ) -> _Answer:
        """Return a window's text with what tells whether it is a good one.

        Its probability is that among the tokens which the rules leave, as transformers has it.
        """
        token_ids, config = tuple(sequence.token_ids), request.config
        logprob = sequence.logprob
        if config.row.rule == "search":  # as processors have it
            logprob = sequence.score * len(token_ids) ** config.length_penalty
        elif self._hot_words is not None:
            logprob += self._hot_words.gained(request.prompt_ids, token_ids)
        logprob -= float(mass.before(token_ids).sum())
        ratio = compression_ratio(token_ids, self._request.vocab_size)
        has_ended = token_ids[-1] in config.eos_ids
        return _Answer(
            sequence,
            token_ids[:-1] if has_ended else token_ids,
            temperature,
            logprob / len(token_ids),
            ratio,
        )

    def _alternative(self, answer: _Answer, seek: int) -> Alternative:
        return Alternative(
            seek=seek,
            text=self._text(answer.token_ids),
            token_ids=answer.token_ids,
            temperature=answer.temperature,
            avg_logprob=answer.avg_logprob,
            compression_ratio=answer.compression_ratio,
        )

    def _times(
        self,
        source: SoundFeatures,
        before: list[int],
        answer: _Answer,
        seek: int,
        num_frames: int,
        align: Align,
    ) -> TokenTimes:
        """Return when the tokens of a window are said; ``num_frames`` of it are sound."""
        new = answer.sequence.token_ids
        aligned = align(source, [*before, *self._first_tokens()], new)
        return token_times(aligned, new, seek, num_frames, self._speech, self._start)

    def _words(
        self, token_ids: tuple[int, ...], first: int, times: TokenTimes
    ) -> tuple[SpokenWord, ...]:
        """Return the words of a segment, whose first token is so far in its window."""
        language = self._language if self._request.task == TASKS[0] else ENGLISH
        tokenizer = self._pipeline.tokenizer
        return words_of_segment(token_ids, times, first, language, self._speech, tokenizer)

    def _new_segments(
        self,
        found: WindowParts,
        seek: int,
        answer: _Answer,
        heard: _Heard,
        times: TokenTimes | None,
    ) -> Iterator[Segment]:
        """Yield the segments of a window, and keep them."""
        first = 0  # segments follow each other without a gap
        for part in found.parts:
            segment = Segment(
                id=len(self._segments),
                seek=seek,
                start=part.start,
                end=part.end,
                text=self._text(part.token_ids),
                token_ids=part.token_ids,
                temperature=answer.temperature,
                avg_logprob=answer.avg_logprob,
                compression_ratio=answer.compression_ratio,
                no_speech_prob=heard.no_speech_prob,
                words=None if times is None else self._words(part.token_ids, first, times),
            )
            first += len(part.token_ids)
            self._segments.append(segment)
            self._said.append(without_second_end(part.token_ids, self._speech))
            yield segment

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._pipeline.tokenizer.decode(token_ids)

    def _transcript(self) -> Transcript:
        tokens = [token for segment in self._segments for token in segment.token_ids]
        return Transcript(
            text=self._text(tokens).strip(),
            language=self._language,
            language_probability=self._language_probability,
            task=self._request.task,
            duration=self._num_samples / self._speech.sampling_rate,
            segments=tuple(self._segments),
            stats=summed_stats(self._stats),
            alternatives=tuple(self._alternatives),
        )


def answered(steps: Steps, decoded: Callable[[DecodingRequest], DecodeResult]) -> Transcript:
    """Return the transcript of steps whose requests are decoded one after another."""
    with contextlib.closing(steps):  # what they hold is let go with an error of ``decoded`` too
        request = next(steps)  # an audio has one window at least
        while True:
            try:
                request = steps.send(decoded(request))
            except StopIteration as end:
                transcript: Transcript = end.value
                return transcript


def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    exponentials = np.exp(scores - scores.max())
    return np.asarray(exponentials / exponentials.sum())
