"""Windows decoded by faster-whisper's rules, where they differ from transformers'.

The text before a window begins with the hot words, and ends where a temperature was high. A token's
probability is that among the allowed ones, and the length of a text is that without its end. If the
texts at all temperatures are poor, the most probable one is used. With times of words, the next
window begins after the last word. After the end of the audio, features are zeros.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding import DecodeResult
from dsbd_ort.pipeline import Pipeline
from dsbd_ort.prompts import RequestInputs
from dsbd_ort.speech.faster_whisper.records import TranscriptionOptions
from dsbd_ort.speech.log_mel import LogMel, MelForm, Samples
from dsbd_ort.speech.segmentation import parts_of_window
from dsbd_ort.speech.speech_request import SpeechRequest, read_task
from dsbd_ort.speech.transcript import Segment
from dsbd_ort.speech.transcription import WhisperTranscription, answered
from dsbd_ort.speech.window_texts import Answers, Requests, WindowText, WindowTexts
from dsbd_ort.speech.words import Align, TokenTimes, token_times
from dsbd_runtime.parts.encoder_entry import EncoderEntry
from dsbd_runtime.parts.speech_entry import SoundFeatures, SpeechEntry

_PADDING = 160  # zeros after the samples
_DEFAULT_TOKENS = -1  # in ``suppress_tokens``: those of the model

Steps = Generator[Requests, list[DecodeResult], Any]
OnSegment = Callable[[Segment], None]


class RankedTexts(WindowTexts):
    """Decodes texts of windows; thresholds are those of ``asked``.

    begun: the tokens that every text begins with.
    """

    begun: Sequence[int] = ()

    def __init__(self, *arguments: Any, asked: TranscriptionOptions, context_length: int) -> None:
        super().__init__(*arguments)
        self._asked, self._context_length = asked, context_length

    def answers(self, inputs: RequestInputs, no_speech_prob: float) -> Answers:
        """Return the text at the first temperature with a good one, or the most probable one."""
        asked, texts, rare = self._asked, list[WindowText](), list[WindowText]()
        self._options = self._options_after(len(inputs.prompt_ids))
        for temperature in asked.temperatures:
            samples = yield from self._sampled(inputs, temperature, may_give_up=False)
            best = max((each for sample in samples for each in sample.answers), key=self._score)
            content = self._pipeline.tokenizer.decode(best.token_ids).strip().encode()
            ratio = len(content) / len(zlib.compress(content))
            texts.append(replace(best, compression_ratio=ratio))
            most, least = asked.compression_ratio_threshold, asked.log_prob_threshold
            repeats = most is not None and ratio > most
            is_improbable = least is not None and best.avg_logprob < least
            if not repeats:
                rare.append(texts[-1])
            is_silence = is_improbable and self._may_be_silence(no_speech_prob)
            if is_silence or not (repeats or is_improbable):
                return texts[-1:]
        best = max(rare or texts, key=lambda each: each.avg_logprob)
        return [replace(best, temperature=texts[-1].temperature)]

    def is_silence(self, text: WindowText, no_speech_prob: float) -> bool:
        """Return whether a window with this text is skipped."""
        least = self._asked.log_prob_threshold
        is_probable = least is not None and text.avg_logprob > least
        return self._may_be_silence(no_speech_prob) and not is_probable

    def _may_be_silence(self, no_speech_prob: float) -> bool:
        most = self._asked.no_speech_threshold
        return most is not None and no_speech_prob > most

    def _score(self, text: WindowText) -> float:
        num_tokens = len(text.token_ids)  # without the end, unlike here
        logprob = text.avg_logprob * (num_tokens + 1)
        return float(logprob / max(num_tokens, 1) ** self._asked.length_penalty)

    def _options_after(self, num_prompt: int) -> dict[str, Any]:
        most = min(self._context_length // 2, self._context_length - num_prompt)
        begin = [partial(_begin, num_prompt, self.begun)] if self.begun else []
        return {
            "max_new_tokens": self._asked.max_new_tokens or most,
            "logits_processors": (*begin,),
        }

    def _options_at(self, temperature: float) -> dict[str, Any]:
        options = super()._options_at(temperature)
        if temperature == 0.0 and self._asked.beam_size > 1:
            options["logits_processors"] = (*options["logits_processors"], _among_allowed)
        return options


class RankedTranscription(WhisperTranscription):
    """Transcription of one audio by ``RankedTexts``.

    language: None: it is detected. is_one_window: whether only the first window is decoded.
    """

    _texts: RankedTexts

    def __init__(
        self,
        pipeline: OpenedPipeline,
        encoder: EncoderEntry,
        samples: Samples,
        asked: TranscriptionOptions,
        task: str,
        language: str | None,
        *,
        is_one_window: bool = False,
    ) -> None:
        speech, context_length = encoder.speech, pipeline.bundle.context_length
        assert speech is not None  # ``WhisperModel`` has checked it
        request = SpeechRequest(
            vocab_size=encoder.vocab_size,
            most_previous=context_length // 2 - 1,
            language=language,
            task=read_task(task, speech),
            num_beams=asked.beam_size,
            num_return_sequences=asked.beam_size if 0.0 in asked.temperatures else 1,
            temperature=tuple(asked.temperatures),
            best_of=asked.best_of,
            options=_options(asked, speech, encoder.start_token_id),
        )
        # the features are not those of the base: it gets no samples that it would read
        super().__init__(pipeline, speech, encoder.start_token_id, samples[:1], request)
        padded = np.pad(samples, (0, _PADDING))
        self._windows = LogMel(MelForm.of(speech, 0)).windows(padded)
        self._num_frames = len(samples) // speech.hop_length
        self._has_times = not asked.without_timestamps
        self._texts = RankedTexts(pipeline, request, asked=asked, context_length=context_length)
        self._asked, self._is_one_window = asked, is_one_window
        given = asked.initial_prompt
        self._said = [tuple(self._encoded(given) if isinstance(given, str) else given or ())]

    def steps(self, on_segment: OnSegment | None, align: Align) -> Steps:
        """See the base; it returns nothing."""
        for seek, end in self._clips():
            while seek < end:
                size = min(self._speech.num_frames, end - seek)
                seek = yield from self._window(seek, size, on_segment, align)
                if self._is_one_window:
                    return

    def detection(self, num_windows: int, threshold: float) -> Steps:
        """Return the language of the first windows, its probability, and those of all.

        It is that of the first window with a probability above ``threshold``, or that of the most.
        """
        begin = min(self._clips()[0][0], max(self._num_frames - 1, 0))
        votes: dict[str, list[float]] = {}
        ranked: list[tuple[str, float]] = []
        for seek in range(begin, max(self._num_frames, 1), self._speech.num_frames)[:num_windows]:
            size = min(self._speech.num_frames, max(self._num_frames - seek, 1))
            heard = yield from self._heard_after(self._source(seek, size), [self._start])
            ranked = sorted(heard.languages.items(), key=lambda each: -each[1])
            language, probability = ranked[0]
            if probability > threshold:
                return language, probability, ranked
            votes.setdefault(language, []).append(probability)
        language = max(votes, key=lambda each: len(votes[each]))
        return language, max(votes[language]), ranked

    def _window(
        self, seek: int, size: int, on_segment: OnSegment | None, align: Align
    ) -> Generator[Requests, list[DecodeResult], int]:
        """Decode a window; return the first frame of the next one."""
        source, asked, times = self._source(seek, size), self._asked, None
        self._begin_text(is_first=seek == 0)
        before = self._previous()
        with self._pipeline.held_source(source):
            heard = yield from self._hear(source, before)
            inputs = RequestInputs([*before, *self._first_tokens()], source)
            (text,) = yield from self._texts.answers(inputs, heard.no_speech_prob)
            if self._texts.is_silence(text, heard.no_speech_prob):
                return seek + size
            if asked.word_timestamps:
                times = self._times(source, before, text, seek, size, align)
        found = parts_of_window(text.token_ids, seek, size, self._speech, has_times=self._has_times)
        following, end = seek + found.num_frames, 0.0
        for segment in self._new_segments(found, seek, text, heard, times):
            if segment.words:
                end = segment.words[-1].end
                segment = replace(segment, start=segment.words[0].start, end=end)
            if segment.start == segment.end or not segment.text.strip():
                self._said.pop()
            elif on_segment is not None:
                on_segment(segment)
        ends_alone = [self._speech.is_time(token) for token in text.token_ids[-2:]] == [False, True]
        if end > seek * self._speech.seconds_per_frame and not ends_alone:
            following = round(end / self._speech.seconds_per_frame)
        is_hot = text.temperature > asked.prompt_reset_on_temperature
        if is_hot or not asked.condition_on_previous_text:
            self._said.clear()
        return following

    def _times(
        self,
        source: SoundFeatures,
        before: list[int],
        answer: WindowText,
        seek: int,
        num_frames: int,
        align: Align,
    ) -> TokenTimes:
        """Return the times of a text's tokens, aligned without times and the text before."""
        tokens, mark = answer.sequence.token_ids, self._speech.no_timestamps_token_id
        texts = [
            i for i, token in enumerate(tokens[: len(answer.token_ids)]) if token < self._start
        ]
        read = [mark, *(tokens[i] for i in texts), mark]  # the last is not read
        prompt = [token for token in self._first_tokens() if token != mark]
        aligned = align(source, prompt, read)
        found = token_times(aligned, read, seek, num_frames, self._speech, self._start)
        times = TokenTimes(*np.zeros((3, len(tokens))))
        for name in ("start", "end", "probabilities"):
            getattr(times, name)[texts] = getattr(found, name)[1:-1]
        return times

    def _source(self, seek: int, size: int) -> SoundFeatures:
        after = self._speech.num_frames - size
        return SoundFeatures(np.pad(self._windows.window(seek, size), ((0, 0), (0, after))))

    def _begin_text(self, *, is_first: bool) -> None:
        if self._asked.multilingual:
            self._language = None  # it is detected again
        begun = self._encoded(self._asked.prefix)[: self._request.most_previous] if is_first else []
        times = [self._speech.first_timestamp] if begun and self._has_times else []
        self._texts.begun = (*times, *begun)

    def _previous(self) -> list[int]:
        most = self._request.most_previous
        hot = [] if self._texts.begun else self._encoded(self._asked.hotwords)[:most]
        said = [token for segment in self._said for token in segment][-most:]
        return [self._speech.previous_token_id, *hot, *said] if hot or said else []

    def _encoded(self, text: str | None) -> list[int]:
        tokenizer = self._pipeline.tokenizer
        return tokenizer.encode(f" {text.strip()}", add_special_tokens=False) if text else []

    def _clips(self) -> list[tuple[int, int]]:
        """Return the first frame of each clip and the frame after its last."""
        given = self._asked.clip_timestamps
        seconds = given.split(",") if isinstance(given, str) else given or [0]
        frames = [round(float(each) / self._speech.seconds_per_frame) for each in seconds]
        frames += [self._num_frames] * (len(frames) % 2)
        pairs = zip(frames[::2], frames[1::2], strict=True)
        return [(begin, min(end, self._num_frames)) for begin, end in pairs]


