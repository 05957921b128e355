"""Transcription of an audio, window by window, as transformers' Whisper does it.

A window is decoded by beam search. If its text compresses too well or is improbable, it is sampled
at increasing temperatures until the text is good, or skipped as silence. The times in its text set
the start of the next window. Each window takes a few requests, which are yielded (independent ones
together); the caller runs them and sends the results back.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.audio.log_mel import FeatureWindows, LogMel, MelForm, Samples
from dsbd_ort.decoding import DecodeResult, DecodingConfig
from dsbd_ort.requests.prompts import RequestInputs
from dsbd_ort.speech.languages import ENGLISH
from dsbd_ort.speech.speech_request import SpeechRequest
from dsbd_ort.speech.transcript import TASKS, Segment, Skipped, SpokenWord
from dsbd_ort.speech.transcription import OnSegment, Steps, Transcription
from dsbd_ort.speech.whisper.segmentation import WindowParts, parts_of_window, without_second_end
from dsbd_ort.speech.window_texts import Requests, SpeechPipeline, WindowText
from dsbd_ort.speech.words import Align, TokenTimes, token_times, words_of_segment
from dsbd_runtime.parts.source.speech_entry import SoundFeatures, SpeechEntry

_LOW_TEMPERATURE = 0.5  # below this, a text is good enough to prompt the next window


@dataclass(frozen=True)
class _Heard:
    """Probability of silence after the start token, and of each language, normalized over all."""

    no_speech_prob: float
    languages: dict[str, float]


@dataclass(frozen=True)
class Window:
    """A part of an audio that the encoder reads at once.

    Attributes:
        seek: its first feature frame.
        num_frames, num_sound: number of its frames within the features, and within the audio.
        before: the tokens of the text before it.
    """

    seek: int
    num_frames: int
    num_sound: int
    source: SoundFeatures
    before: list[int]


class WhisperTranscription(Transcription):
    """Transcription of one audio by an encoder-decoder; subclasses may change the rules."""

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
        self._features = self._features_of(samples)
        self._num_samples = len(samples)
        # whether texts have times: if requested, or to find the next window
        is_long = self._features.num_frames > speech.num_frames
        self._has_times = bool(request.return_timestamps) or is_long
        options = text_options(speech, has_times=self._has_times)
        super().__init__(pipeline, request, len(samples) / speech.sampling_rate, options)
        self._said: list[tuple[int, ...]] = []  # the tokens of each segment so far
        self._conditions = request.condition_on_previous_text

    def steps(self, on_segment: OnSegment | None, align: Align) -> Steps:
        """See the base."""
        for seek, end in self._spans():
            while seek < end:
                window = self._window(seek, end)
                seek += yield from self._decoded(window, on_segment, align)
        tokens = [token for segment in self._segments for token in segment.token_ids]
        return self._transcript(self._text(tokens))

    def _features_of(self, samples: Samples) -> FeatureWindows:
        return LogMel(MelForm.of_windows(self._speech)).windows(samples)

    def _spans(self) -> list[tuple[int, int]]:
        """Return the parts to decode, each as its first frame and the frame after its last."""
        num_heard = -(-self._num_samples // self._speech.hop_length)  # the rest is padding
        return [(0, min(self._features.num_frames, num_heard))]

    def _window(self, seek: int, end: int) -> Window:
        window_frames = self._speech.num_frames
        num_frames, num_sound = (
            min(self._features.num_frames - seek, window_frames),
            min(end - seek, window_frames),
        )
        source = SoundFeatures(self._features.window(seek, window_frames))
        return Window(seek, num_frames, num_sound, source, self._previous())

    def _decoded(
        self, window: Window, on_segment: OnSegment | None, align: Align
    ) -> Generator[Requests, list[DecodeResult], int]:
        """Decode a window; return the number of frames from it to the next one."""
        times = None
        with self._pipeline.models.held_source(window.source):
            heard = yield from self._hear(window)
            inputs = RequestInputs([*window.before, *self._first_tokens()], window.source)
            answers = yield from self._texts.answers(inputs, heard.no_speech_prob)
            answer = answers[0]
            is_silence = self._texts.is_silence(answer, heard.no_speech_prob)
            if self._request.has_word_times and not is_silence:
                times = self._times(window, answer, align)
        self._conditions = (
            self._request.condition_on_previous_text and answer.temperature < _LOW_TEMPERATURE
        )
        if is_silence:
            self._skipped.append(self._skipped_window(window, answer, heard))
            return window.num_frames
        if self._request.num_return_sequences > 1:
            self._alternatives += [self._alternative(each, window.seek) for each in answers]
        parts = parts_of_window(
            answer.token_ids,
            window.seek,
            window.num_frames,
            self._speech,
            has_times=self._has_times,
        )
        for segment in self._new_segments(parts, window, answer, heard, times):
            if on_segment is not None:
                on_segment(segment)
        return parts.num_frames

    def _previous(self) -> list[int]:
        said = [token for tokens in self._said for token in tokens] if self._conditions else []
        before = [*self._request.prompt_ids, *said][-self._request.most_previous :]
        return [self._speech.previous_token_id, *before] if before else []

    def _hear(self, window: Window) -> Generator[Requests, list[DecodeResult], _Heard]:
        heard = yield from self._heard_after(window.source, [*window.before, self._start])
        if self._language is None and self._speech.languages is not None:
            first = heard
            if window.before:  # languages are detected without the text before
                first = yield from self._heard_after(window.source, [self._start])
            self._language = max(first.languages, key=first.languages.__getitem__)
            self._language_probability = first.languages[self._language]
        return heard

    def _heard_after(
        self, source: SoundFeatures, prompt_ids: list[int]
    ) -> Generator[Requests, list[DecodeResult], _Heard]:
        scores: list[NDArray[np.float64]] = []

        def listen(_: NDArray[np.int64], next_scores: NDArray[np.float64]) -> NDArray[np.float64]:
            scores.append(next_scores.copy())
            return next_scores

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
        """Return the tokens before the text: start, language, task, and without times or not."""
        tokens = [self._start]
        if self._speech.languages is not None and self._speech.tasks is not None:
            assert self._language is not None  # detected before
            tokens += [self._speech.languages[self._language]]
            tokens += [self._speech.tasks[self._request.task]]
        return tokens if self._has_times else [*tokens, self._speech.no_timestamps_token_id]

    def _skipped_window(self, window: Window, answer: WindowText, heard: _Heard) -> Skipped:
        seconds = self._speech.seconds_per_frame
        return Skipped(
            seek=window.seek,
            start=window.seek * seconds,
            end=min((window.seek + window.num_frames) * seconds, self._duration),
            temperature=answer.temperature,
            avg_logprob=answer.avg_logprob,
            no_speech_prob=heard.no_speech_prob,
        )

    def _times(self, window: Window, answer: WindowText, align: Align) -> TokenTimes:
        """Return the times of the tokens of a window's text."""
        prompt_ids = [*window.before, *self._first_tokens()]
        return self._aligned(window, prompt_ids, answer.sequence.token_ids, align)

    def _aligned(
        self, window: Window, prompt_ids: Sequence[int], token_ids: Sequence[int], align: Align
    ) -> TokenTimes:
        aligned = align(window.source, prompt_ids, token_ids)
        sound = window.seek, window.num_sound
        return token_times(aligned, token_ids, *sound, self._speech, self._start)

    def _words(
        self, token_ids: tuple[int, ...], first: int, times: TokenTimes
    ) -> tuple[SpokenWord, ...]:
        language = self._language if self._request.task == TASKS[0] else ENGLISH
        tokenizer = self._pipeline.tokenizer
        return words_of_segment(token_ids, times, first, language, self._speech, tokenizer)

    def _new_segments(
        self,
        parts: WindowParts,
        window: Window,
        answer: WindowText,
        heard: _Heard,
        times: TokenTimes | None,
    ) -> Iterator[Segment]:
        first = 0  # segments follow each other without a gap
        for part in parts.parts:
            segment = Segment(
                id=len(self._segments),
                seek=window.seek,
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


def text_options(speech: SpeechEntry, *, has_times: bool) -> dict[str, Any]:
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


def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    exponentials = np.exp(scores - scores.max())
    return np.asarray(exponentials / exponentials.sum())
