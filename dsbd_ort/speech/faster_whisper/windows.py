"""Windows decoded by the rules of faster-whisper that differ from those of transformers.

The text before a window begins with the hot words, and does not reach back beyond a window with a
high temperature. A token's probability is normalized over the allowed tokens, and the length of a
text excludes its end token. If the texts at all temperatures are poor, the most probable one is
used. With times of words, the next window begins after the last word. After the end of the audio,
features are zeros.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, compress, islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.audio.log_mel import FeatureWindows, LogMel, MelForm, Samples
from dsbd_ort.decoding import DecodeResult
from dsbd_ort.pipeline import Pipeline
from dsbd_ort.requests.prompts import RequestInputs
from dsbd_ort.speech.faster_whisper.records import TranscriptionOptions
from dsbd_ort.speech.speech_request import SpeechRequest
from dsbd_ort.speech.transcribing import align_of
from dsbd_ort.speech.transcript import Segment
from dsbd_ort.speech.transcription import OnSegment, answered
from dsbd_ort.speech.whisper.whisper_transcription import WhisperTranscription, Window, text_options
from dsbd_ort.speech.window_texts import Answers, Requests, WindowText, WindowTexts
from dsbd_ort.speech.words import Align, TokenTimes
from dsbd_runtime.parts.source.encoder_entry import EncoderEntry
from dsbd_runtime.parts.source.speech_entry import SoundFeatures

_PADDING = 160  # zeros after the samples

T = TypeVar("T")
Steps = Generator[Requests, Any, Any]
Language = tuple[str, float, list[tuple[str, float]] | None]
"""A language, its probability, and the probabilities of all languages, highest first (or None)."""


class RankedTexts(WindowTexts):
    """Decodes texts of windows; each text begins with the tokens ``begun``."""

    begun: Sequence[int] = ()

    def answers(self, inputs: RequestInputs, no_speech_prob: float) -> Answers:
        """Return the first good text, in order of temperatures, or else the most probable text."""
        request, texts = self.speech_request, list[WindowText]()
        for temperature in request.temperature:
            samples = yield from self._sampled(inputs, temperature, may_give_up=False)
            best = max((each for sample in samples for each in sample.answers), key=self._score)
            content = self._pipeline.tokenizer.decode(best.token_ids).strip().encode()
            ratio = len(content) / len(zlib.compress(content))
            texts.append(replace(best, compression_ratio=ratio))
            if not texts[-1].is_poor(request) or texts[-1].is_silence(request, no_speech_prob):
                return texts[-1:]
        max_ratio = request.compression_ratio_threshold
        rare = [each for each in texts if max_ratio is None or each.compression_ratio <= max_ratio]
        best = max(rare or texts, key=lambda each: each.avg_logprob)
        return [replace(best, temperature=texts[-1].temperature)]

    def is_silence(self, text: WindowText, no_speech_prob: float) -> bool:
        """See the base; without ``logprob_threshold`` every text counts as improbable."""
        max_no_speech, min_logprob = (
            self.speech_request.no_speech_threshold,
            self.speech_request.logprob_threshold,
        )
        is_probable = min_logprob is not None and text.avg_logprob > min_logprob
        return max_no_speech is not None and no_speech_prob > max_no_speech and not is_probable

    def _score(self, text: WindowText) -> float:
        num_tokens = len(text.token_ids)  # without the end token; avg_logprob includes it
        logprob = text.avg_logprob * (num_tokens + 1)
        penalty: float = self.speech_request.options["length_penalty"]
        return logprob / float(max(num_tokens, 1) ** penalty)

    def _options_at(self, temperature: float, num_prompt: int) -> dict[str, Any]:
        is_search = temperature == 0.0 and self.speech_request.num_beams > 1
        changed = [
            *([partial(_begin, num_prompt, self.begun)] if self.begun else []),
            *([_among_allowed] if is_search else []),
        ]
        half = self.speech_request.most_previous + 1  # half of the model's context
        options = {"max_new_tokens": min(half, 2 * half - num_prompt)}
        options |= super()._options_at(temperature, num_prompt)
        return {**options, "logits_processors": tuple(changed)}


class RankedTranscription(WhisperTranscription):
    """Transcription of one audio by ``RankedTexts``.

    is_one_window: whether only the first window is decoded.
    """

    _texts: RankedTexts

    def __init__(
        self,
        pipeline: OpenedPipeline,
        encoder: EncoderEntry,
        samples: Samples,
        request: SpeechRequest,
        asked: TranscriptionOptions,
        is_one_window: bool,
    ) -> None:
        speech = encoder.speech
        assert speech is not None  # ``WhisperModel`` has checked it
        super().__init__(pipeline, speech, encoder.start_token_id, samples, request)
        self._num_frames = len(samples) // speech.hop_length
        self._has_times = not asked.without_timestamps
        options = text_options(speech, has_times=self._has_times)
        if self._has_times:
            a_time = speech.chunk_seconds / speech.num_positions
            options["max_initial_timestamp_index"] = round(asked.max_initial_timestamp / a_time)
        self._texts = RankedTexts(pipeline, request, options)
        self._asked, self._is_one_window = asked, is_one_window
        given = asked.initial_prompt
        self._said = [tuple(self._encoded(given) if isinstance(given, str) else given or ())]

    def detection(
        self, num_windows: int, threshold: float
    ) -> Generator[Requests, list[DecodeResult], Language]:
        """Return the language of the first ``num_windows`` windows.

        It is the language of the first window whose probability is above ``threshold``, or else the
        language of the most windows.
        """
        begin = min(self._spans()[0][0], max(self._num_frames - 1, 0))
        end = max(self._num_frames, 1)
        votes: dict[str, list[float]] = {}
        ranked: list[tuple[str, float]] = []
        for seek in range(begin, end, self._speech.num_frames)[:num_windows]:
            heard = yield from self._heard_after(self._window(seek, end).source, [self._start])
            ranked = sorted(heard.languages.items(), key=lambda each: -each[1])
            language, probability = ranked[0]
            if probability > threshold:
                return language, probability, ranked
            votes.setdefault(language, []).append(probability)
        language = max(votes, key=lambda each: len(votes[each]))
        return language, max(votes[language]), ranked

    def _features_of(self, samples: Samples) -> FeatureWindows:
        return LogMel(MelForm.of(self._speech, 0)).windows(np.pad(samples, (0, _PADDING)))

    def _spans(self) -> list[tuple[int, int]]:
        given = "0" if self._is_one_window else self._asked.clip_timestamps
        seconds = given.split(",") if isinstance(given, str) else given or [0]
        frames = [round(float(each) / self._speech.seconds_per_frame) for each in seconds]
        frames += [self._num_frames] * (len(frames) % 2)
        pairs = zip(frames[::2], frames[1::2], strict=True)
        return [(begin, min(end, self._num_frames)) for begin, end in pairs]

    def _window(self, seek: int, end: int) -> Window:
        if self._asked.multilingual:
            self._language = None  # it is detected again
        begun = self._encoded(self._asked.prefix)[: self._request.most_previous]
        times = [self._speech.first_timestamp] if begun and self._has_times else []
        self._texts.begun = () if seek else (*times, *begun)
        size = min(end - seek, self._speech.num_frames)
        after = (0, 0), (0, self._speech.num_frames - size)
        source = SoundFeatures(np.pad(self._features.window(seek, size), after))
        return Window(seek, size, size, source, self._previous())

    def _decoded(
        self, window: Window, on_segment: OnSegment | None, align: Align
    ) -> Generator[Requests, list[DecodeResult], int]:
        num_before = len(self._segments)
        num_frames = yield from super()._decoded(window, on_segment, align)
        if self._is_one_window:
            return self._num_frames
        if not (new := self._segments[num_before:]):
            return num_frames
        seconds = self._speech.seconds_per_frame
        end = max((word.end for each in new for word in each.words or ()), default=0.0)
        ends_alone = [*map(self._speech.is_time, new[-1].token_ids[-2:])] == [False, True]
        if end > window.seek * seconds and not ends_alone:
            num_frames = round(end / seconds) - window.seek
        is_hot = new[-1].temperature > self._asked.prompt_reset_on_temperature
        if is_hot or not self._request.condition_on_previous_text:
            self._said.clear()
        return num_frames

    def _new_segments(self, *arguments: Any) -> Iterator[Segment]:
        for segment in super()._new_segments(*arguments):
            if words := segment.words:
                segment = replace(segment, start=words[0].start, end=words[-1].end)
            if segment.start == segment.end or not segment.text.strip():
                self._said.pop()
            else:
                yield segment

    def _times(self, window: Window, answer: WindowText, align: Align) -> TokenTimes:
        """See the base; the alignment reads neither timestamps nor the text before."""
        mark = self._speech.no_timestamps_token_id
        is_text = [token < self._start for token in answer.token_ids]
        prompt_ids = [token for token in self._first_tokens() if token != mark]
        read = [mark, *compress(answer.token_ids, is_text), mark]  # the last is not read
        times = self._aligned(window, prompt_ids, read, align)
        at = np.cumsum(is_text)  # times of timestamp tokens are never used
        return TokenTimes(times.start[at], times.end[at], times.probabilities[at])

    def _previous(self) -> list[int]:
        max_tokens = self._request.most_previous
        hot = [] if self._texts.begun else self._encoded(self._asked.hotwords)[:max_tokens]
        said = [token for segment in self._said for token in segment][-max_tokens:]
        return [self._speech.previous_token_id, *hot, *said] if hot or said else []

    def _encoded(self, text: str | None) -> list[int]:
        tokenizer = self._pipeline.tokenizer
        return tokenizer.encode(f" {text.strip()}", add_special_tokens=False) if text else []


class OpenedPipeline(Pipeline):
    """A pipeline that decodes several transcriptions together, only as far as they are read."""

    def rounds(
        self, transcriptions: Sequence[RankedTranscription]
    ) -> Iterator[list[list[Segment]]]:
        """Yield the new segments of each audio after each round of shared engine calls."""
        new_segments: list[list[Segment]] = [[] for _ in transcriptions]
        with contextlib.ExitStack() as stack:
            sent: dict[Steps, Any] = {}  # the results to send to each generator, at first None
            for transcription, segments in zip(transcriptions, new_segments, strict=True):
                steps = transcription.steps(segments.append, align_of(self))
                sent[stack.enter_context(contextlib.closing(steps))] = None
            while sent:
                requests: dict[Steps, Requests] = {}
                for steps, results in sent.items():
                    with contextlib.suppress(StopIteration):
                        requests[steps] = steps.send(results)
                yield [segments.copy() for segments in new_segments]
                for segments in new_segments:
                    segments.clear()
                together = [*chain.from_iterable(requests.values())]
                decoded = iter(self.models.decoded(together) if together else ())
                sent = {steps: [*islice(decoded, len(each))] for steps, each in requests.items()}

    def result(self, steps: Generator[Requests, list[DecodeResult], T]) -> T:
        """Return the result of steps."""
        return answered(steps, self.models.decoded)


def _begin(
    num_prompt: int, begun: Sequence[int], path: NDArray[np.int64], scores: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Allow only the next token of ``begun`` while the text has not repeated all of them."""
    place = len(path) - num_prompt
    if place >= len(begun):
        return scores
    only = np.full_like(scores, -np.inf)
    only[begun[place]] = 0.0
    return only


def _among_allowed(_: NDArray[np.int64], scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log-probabilities normalized over allowed tokens; CTranslate2 ranks beams by them."""
    largest = scores.max()
    return np.asarray(scores - (largest + np.log(np.exp(scores - largest).sum())))
