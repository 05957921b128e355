"""Conversations with sounds as prompts, by the checkpoint's chat template.

The template shows each sound as one placeholder token. A placeholder that somebody types is text.
"""

from __future__ import annotations

import base64
import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard, cast

from dsbd_forward.forward import Source
from dsbd_ort.given_prompts import given_inputs
from dsbd_ort.speech.log_mel import FORMS, LogMel, Samples
from dsbd_ort.speech.speech_request import Audio, read_samples
from dsbd_runtime.bundle_files.bundle import Bundle
from dsbd_runtime.errors import CapacityError, InputError
from dsbd_runtime.parts.given_medium import ChunkedSound
from dsbd_runtime.text.chat_messages import MediaPart, Message
from dsbd_runtime.text.chat_template import ChatTemplate
from dsbd_runtime.text.tokenizer import Tokenizer
from dsbd_runtime.typed_json import in_short

_MOST_SECONDS = 3600.0  # of a sound
_MOST_CONTEXTS = 2  # sounds that fill the context so often are refused before all are read


class MediaPrompt(list[int]):
    """Token ids of a conversation and its source, the sounds at its placeholders.

    It is a prompt like any list of token ids. A copy as a plain list has lost its sounds.
    """

    def __init__(self, token_ids: Sequence[int], source: Source) -> None:
        super().__init__(token_ids)
        self.source = source


