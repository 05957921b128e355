"""Conversations with sounds or pictures as prompts, by the checkpoint's chat template.

The template shows each as one placeholder, which becomes the text of its rows: a placeholder
for each. A placeholder that somebody types is text.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from dsbd_forward.forward import Source
from dsbd_ort.decoding.request import CopiedIds
from dsbd_ort.media_parts import content_of
from dsbd_ort.medium_front_end import OWN_LIMITS, MediaLimits, ReadMedium
from dsbd_ort.pictures.front_end import PICTURE_FRONT_ENDS
from dsbd_ort.speech.sound_front_end import SOUND_FRONT_ENDS, SoundFrontEnd
from dsbd_runtime.bundle_files.bundle import Bundle
from dsbd_runtime.errors import CapacityError, InputError
from dsbd_runtime.parts.given_grid import mrope_positions
from dsbd_runtime.parts.given_prompt import GivenPrompt
from dsbd_runtime.text.chat_messages import MediaPart, Message, Render
from dsbd_runtime.text.chat_template import ChatTemplate
from dsbd_runtime.text.tokenizer import Tokenizer

_FRONT_ENDS = {**SOUND_FRONT_ENDS, **PICTURE_FRONT_ENDS}
_MOST_CONTEXTS = 2  # a sound that fills the context so often is refused before it is read whole


class MediaPrompt(list[int]):
    """Token ids of a conversation and its source, the sounds or pictures at its placeholders.

    It is a prompt like any list of token ids. A copy as a plain list has lost its media.
    """

    def __init__(self, token_ids: Sequence[int], source: Source) -> None:
        super().__init__(token_ids)
        self.source = source


class MediaReader:
    """Reads conversations with media for a model whose prompts may have given rows."""

    def __init__(
        self, bundle: Bundle, tokenizer: Tokenizer, chat_template: Callable[[], ChatTemplate]
    ) -> None:
        given = bundle.manifest.target.given
        assert given is not None
        self.context_length = bundle.context_length
        self._token_id, self._medium_entry = given.placeholder_token_id, given.medium
        self._placeholder = tokenizer.piece(given.placeholder_token_id)
        self.front_end = made = _FRONT_ENDS[type(given.medium)](given.medium, self._placeholder)
        self.sound = made if isinstance(made, SoundFrontEnd) else None
        self._tokenizer = tokenizer
        self._chat_template = chat_template
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
        limits: MediaLimits = OWN_LIMITS,
    ) -> MediaPrompt:
        """Return the prompt of a conversation; see ChatTemplate.render.

        answer: how the model's answer begins.
        InputError: a message or a medium is invalid, or the template refuses or drops it.
        CapacityError: the prompt is longer than the context.
        """
        media: list[ReadMedium] = []
        if is_conversation(messages):
            messages = [self._ready(*each, media, limits) for each in enumerate(messages)]
        render = functools.partial(
            self._chat_template().render,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )
        text = self._rendered(messages, render, len(media))
        first, *others = (text + answer).split(self._placeholder)
        if len(others) != len(media):
            noun = self.front_end.noun
            raise InputError(
                f"the chat template of this model shows {len(others)} of {len(media)} {noun}s; "
                f"give {noun}s in messages that it reads, such as those of the role 'user'"
            )
        expanded = (m.expansion + other for m, other in zip(media, others, strict=True))
        token_ids = self._token_ids(first + "".join(expanded))
        self._check_length(len(token_ids), media)
        if not media:
            return MediaPrompt(token_ids, None)
        pieces = [piece for each in media for piece in each.pieces()]
        grids = [each.grid for each in media if each.grid is not None]
        positions = mrope_positions(token_ids, self._token_id, grids) if grids else None
        source = GivenPrompt.at_placeholders(token_ids, self._token_id, pieces, positions)
        return MediaPrompt(token_ids, source)

    def _rendered(self, messages: Sequence[Message], render: Render, num_media: int) -> str:
        """Return the text of messages; contents that are texts may become parts, and parts texts.

        Templates of models with media often read parts alone, or texts alone, in which users write
        the placeholder.
        """
        found: list[str | InputError] = []
        ways: list[Callable[[Message], Message]] = [lambda message: message]
        if is_conversation(messages):
            ways += [_as_parts, lambda message: _as_text(message, self._placeholder)]
        for way in ways:
            try:
                text = render([way(message) for message in messages] if len(ways) > 1 else messages)
            except InputError as error:
                found.append(error)
                continue
            if text.count(self._placeholder) == num_media:
                return text
            found.append(text)
        if isinstance(found[0], InputError):
            raise found[0]
        return found[0]

    def heard(self, source: Source) -> CopiedIds:
        """Return the tokens of what the encoder spells of sounds, once it has read them."""
        medium = self._medium_entry
        if not medium.encoder_outputs or not isinstance(source, GivenPrompt):
            return ()

        def token_ids() -> Sequence[int]:
            labels = [piece.labels for piece in source.pieces]
            text = " ".join(medium.spelled(each) for each in labels if each is not None)
            return self._tokenizer.encode(text, add_special_tokens=False)

        return token_ids

    def _ready(
        self, index: int, message: Message, media: list[ReadMedium], limits: MediaLimits
    ) -> dict[str, Any]:
        """Return a message for the template; read its media into ``media``."""
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": self._without_placeholders(content)}
        if not isinstance(content, Sequence):
            return dict(message)
        parts: list[Any] = []
        for number, part in enumerate(content):
            if not isinstance(part, Mapping):
                parts.append(part)
            elif part.get("type", "text") != "text":
                place = f"messages[{index}].content[{number}]"
                media.append(self._medium(part, place, media, limits))
                self._check_length(0, media)
                parts.append(MediaPart(type=self.front_end.part_type))
            elif isinstance(part.get("text"), str):
                parts.append({**part, "text": self._without_placeholders(part["text"])})
            else:
                parts.append(part)
        return {**message, "content": parts}

    def _medium(
        self, part: Message, place: str, before: Sequence[ReadMedium], limits: MediaLimits
    ) -> ReadMedium:
        content = content_of(part, place, self.front_end.part_type, limits)
        most_rows = _MOST_CONTEXTS * self.context_length - sum(each.num_rows for each in before)
        try:
            return self.front_end.read(content, most_rows, limits)
        except InputError as error:
            raise InputError(f"{place}: {error}") from error

    def _without_placeholders(self, text: str) -> str:
        return text.replace(self._placeholder, self._typed)

    def _token_ids(self, text: str) -> list[int]:
        """Return the tokens of an expanded text."""
        if self._typed not in text:
            return self._tokenizer.encode(text, add_special_tokens=False)
        text = text.replace(self._placeholder, self._renamed)
        text = text.replace(self._typed, self._placeholder)
        return self._tokenizer_of_typed.encode(text, add_special_tokens=False)

    @functools.cached_property
    def _tokenizer_of_typed(self) -> Tokenizer:
        return self._tokenizer.with_renamed(self._placeholder, self._renamed)

    def _check_length(self, num_tokens: int, media: Sequence[ReadMedium]) -> None:
        """Raise CapacityError for a longer prompt than the context; ``num_tokens`` 0: not known."""
        num_rows = sum(each.num_rows for each in media)
        if max(num_tokens, num_rows) >= self.context_length:
            front_end, at_least = self.front_end, "" if num_tokens else "at least "
            raise CapacityError(
                f"the prompt has {at_least}{num_tokens or num_rows} tokens, {num_rows} of them the "
                f"rows of {len(media)} {front_end.noun}s; the context of this bundle holds "
                f"{self.context_length}; {front_end.shorten}"
            )


def _as_parts(message: Message) -> Message:
    content = message.get("content")
    is_text = isinstance(content, str)
    return {**message, "content": [{"type": "text", "text": content}]} if is_text else message


def _as_text(message: Message, placeholder: str) -> Message:
    content = message.get("content")
    if isinstance(content, str) or not isinstance(content, Sequence):
        return message
    texts = (
        part if isinstance(part, str) else part.get("text", placeholder)
        for part in content
        if isinstance(part, str | Mapping)
    )
    return {**message, "content": "".join(texts)}


def is_conversation(prompt: object) -> TypeGuard[Sequence[Message]]:
    """Return whether a prompt is a list of messages."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    return all(isinstance(message, Mapping) for message in prompt)
