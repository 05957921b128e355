"""Transcription of an audio by a language model that reads sound in its prompt.

A long audio is cut at quiet places. Each part becomes a conversation: the recipe of the model's
kind writes the prompt and parses the answer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dsbd_ort.audio.audio_files import Audio, read_samples
from dsbd_ort.audio.log_mel import Samples
from dsbd_ort.decoding.option_values import shown
from dsbd_ort.media.media_prompts import MediaReader
from dsbd_ort.media.sounds import SoundFrontEnd
from dsbd_ort.requests.prompts import MediaPrompt
from dsbd_ort.speech.languages import DETECTED, code_of
from dsbd_ort.speech.prompted.recipes import RECIPES, Asked, Recipe
from dsbd_ort.speech.speech_request import SpeechRequest
from dsbd_ort.speech.transcript import TASKS, Segment, Skipped
from dsbd_ort.speech.transcription import Steps, Transcription
from dsbd_ort.speech.window_texts import SpeechPipeline
from dsbd_ort.speech.words import Align
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.given.given_rows import GivenEntry
from dsbd_runtime.text.chat_template import ChatTemplate
from dsbd_runtime.text.tokenizer import Tokenizer

MOST_SECONDS = 60.0  # longest part: keys and values of a minute of Qwen3-ASR 1.7B take 180 MB
_MOST_TOKENS = 512  # longest text of a part
_SEARCHED_SECONDS = 5.0  # end of a part in which its quietest place is searched
_QUIET_SECONDS = 0.1
_WITHOUT_SPACES = ("ja", "th", "yue", "zh")
_NEVER = {
    "return_timestamps": "this model writes no times",
    "condition_on_previous_text": "this model reads each part of an audio alone",
    "no_speech_threshold": "this model gives no probability that nobody speaks",
}
"""Options of other speech models, and why this kind refuses them."""


def _request_of(
    options: Mapping[str, Any],
    recipe: Recipe,
    tokenizer: Tokenizer,
    vocab_size: int,
    context_length: int,
) -> SpeechRequest:
    for name, reason in _NEVER.items():
        value = options.get(name)
        if value is not None and not (isinstance(value, bool | np.bool_) and not value):
            raise InputError(f"{name} is {shown(value)}, but {reason}; leave it out")
    task = _task(options.get("task", TASKS[0]), recipe)
    thresholds = ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold")
    defaults: dict[str, Any] = {"temperature": 0.0, **dict.fromkeys(thresholds)}
    if recipe.reads_words:  # the prompt names them
        defaults["hot_word_gain"] = 0.0
    given = {name: value for name, value in options.items() if name not in _NEVER}
    return SpeechRequest.of(
        {**defaults, **given},
        tokenizer,
        vocab_size,
        context_length,
        language=_language(options.get("language"), recipe),
        task=task,
    )


def _task(task: Any, recipe: Recipe) -> str:
    if not isinstance(task, str) or task not in recipe.tasks:
        raise InputError(
            f"task is {shown(task)}, but this model writes the language that is spoken; expected "
            f"{' or '.join(map(repr, recipe.tasks))}"
        )
    return task


def _language(language: Any, recipe: Recipe) -> str | None:
    if isinstance(language, str):
        named = {name.lower(): code for code, name in recipe.languages.items()}
        language = {**named, DETECTED: None}.get(language.strip().lower(), language)
    if language is not None and not recipe.languages:
        raise InputError(
            f"language is {shown(language)}, but the prompts of this model name none; leave it out"
        )
    return None if language is None else code_of(language, recipe)


class SoundPrompts:
    """Prompts that transcribe a sound.

    room: maximum rows of a sound, half of the free context; the other half is for the answer.
    """

    def __init__(
        self,
        reader: MediaReader,
        sound: SoundFrontEnd,
        asked: Asked,
        language: str | None,
        most_seconds: float = MOST_SECONDS,
    ) -> None:
        """``most_seconds``: longest part; CapacityError: the prompt's text leaves no room."""
        self._reader, self._asked = reader, asked
        self._rate = sound.entry.sampling_rate
        self._recipe = RECIPES[sound.entry.recipe]
        self._begun = self._recipe.begun(language)
        num_text = len(self.of(np.zeros(1, np.float32))) - sound.num_rows(1)
        self.room = (reader.context_length - num_text) // 2
        self._most_samples = sound.most_samples(self.room, round(most_seconds * self._rate))

    def of_parts(self, samples: Samples) -> Iterator[tuple[int, int, MediaPrompt]]:
        """Yield first and last sample of each part of an audio, and its prompt."""
        for first, last in quiet_parts(samples, self._rate, self._most_samples):
            yield first, last, self.of(samples[first:last])

    def of(self, samples: Samples) -> MediaPrompt:
        """Return the prompt with a sound."""
        sound = {"type": "audio", "audio": samples}
        return self._reader.read(self._recipe.messages(sound, self._asked), answer=self._begun)


