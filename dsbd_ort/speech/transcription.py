"""Transcription of an audio, window by window, as transformers' Whisper does it.

A window is decoded by beam search. If its text compresses too well or is improbable, it is sampled
at increasing temperatures until the text is good, or skipped as silence. The times in its text set
the start of the next window. Each window takes one or a few requests, which are yielded
(independent ones together); the caller runs them and sends the results back.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding import DecodeResult, DecodingConfig
from dsbd_ort.decoding.stats import summed_stats
from dsbd_ort.prompts import RequestInputs
from dsbd_ort.speech.languages import ENGLISH
from dsbd_ort.speech.log_mel import LogMel, MelForm, Samples
from dsbd_ort.speech.segmentation import WindowParts, parts_of_window, without_second_end
from dsbd_ort.speech.speech_request import SpeechRequest
from dsbd_ort.speech.transcript import TASKS, Alternative, Segment, Skipped, SpokenWord, Transcript
from dsbd_ort.speech.window_texts import Requests, SpeechPipeline, WindowText, WindowTexts
from dsbd_ort.speech.words import Align, TokenTimes, token_times, words_of_segment
from dsbd_runtime.parts.speech_entry import SoundFeatures, SpeechEntry

_LOW_TEMPERATURE = 0.5  # below it a text is good enough as a prompt of the next window

Steps = Generator[Requests, list[DecodeResult], Transcript]
"""Yields requests, is sent their results, and returns the transcript."""


@dataclass(frozen=True)
class _Heard:
    """Probabilities after the start token: of silence, and of each language among all."""

    no_speech_prob: float
    languages: dict[str, float]


class Transcription:
    """Transcription of one audio by a kind of model: what its windows have given so far."""

    def __init__(
        self,
        pipeline: SpeechPipeline,
        request: SpeechRequest,
        duration: float,
        options: Mapping[str, Any],
    ) -> None:
        """``duration``: seconds; ``options``: of every request, unless ``request`` has others."""
        self._pipeline = pipeline
        self._request = request
        self._duration = duration
        self._language = request.language
        self._language_probability: float | None = None
        self._segments: list[Segment] = []
        self._alternatives: list[Alternative] = []
        self._skipped: list[Skipped] = []
        self._texts = WindowTexts(pipeline, request, options)

    def steps(self, on_segment: Callable[[Segment], None] | None, align: Align) -> Steps:
        """Decode one window after another; call ``on_segment`` with each finished segment."""
        raise NotImplementedError

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._pipeline.tokenizer.decode(token_ids)

    def _alternative(self, answer: WindowText, seek: int) -> Alternative:
        return Alternative(
            seek=seek,
            text=self._text(answer.token_ids),
            token_ids=answer.token_ids,
            temperature=answer.temperature,
            avg_logprob=answer.avg_logprob,
            compression_ratio=answer.compression_ratio,
        )

    def _transcript(self, text: str) -> Transcript:
        return Transcript(
            text=text.strip(),
            language=self._language,
            language_probability=self._language_probability,
            task=self._request.task,
            duration=self._duration,
            segments=tuple(self._segments),
            stats=summed_stats(self._texts.stats),
            alternatives=tuple(self._alternatives),
            skipped=tuple(self._skipped),
        )


class WhisperTranscription(Transcription):
    """Transcription of one audio by an encoder-decoder."""

    def __init__(
        self,
        pipeline: SpeechPipeline,
        speech: SpeechEntry,
        start_token_id: int,
        samples: Samples,
        request: SpeechRequest,
    ) -> None:
        self._speech = speech
        self._start = start_token_id
        self._windows = LogMel(MelForm.of_windows(speech)).windows(samples)
        self._num_samples = len(samples)
        # whether texts have times: if requested, or to find the next window
        is_long = self._windows.num_frames > speech.num_frames
        self._has_times = bool(request.return_timestamps) or is_long
        options = _options(speech, has_times=self._has_times)
        super().__init__(pipeline, request, len(samples) / speech.sampling_rate, options)
        self._said: list[tuple[int, ...]] = []  # the tokens of each segment so far
        self._prompt = request.prompt_ids
        self._conditions = request.condition_on_previous_text

    def steps(self, on_segment: Callable[[Segment], None] | None, align: Align) -> Steps:
        """See the base."""
        seek, num_frames = 0, self._windows.num_frames
        num_heard = -(-self._num_samples // self._speech.hop_length)  # the rest is padding
        while seek < min(num_frames, num_heard):
            part = min(num_frames - seek, self._speech.num_frames)
            source = SoundFeatures(self._windows.window(seek, self._speech.num_frames))
            before, times = self._previous(), None
            with self._pipeline.held_source(source):
                heard = yield from self._hear(source, before)
                inputs = RequestInputs([*before, *self._first_tokens()], source)
                answers = yield from self._texts.answers(inputs, heard.no_speech_prob)
                answer = answers[0]
                is_silence = answer.is_silence(self._request, heard.no_speech_prob)
                if self._request.has_word_times and not is_silence:
                    num_sound = min(min(num_frames, num_heard) - seek, part)
                    times = self._times(source, before, answer, seek, num_sound, align)
            self._conditions = (
                self._request.condition_on_previous_text and answer.temperature < _LOW_TEMPERATURE
            )
            if is_silence:
                self._skipped.append(self._skipped_window(answer, seek, part, heard))
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
        tokens = [token for segment in self._segments for token in segment.token_ids]
        return self._transcript(self._text(tokens))

    def _previous(self) -> list[int]:
        most = self._request.most_previous
        said = [token for segment in self._said for token in segment]
        if self._conditions and (said or self._prompt):
            return [self._speech.previous_token_id, *[*self._prompt, *said][-most:]]
        if self._prompt:
            return [self._speech.previous_token_id, *self._prompt[-most:]]
        return []

    def _hear(
        self, source: SoundFeatures, before: list[int]
    ) -> Generator[Requests, list[DecodeResult], _Heard]:
        heard = yield from self._heard_after(source, [*before, self._start])
        if self._language is None and self._speech.languages is not None:
            first = heard
            if before:  # languages are detected without the text before
                first = yield from self._heard_after(source, [self._start])
            self._language = max(first.languages, key=first.languages.__getitem__)
            self._language_probability = first.languages[self._language]
        return heard

    def _heard_after(
        self, source: SoundFeatures, prompt_ids: list[int]
    ) -> Generator[Requests, list[DecodeResult], _Heard]:
        scores: list[NDArray[np.float64]] = []

        def listen(_: NDArray[np.int64], found: NDArray[np.float64]) -> NDArray[np.float64]:
            scores.append(found.copy())
            return found

        config = DecodingConfig(strategy="greedy", max_new_tokens=1, logits_processors=(listen,))
        request = self._pipeline.request_of(RequestInputs(prompt_ids, source), config)
        (result,) = yield [request]
        self._texts.stats.append(result.stats)
        probs = _softmax(scores[0])
        languages = self._speech.languages or {}
        tokens = list(languages.values())
        shares = _softmax(scores[0][tokens]).tolist() if tokens else []
        no_speech_prob = float(probs[self._speech.no_speech_token_id])
        return _Heard(no_speech_prob, dict(zip(languages, shares, strict=True)))

    def _first_tokens(self) -> list[int]:
        """Return the tokens that select the text: start, language, task, with or without times."""
        tokens = [self._start]
        if self._speech.languages is not None and self._speech.tasks is not None:
            assert self._language is not None  # detected before
            tokens += [self._speech.languages[self._language]]
            tokens += [self._speech.tasks[self._request.task]]
        return tokens if self._has_times else [*tokens, self._speech.no_timestamps_token_id]

    def _skipped_window(self, answer: WindowText, seek: int, part: int, heard: _Heard) -> Skipped:
        seconds = self._speech.seconds_per_frame
        return Skipped(
            seek=seek,
            start=seek * seconds,
            end=min((seek + part) * seconds, self._duration),
            temperature=answer.temperature,
            avg_logprob=answer.avg_logprob,
            no_speech_prob=heard.no_speech_prob,
        )

    def _times(
        self,
        source: SoundFeatures,
        before: list[int],
        answer: WindowText,
        seek: int,
        num_frames: int,
        align: Align,
    ) -> TokenTimes:
        """Return the times of the tokens of a window; ``num_frames`` of it are sound."""
        new = answer.sequence.token_ids
        aligned = align(source, [*before, *self._first_tokens()], new)
        return token_times(aligned, new, seek, num_frames, self._speech, self._start)

    def _words(
        self, token_ids: tuple[int, ...], first: int, times: TokenTimes
    ) -> tuple[SpokenWord, ...]:
        language = self._language if self._request.task == TASKS[0] else ENGLISH
        tokenizer = self._pipeline.tokenizer
        return words_of_segment(token_ids, times, first, language, self._speech, tokenizer)

    def _new_segments(
        self,
        found: WindowParts,
        seek: int,
        answer: WindowText,
        heard: _Heard,
        times: TokenTimes | None,
    ) -> Iterator[Segment]:
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


def _options(speech: SpeechEntry, *, has_times: bool) -> dict[str, Any]:
    """Return the options of every request for a window's text."""
    options: dict[str, Any] = {
        "suppress_tokens": speech.suppress_tokens,
        "begin_suppress_tokens": speech.begin_suppress_tokens,
    }
    if has_times:
        options["no_timestamps_token_id"] = speech.no_timestamps_token_id
        options["max_initial_timestamp_index"] = speech.max_initial_timestamp_index
        options["last_timestamp_token_id"] = speech.last_timestamp
    return options


def answered(steps: Steps, decoded: Callable[[Requests], list[DecodeResult]]) -> Transcript:
    """Return the transcript of steps; ``decoded`` runs their requests."""
    with contextlib.closing(steps):  # releases the source after an error of ``decoded`` too
        try:
            requests = next(steps)
            while True:
                requests = steps.send(decoded(requests))
        except StopIteration as end:
            transcript: Transcript = end.value
            return transcript


def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    exponentials = np.exp(scores - scores.max())
    return np.asarray(exponentials / exponentials.sum())