class OpenedPipeline(Pipeline):
    """A pipeline that decodes several such transcriptions together, and as far as is asked for."""

    def rounds(
        self, transcriptions: Sequence[RankedTranscription]
    ) -> Iterator[list[list[Segment]]]:
        """Yield the new segments of each audio after each call of the engines, which all share."""
        found: list[list[Segment]] = [[] for _ in transcriptions]
        with contextlib.ExitStack() as stack:
            running = []
            for transcription, segments in zip(transcriptions, found, strict=True):
                steps = transcription.steps(segments.append, self._align)
                stack.enter_context(contextlib.closing(steps))
                if (requests := next(steps, None)) is not None:
                    running.append((steps, requests))
            while running:
                results = iter(self._decoded([each for _, some in running for each in some]))
                before, running = running, []
                for steps, requests in before:
                    with contextlib.suppress(StopIteration):
                        running.append((steps, steps.send([*islice(results, len(requests))])))
                yield [segments.copy() for segments in found]
                for segments in found:
                    segments.clear()

    def result(self, steps: Steps) -> Any:
        """Return the result of steps."""
        return answered(steps, self._decoded)


def _options(asked: TranscriptionOptions, speech: SpeechEntry, start: int) -> dict[str, Any]:
    """Return the options of every request for a window's text."""
    given = set(asked.suppress_tokens or ())
    of_model = {token for token in speech.suppress_tokens if given and token >= start}
    if _DEFAULT_TOKENS in given:
        of_model = set(speech.suppress_tokens)
    options: dict[str, Any] = {
        "length_penalty": asked.length_penalty,
        "repetition_penalty": asked.repetition_penalty,
        "no_repeat_ngram_size": asked.no_repeat_ngram_size,
        "suppress_tokens": sorted((given | of_model) - {_DEFAULT_TOKENS}),
        "begin_suppress_tokens": speech.begin_suppress_tokens if asked.suppress_blank else [],
    }
    if asked.beam_size > 1:
        options["early_stopping"] = True
    if not asked.without_timestamps:
        a_time = speech.chunk_seconds / speech.num_positions
        options["max_initial_timestamp_index"] = round(asked.max_initial_timestamp / a_time)
        options["no_timestamps_token_id"] = speech.no_timestamps_token_id
        options["last_timestamp_token_id"] = speech.last_timestamp
    return options


def _begin(
    num_prompt: int, begun: Sequence[int], path: NDArray[np.int64], scores: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Leave only the next of the tokens that a text begins with."""
    place = len(path) - num_prompt
    if place >= len(begun):
        return scores
    only = np.full_like(scores, -np.inf)
    only[begun[place]] = 0.0
    return only


def _among_allowed(_: NDArray[np.int64], scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log-probabilities among the allowed tokens, by which CTranslate2 ranks beams."""
    largest = scores.max()
    return np.asarray(scores - (largest + np.log(np.exp(scores - largest).sum())))