class MediaReader:
    """Reads conversations with sounds for a model whose prompts may have given rows."""

    def __init__(
        self, bundle: Bundle, tokenizer: Tokenizer, chat_template: Callable[[], ChatTemplate]
    ) -> None:
        given = bundle.manifest.target.given
        assert given is not None and isinstance(given.medium, ChunkedSound)  # the only kind so far
        self.medium = medium = given.medium
        self.context_length = bundle.context_length
        self._most_rows = _MOST_CONTEXTS * bundle.context_length
        self._given = given
        self._placeholder = tokenizer.piece(given.placeholder_token_id)
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._mel = LogMel(FORMS["qwen3_asr"].sized(medium, medium.least_samples))
        # Stand for a typed placeholder, and for the token if there is one: digits, which no filter
        # of a template changes, and which nobody can guess.
        self._typed, self._renamed = (f"{secrets.randbelow(10**30):030d}" for _ in range(2))

    def read(
        self,
        messages: Sequence[Message],
        *,
        answer: str = "",
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> MediaPrompt:
        """Return the prompt of a conversation; see ChatTemplate.render.

        answer: how the model's answer begins.
        InputError: a message or a sound is invalid, or the template refuses or drops it.
        CapacityError: the prompt is longer than the context.
        """
        sounds: list[Samples] = []
        if is_conversation(messages):
            messages = [self._ready(each, index, sounds) for index, each in enumerate(messages)]
        text = self._chat_template().render(
            messages, add_generation_prompt=add_generation_prompt, variables=variables
        )
        token_ids = self._token_ids(text + answer)
        if (number := token_ids.count(self._given.placeholder_token_id)) != len(sounds):
            raise InputError(
                f"the chat template of this model shows {number} of {len(sounds)} sounds; give "
                "sounds in messages that it reads, such as those of the role 'user'"
            )
        self._check_length(len(token_ids), [self.num_rows(len(samples)) for samples in sounds])
        inputs = given_inputs(self._given, token_ids, [self._mel(samples) for samples in sounds])
        return MediaPrompt(inputs.prompt_ids, inputs.source)

    def num_rows(self, num_samples: int) -> int:
        """Return how many rows of the prompt a sound is."""
        num_samples = max(num_samples, self.medium.least_samples)
        return self.medium.num_rows(num_samples // self.medium.hop_length)

    def most_samples(self, num_rows: int, most: int) -> int:
        """Return the samples of the longest sound of so many rows, ``most`` or fewer."""
        hop, step = self.medium.hop_length, self.medium.chunk_frames
        lengths = range(most, step * hop, -step * hop)
        return next((each for each in lengths if self.num_rows(each) <= num_rows), step * hop)

    def _ready(self, message: Message, index: int, sounds: list[Samples]) -> dict[str, Any]:
        """Return a message for the template; add the samples of its sounds to ``sounds``."""
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": self._without_placeholders(content)}
        if not isinstance(content, Sequence):
            return dict(message)
        parts: list[Any] = []
        for number, part in enumerate(content):
            place = f"messages[{index}].content[{number}]"
            kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
            if isinstance(kind, str) and kind in _READ_BY_TYPE:
                room = self._most_rows - sum(self.num_rows(len(sound)) for sound in sounds)
                sounds.append(self._samples(_READ_BY_TYPE[kind](part, place), place, room))
                parts.append(MediaPart(type="audio"))
            elif kind != "text":
                raise InputError(
                    f"{place} is a part of type {in_short(kind)}, which this model cannot read; "
                    f"expected parts of type 'text', {' or '.join(map(repr, _READ_BY_TYPE))}"
                )
            elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
                parts.append({**part, "text": self._without_placeholders(part["text"])})
            else:
                parts.append(part)
        return {**message, "content": parts}

    def _without_placeholders(self, text: str) -> str:
        return text.replace(self._placeholder, self._typed)

    def _samples(self, audio: Audio, place: str, most_rows: int) -> Samples:
        """Return the samples of a sound of at most so many rows, more or less."""
        medium = self.medium
        frames = max(most_rows, 1) * medium.chunk_frames / medium.num_rows(medium.chunk_frames)
        seconds = min(frames * medium.hop_length / medium.sampling_rate, _MOST_SECONDS)
        try:
            return read_samples(audio, medium.sampling_rate, max_seconds=seconds)
        except InputError as error:
            raise InputError(f"{place}: {error}") from error

    def _token_ids(self, text: str) -> list[int]:
        """Return the tokens of a rendered text, with one placeholder for each sound."""
        if self._typed not in text:
            return self._tokenizer.encode(text, add_special_tokens=False)
        text = text.replace(self._placeholder, self._renamed)
        text = text.replace(self._typed, self._placeholder)
        return self._tokenizer_of_typed.encode(text, add_special_tokens=False)

    @functools.cached_property
    def _tokenizer_of_typed(self) -> Tokenizer:
        return self._tokenizer.with_renamed(self._placeholder, self._renamed)

    def _check_length(self, num_tokens: int, counts: Sequence[int]) -> None:
        """Raise CapacityError for a longer prompt than the context; ``counts``: rows of sounds."""
        num_tokens += sum(counts) - len(counts)
        if num_tokens >= self.context_length:
            raise CapacityError(
                f"the prompt has {num_tokens} tokens, {sum(counts)} of them the rows of "
                f"{len(counts)} sounds; the context of this bundle holds {self.context_length}; "
                "give shorter sounds, or fewer; transcribe, or --audio, cuts long ones"
            )


def is_conversation(prompt: object) -> TypeGuard[Sequence[Message]]:
    """Return whether a prompt is a list of messages."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    return all(isinstance(message, Mapping) for message in prompt)


def _of_audio(part: Message, place: str) -> Audio:
    """Return the sound of a part as transformers has it: ``audio`` or ``path``."""
    given = [part[name] for name in ("audio", "path") if part.get(name) is not None]
    if len(given) != 1:
        raise InputError(
            f"{place} has {len(given)} sounds; expected one, as 'audio' (samples, bytes, a file or "
            "its path) or 'path'"
        )
    return cast(Audio, given[0])


def _of_input_audio(part: Message, place: str) -> Audio:
    """Return the sound of a part as OpenAI has it: a file in base64."""
    given = part.get("input_audio")
    data = given.get("data") if isinstance(given, Mapping) else None
    try:
        if not isinstance(data, str):
            raise ValueError(f"it is a {type(data).__name__}")
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise InputError(
            f"{place}.input_audio.data is not base64 ({error}); expected a sound file in base64"
        ) from error


_READ_BY_TYPE: dict[str, Callable[[Message, str], Audio]] = {
    "audio": _of_audio,
    "input_audio": _of_input_audio,
}