_LEARNED_SECONDS = 30.0  # longest part in training: about the longest text that a draft learns


def learned_prompts(
    given: GivenEntry, context_length: int, folder: Path, language: str | None, task: str | None
) -> Callable[[Audio], Iterator[MediaPrompt]]:
    """Return a function that yields the prompts of an audio, for training a draft.

    folder: the folder of the tokenizer and the chat template.

    InputError: the model's prompts cannot name this language or task.
    """
    tokenizer = Tokenizer(folder, bos_token_id=None)
    reader = MediaReader(given, context_length, tokenizer, lambda: ChatTemplate.from_folder(folder))
    assert reader.sound is not None  # the caller has checked it
    sound, recipe = reader.sound, RECIPES[reader.sound.entry.recipe]
    asked, rate = Asked(task=_task(task or TASKS[0], recipe)), sound.entry.sampling_rate
    prompts = SoundPrompts(reader, sound, asked, _language(language, recipe), _LEARNED_SECONDS)
    return lambda audio: (each for *_, each in prompts.of_parts(read_samples(audio, rate)))


class PromptedTranscription(Transcription):
    """Transcription of one audio by conversations."""

    def __init__(
        self,
        pipeline: SpeechPipeline,
        reader: MediaReader,
        sound: SoundFrontEnd,
        samples: Samples,
        options: Mapping[str, Any],
        vocab_size: int,
    ) -> None:
        """Read the options.

        InputError, ConfigError: an option is invalid. CapacityError: the prompt's text leaves no
        room for a sound.
        """
        self._sound, self._samples = sound, samples
        self._rate = sound.entry.sampling_rate
        self._recipe = recipe = RECIPES[sound.entry.recipe]
        request = _request_of(
            options, recipe, pipeline.tokenizer, vocab_size, reader.context_length
        )
        text, words = options.get("initial_prompt"), options.get("hot_words") or ()
        if text is not None and not isinstance(text, str):
            raise InputError(f"initial_prompt is a {type(text).__name__}; expected a text")
        asked = Asked(task=request.task, text=(text or "").strip(), words=tuple(words))
        self._prompts = SoundPrompts(reader, sound, asked, request.language)
        shared = {"temperature": 0.0, "max_new_tokens": min(_MOST_TOKENS, self._prompts.room)}
        super().__init__(pipeline, request, len(samples) / self._rate, shared)

    def steps(self, on_segment: Callable[[Segment], None] | None, align: Align) -> Steps:
        """See the base; the parts of the audio are independent of each other."""
        for first, last, prompt in self._prompts.of_parts(self._samples):
            answers = yield from self._texts.answers(prompt.inputs, 0.0)
            seek = first // self._sound.entry.hop_length
            if self._request.num_return_sequences > 1:
                self._alternatives += [
                    replace(self._alternative(each, seek), text=self._said(each.token_ids)[1])
                    for each in answers
                ]
            language, text = self._said(answers[0].token_ids)
            self._language = self._language or language
            measured: dict[str, Any] = {
                "seek": seek,
                "start": first / self._rate,
                "end": last / self._rate,
                "temperature": answers[0].temperature,
                "avg_logprob": answers[0].avg_logprob,
            }
            if not text:
                self._skipped.append(Skipped(**measured, no_speech_prob=1.0))
                continue
            segment = Segment(
                id=len(self._segments),
                text=text if language in _WITHOUT_SPACES else f" {text}",
                token_ids=answers[0].token_ids,
                compression_ratio=answers[0].compression_ratio,
                no_speech_prob=0.0,
                **measured,
            )
            self._segments.append(segment)
            if on_segment is not None:
                on_segment(segment)
        return self._transcript("".join(segment.text for segment in self._segments))

    def _said(self, token_ids: Sequence[int]) -> tuple[str | None, str]:
        return self._recipe.said(token_ids, self._pipeline.tokenizer, self._request.language)


def quiet_parts(samples: Samples, rate: int, max_samples: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of an audio, each at most ``max_samples`` long, as (begin, end) samples.

    A part ends at the beginning of the quietest tenth of a second in its last five seconds, or in
    its second half if that is shorter, as in transformers' extractor of Cohere Transcribe. The last
    part ends at the end of the audio.
    """
    begin, size = 0, round(_QUIET_SECONDS * rate)
    while len(samples) - begin > max_samples:
        num_searched = min(round(_SEARCHED_SECONDS * rate), max_samples // 2)
        start = begin + max_samples - num_searched
        end = start + num_searched // 2
        num_blocks = -(-num_searched // size) - 1
        if num_blocks > 0:
            blocks = samples[start : start + num_blocks * size].reshape(num_blocks, size)
            end = start + size * int((blocks.astype(np.float64) ** 2).mean(axis=1).argmin())
        end = max(end, begin + 1)
        yield begin, end
        begin = end
    yield begin, len(samples)
