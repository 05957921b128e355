"""Options of a transcription, read and checked once."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.audio.audio_files import Audio, read_samples
from dsbd_ort.audio.log_mel import LogMel, MelForm
from dsbd_ort.audio.voice_activity import VAD, VadOptions
from dsbd_ort.decoding import DecodingOptions
from dsbd_ort.decoding.option_table import OPTION_TABLE, read_options
from dsbd_ort.decoding.option_values import Domain, Number, OneOf, Whole, entries_of, shown
from dsbd_ort.speech.hot_words import Word, read_hot_words
from dsbd_ort.speech.languages import DETECTED, ENGLISH, code_of
from dsbd_ort.speech.transcript import TASKS
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.source.speech_entry import SpeechEntry
from dsbd_runtime.text.tokenizer import Tokenizer

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
COMPRESSION_RATIO = 1.35  # of token ids; like 2.4 in programs that compress the text itself
LOGPROB = -1.0
NO_SPEECH = 0.6
NUM_BEAMS = 5
WORD_TIMES = "word"  # value of ``return_timestamps`` that requests times of words too
HOT_WORD_GAIN = 2.0
_MOST_TEMPERATURES = 16
_TEMPERATURE = Number(0.0, 10.0)
_FINITE = Number(-sys.float_info.max, sys.float_info.max)
_THRESHOLDS = ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold")
_DOMAINS: dict[str, Domain] = {
    "return_timestamps": OneOf((False, True, WORD_TIMES)),
    "condition_on_previous_text": OneOf((False, True)),
    "num_beams": OPTION_TABLE["num_beams"].domain,
    "best_of": Whole(1, 64),
    "num_return_sequences": Whole(1, 64),
    "hot_word_gain": Number(0.0, 100.0),
    **dict.fromkeys(_THRESHOLDS, _FINITE),
}
"""Domains of the options that are stored as read; None switches a threshold off."""


class SpeechOptions(DecodingOptions, total=False):
    """The keyword arguments of ``Pipeline.transcribe``; others are those of ``generate``.

    Attributes:
        language: code such as "en", tag such as "en-US", or English name. "auto": detect it in the
            first window. None: the language of generation_config.json; if it has none, detect it.
        task: "transcribe", or "translate" into English.
        return_timestamps: whether texts have times, which divide them into segments. Audio longer
            than one window always has times: they set the start of the next window. "word": the
            words of each segment have times too.
        num_beams: number of beams of the search; 1 is greedy.
        initial_prompt: text used as if it had been spoken before, such as names. Only its last
            tokens are used: one less than half of the model's context.
        condition_on_previous_text: whether the text of a window is a prompt of the next window.
        temperature: one, or several to try in turn. At 0 a text is searched, above it is sampled.
        best_of: number of texts sampled at a temperature; the most probable one is used.
        num_return_sequences: number of texts of each window in ``Transcript.alternatives``, the
            best first; the next window continues the best. At temperature 0 they are beams, above
            it the best of the ``best_of`` samples.
        hot_words: names and phrases to favour, see ``hot_words``.
        hot_word_gain: added to the log-probability of each token of a hot word.
        compression_ratio_threshold: a window is tried again if its text compresses better than
            this, because repetitions compress well; None: never.
        logprob_threshold: a window is tried again if the mean log-probability of its tokens is
            lower than this; None: never.
        no_speech_threshold: a window is skipped as silence if its no-speech probability is above
            this and its mean log-probability below ``logprob_threshold``; None: never.
        vad: whether to transcribe only the parts in which somebody speaks, see ``VadOptions``.
    """

    language: str | None
    task: str
    return_timestamps: bool | Literal["word"]
    initial_prompt: str | None
    condition_on_previous_text: bool
    temperature: float | Sequence[float]  # type: ignore[misc]  # unlike in DecodingOptions
    best_of: int
    hot_words: Sequence[str] | None
    hot_word_gain: float
    compression_ratio_threshold: float | None
    logprob_threshold: float | None
    no_speech_threshold: float | None
    vad: bool | VadOptions


SPEECH_OPTIONS = (
    *_DOMAINS,
    *("language", "task", "initial_prompt", "temperature", "hot_words", VAD),
)
_OF_TRANSCRIPTION = {
    *("no_timestamps_token_id", "max_initial_timestamp_index", "last_timestamp_token_id"),
    "prompt_logprobs",
}


@dataclass(frozen=True, kw_only=True)
class SpeechRequest:
    """The options of one transcription; see ``SpeechOptions``.

    language: a language code of the model; None: detect it, or the model has only one language.
    most_previous: maximum number of tokens of previous text in a prompt.
    options: fields of DecodingConfig for every engine request.
    """

    vocab_size: int
    most_previous: int
    language: str | None = None
    task: str = "transcribe"
    return_timestamps: bool | Literal["word"] = False
    num_beams: int = NUM_BEAMS
    prompt_ids: tuple[int, ...] = ()
    condition_on_previous_text: bool = False
    temperature: tuple[float, ...] = TEMPERATURES
    best_of: int = 1
    num_return_sequences: int = 1
    hot_words: tuple[Word, ...] = ()
    hot_word_gain: float = HOT_WORD_GAIN
    compression_ratio_threshold: float | None = COMPRESSION_RATIO
    logprob_threshold: float | None = LOGPROB
    no_speech_threshold: float | None = NO_SPEECH
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        options: Mapping[str, Any],
        speech: SpeechEntry,
        tokenizer: Tokenizer,
        vocab_size: int,
        context_length: int,
    ) -> SpeechRequest:
        """Return the request of ``SpeechOptions``; InputError, ConfigError: invalid options."""
        if _is_word_times(options.get("return_timestamps")):
            check_word_times(speech)
        return cls.of(
            options,
            tokenizer,
            vocab_size,
            context_length,
            language=read_language(options.get("language"), speech),
            task=read_task(options.get("task", TASKS[0]), speech),
            prompt_ids=read_prompt(options.get("initial_prompt"), tokenizer),
        )

    @classmethod
    def of(
        cls,
        options: Mapping[str, Any],
        tokenizer: Tokenizer,
        vocab_size: int,
        context_length: int,
        **fields: Any,
    ) -> SpeechRequest:
        """Return the request of ``options``; ``fields`` has its language, task and prompt."""
        stored = {name: value for name, value in options.items() if name in _DOMAINS}
        given = {name: value for name, value in options.items() if name not in SPEECH_OPTIONS}
        bound = {name: given.pop(name) for name in ("constraint",) if name in given}
        given = {**read_options(given), **bound}  # the pipeline binds it for each request
        if wrong := sorted(_OF_TRANSCRIPTION & given.keys()):
            raise InputError(
                f"{wrong[0]} is given, but transcribe decides it itself, by its other options; "
                "leave it out"
            )
        return cls(
            vocab_size=vocab_size,
            most_previous=context_length // 2 - 1,
            temperature=read_temperatures(options.get("temperature", TEMPERATURES)),
            hot_words=read_hot_words(options.get("hot_words"), tokenizer),
            options=given,
            **stored,
            **fields,
        )

    def __post_init__(self) -> None:
        for name, domain in _DOMAINS.items():
            value = getattr(self, name)
            if value is not None or name not in _THRESHOLDS:
                object.__setattr__(self, name, domain.read(name, value))
        self._check_alternatives()

    @property
    def has_word_times(self) -> bool:
        return _is_word_times(self.return_timestamps)

    def _check_alternatives(self) -> None:
        """Raise InputError if a window has fewer texts than ``num_return_sequences``."""
        given = {"num_beams": self.num_beams} if 0.0 in self.temperature else {}
        given |= {"best_of": self.best_of} if max(self.temperature) > 0.0 and not given else {}
        for name, value in given.items():
            if value < self.num_return_sequences:
                raise InputError(
                    f"num_return_sequences is {self.num_return_sequences}, but {name} is {value}: "
                    f"a window has no more texts; raise {name}"
                )


def _is_word_times(value: object) -> bool:
    return isinstance(value, str) and value == WORD_TIMES


def check_word_times(speech: SpeechEntry) -> None:
    """Raise InputError for a model without word times."""
    if speech.alignment is not None:
        return
    if speech.alignment_heads is None:
        why = (
            "the checkpoint of this bundle names no alignment_heads; add those of the model that "
            "it was made from to its generation_config.json, and export it again"
        )
    else:
        why = (
            "this bundle was made without the graph that they need; export it again with this "
            "version of dsbd-ort"
        )
    raise InputError(f"times of words are asked for, but {why}")


def read_temperatures(temperature: object) -> tuple[float, ...]:
    """Return the temperatures to try in turn; InputError, ConfigError: a value is invalid."""
    several = None if isinstance(temperature, Set) else entries_of(temperature, _MOST_TEMPERATURES)
    given = (temperature,) if several is None else several
    if not 1 <= len(given) <= _MOST_TEMPERATURES:
        raise InputError(
            f"temperature has {len(given)} values; expected a number, or 1 to {_MOST_TEMPERATURES} "
            "to try in turn"
        )
    return tuple(_TEMPERATURE.read("temperature", value) for value in given)


def read_task(task: object, speech: SpeechEntry) -> str:
    """Return the task if the model supports it, else raise InputError."""
    if not isinstance(task, str) or task not in TASKS:
        raise InputError(f"task is {shown(task)}; expected one of {', '.join(TASKS)}")
    if speech.tasks is None and task != TASKS[0]:
        raise InputError(
            f"task is {task!r}, but the model supports only English; leave it out, or use a bundle "
            "of a model of several languages"
        )
    if speech.tasks is not None and task not in speech.tasks:
        raise InputError(f"task is {task!r}; expected one of {', '.join(speech.tasks)}")
    return str(task)


def read_language(language: str | None, speech: SpeechEntry) -> str | None:
    """Return the code of the language of a request, None if it must be detected."""
    is_detected = isinstance(language, str) and language.strip().lower() == DETECTED
    if language is not None and not is_detected:
        return code_of(language, speech)
    if speech.languages is None:
        return ENGLISH
    return None if is_detected else speech.language


def read_prompt(text: str | None, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens of an initial prompt, like ``get_prompt_ids`` of transformers."""
    if text is None:
        return ()
    if not isinstance(text, str):
        raise InputError(f"initial_prompt is a {type(text).__name__}; expected a text")
    if not text.strip():
        return ()
    token_ids = tokenizer.encode(f" {text.strip()}", add_special_tokens=False)
    special = [token for token in token_ids if not tokenizer.decode([token])]
    if special:
        raise InputError(
            f"initial_prompt has the special token {special[0]}; expected a text alone, such as "
            "names that are spoken of"
        )
    return tuple(token_ids)


def heard_windows(audio: Audio, speech: SpeechEntry) -> Iterator[NDArray[np.float32]]:
    """Yield the features of the windows of an audio, (num_mels, num_frames) float32 each.

    The last window is padded; no window is only padding. InputError: the file is not audio.
    """
    samples = read_samples(audio, speech.sampling_rate)
    windows = LogMel(MelForm.of_windows(speech)).windows(samples)
    for first in range(0, -(-len(samples) // speech.hop_length), speech.num_frames):
        yield windows.window(first, speech.num_frames)
