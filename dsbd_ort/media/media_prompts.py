"""Messages with sounds or pictures as prompts: rows in a conversation, or the source of an output.

A chat template writes one placeholder for each medium. It is expanded to one placeholder for each
row of the medium. A placeholder that a user types stays text.
"""

from __future__ import annotations

import functools
import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dsbd_ort.media.message_parts import (
    OWN_LIMITS,
    MediaLimits,
    MediumFrontEnd,
    ReadMedium,
    read_part,
)
from dsbd_ort.media.pictures import PictureFrontEnd, read_picture, resized
from dsbd_ort.media.sounds import (
    SoundFrontEnd,
    WindowedFrontEnd,
    chunked_front_end,
    stacked_front_end,
)
from dsbd_ort.requests.prompts import MediaPrompt, RequestInputs, is_conversation
from dsbd_runtime.bundle_files.bundle import Bundle
from dsbd_runtime.errors import CapacityError, InputError
from dsbd_runtime.media.given_grid import GridPicture, mrope_positions
from dsbd_runtime.media.given_picture import CanvasPicture, TiledPicture
from dsbd_runtime.media.given_sound import ChunkedSound, StackedSound, WindowedSound
from dsbd_runtime.parts.given.given_medium import MediumEntry
from dsbd_runtime.parts.given.given_prompt import GivenPrompt
from dsbd_runtime.parts.given.given_rows import GivenEntry
from dsbd_runtime.parts.source.encoder_entry import EncoderEntry
from dsbd_runtime.parts.source.picture_entry import PictureEntry
from dsbd_runtime.text.chat_messages import (
    MediaPart,
    Message,
    Render,
    check_messages,
    joined_text,
)
from dsbd_runtime.text.chat_template import ChatTemplate
from dsbd_runtime.text.tokenizer import Tokenizer

_FRONT_ENDS: dict[type[MediumEntry], Callable[[Any, str], MediumFrontEnd]] = {
    ChunkedSound: chunked_front_end,
    StackedSound: stacked_front_end,
    WindowedSound: WindowedFrontEnd,
    TiledPicture: PictureFrontEnd,
    CanvasPicture: PictureFrontEnd,
    GridPicture: PictureFrontEnd,
}
"""By kind of the manifest's entry: makes a front end from the entry and the placeholder's text."""
_MOST_CONTEXTS = 2  # a sound with more rows than this is refused before it is read whole
_EXPECTED = (
    "this model reads one picture and holds no conversation: expected one message of the user "
    "with a part of type 'image' or 'image_url' and, if the model has tasks, a part of type 'text'"
)


class MediaReader:
    """Reads conversations with media for a model whose prompts may have given rows."""

    def __init__(
        self,
        given: GivenEntry,
        context_length: int,
        tokenizer: Tokenizer,
        chat_template: Callable[[], ChatTemplate],
    ) -> None:
        self.context_length = context_length
        self._token_id, self._entry = given.placeholder_token_id, given.medium
        self._placeholder = tokenizer.piece(self._token_id)
        self.front_end = _FRONT_ENDS[type(self._entry)](self._entry, self._placeholder)
        self.sound = self.front_end if isinstance(self.front_end, SoundFrontEnd) else None
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        # Replacements of a typed placeholder, and of the token's own spelling in a text that has a
        # typed one: digits, which no filter of a template changes and users cannot guess.
        self._typed, self._renamed = (f"{secrets.randbelow(10**30):030d}" for _ in range(2))

    def read(
        self,
        messages: Sequence[Message],
        *,
        answer: str = "",
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        limits: MediaLimits | None = None,
    ) -> MediaPrompt:
        """Return the prompt of a conversation; see ChatTemplate.render.

        answer: beginning of the model's answer.
        InputError: a message or a medium is invalid, or the template refuses or drops it.
        CapacityError: the prompt is longer than the context.
        """
        media: list[ReadMedium] = []
        limits = limits or OWN_LIMITS
        if is_conversation(messages):
            messages = [self._ready(*each, media, limits) for each in enumerate(messages)]
            check_messages(messages)
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
            return MediaPrompt(RequestInputs(token_ids))
        pieces = [piece for each in media for piece in each.pieces()]
        grids = [each.grid for each in media if each.grid is not None]
        positions = mrope_positions(token_ids, self._token_id, grids) if grids else None
        source = GivenPrompt.at_placeholders(token_ids, self._token_id, pieces, positions)
        copied_ids = functools.partial(self.heard, source) if self._entry.encoder_outputs else ()
        return MediaPrompt(RequestInputs(token_ids, source, copied_ids))

    def _rendered(self, messages: Sequence[Message], render: Render, num_media: int) -> str:
        """Return the text of messages, with all contents as parts or as texts if necessary.

        Templates of models with media often read only parts, or only texts, in which users write
        the placeholder.
        """
        forms = [messages]
        if is_conversation(messages):
            as_texts = [_as_text(message, self._placeholder) for message in messages]
            forms += [[_as_parts(message) for message in messages], as_texts]
        results: list[str | InputError] = []
        for form in forms:
            try:
                text = render(form)
            except InputError as error:
                results.append(error)
                continue
            if text.count(self._placeholder) == num_media:
                return text
            results.append(text)
        if isinstance(results[0], InputError):
            raise results[0]
        return results[0]

    def heard(self, source: GivenPrompt) -> list[int]:
        """Return the tokens that the encoder recognized in the sounds that it has read so far."""
        labels = [piece.labels for piece in source.pieces]
        text = " ".join(self._entry.spelled(each) for each in labels if each is not None)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _ready(
        self, index: int, message: Message, media: list[ReadMedium], limits: MediaLimits
    ) -> Message:
        """Return a message for the template; append its media, which are read, to ``media``."""
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": self._without_placeholders(content)}
        if not isinstance(content, Sequence):
            return message
        parts = [
            self._ready_part(part, f"messages[{index}].content[{number}]", media, limits)
            for number, part in enumerate(content)
        ]
        return {**message, "content": parts}

    def _ready_part(
        self, part: Any, place: str, media: list[ReadMedium], limits: MediaLimits
    ) -> Any:
        if not isinstance(part, Mapping):
            return part
        if part.get("type", "text") == "text":
            if not isinstance(text := part.get("text"), str):
                return part
            return {**part, "text": self._without_placeholders(text)}
        front_end, part_type = self.front_end, self.front_end.part_type
        most_rows = _MOST_CONTEXTS * self.context_length - sum(each.num_rows for each in media)
        read = functools.partial(front_end.read, most_rows=most_rows, limits=limits)
        media.append(read_part(part, place, part_type, limits, read))
        self._check_length(0, media)
        return MediaPart(type=part_type)

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
        """Raise CapacityError for a prompt longer than the context; ``num_tokens`` 0: unknown."""
        num_rows = sum(each.num_rows for each in media)
        if max(num_tokens, num_rows) >= self.context_length:
            front_end, at_least = self.front_end, "" if num_tokens else "at least "
            raise CapacityError(
                f"the prompt is too long: this model's maximum context length is "
                f"{self.context_length} tokens, the prompt has {at_least}{num_tokens or num_rows}, "
                f"{num_rows} of them the rows of {len(media)} {front_end.noun}s; "
                f"{front_end.shorten}"
            )


def _as_parts(message: Message) -> Message:
    content = message.get("content")
    is_text = isinstance(content, str)
    return {**message, "content": [{"type": "text", "text": content}]} if is_text else message


def _as_text(message: Message, placeholder: str) -> Message:
    content = message.get("content")
    if isinstance(content, str) or not isinstance(content, Sequence):
        return message
    runs = itertools.groupby(content, lambda part: isinstance(part, MediaPart))
    texts = (
        placeholder * len([*run]) if of_media else joined_text([*run]) for of_media, run in runs
    )
    return {**message, "content": "".join(texts)}


class PictureReader:
    """Reads a message with one picture, the source of an encoder-decoder.

    A text in the same message begins the output, such as the token of a task.
    """

    sound = None

    def __init__(self, encoder: EncoderEntry, picture: PictureEntry, tokenizer: Tokenizer) -> None:
        self._start, self._picture, self._tokenizer = encoder.start_token_id, picture, tokenizer

    def read(
        self, messages: Sequence[Message], *, limits: MediaLimits | None = None, **_: object
    ) -> MediaPrompt:
        """Return the first tokens of the output, and its source; no chat template is used.

        InputError: the messages are not one message with one picture, or the picture is invalid.
        """
        is_one = len(messages) == 1 and messages[0].get("role") == "user"
        parts = messages[0].get("content") if is_one else None
        if not isinstance(parts, Sequence) or isinstance(parts, str):
            raise InputError(f"the prompt has no picture, or others' messages; {_EXPECTED}")
        texts: list[str] = []
        pictures: list[tuple[Message, str]] = []
        for number, part in enumerate(parts):
            place = f"messages[0].content[{number}]"
            if not isinstance(part, Mapping):
                raise InputError(f"{place} is a {type(part).__name__}; {_EXPECTED}")
            if part.get("type", "text") == "text" and isinstance(part.get("text"), str):
                texts.append(part["text"])
            else:
                pictures.append((part, place))
        if len(pictures) != 1 or len(texts) > 1:
            counts = f"{len(pictures)} pictures and {len(texts)} texts"
            raise InputError(f"the message has {counts}; {_EXPECTED}")
        [(part, place)] = pictures
        source = read_part(
            part,
            place,
            "image",
            limits or OWN_LIMITS,
            lambda it: self._picture.source(read_picture(it), resized),
        )
        begin = self._tokenizer.encode("".join(texts), add_special_tokens=False)
        if not begin or not (self._picture.task_is_start or begin[0] == self._start):
            begin = [self._start, *begin]
        return MediaPrompt(RequestInputs(begin, source))


def media_reader(
    bundle: Bundle, tokenizer: Tokenizer, chat_template: Callable[[], ChatTemplate]
) -> MediaReader | PictureReader | None:
    """Return the reader of messages if the model reads sounds or pictures in them, else None."""
    target = bundle.manifest.target
    if target.given is not None:
        return MediaReader(target.given, bundle.context_length, tokenizer, chat_template)
    if target.encoder is not None and target.encoder.picture is not None:
        return PictureReader(target.encoder, target.encoder.picture, tokenizer)
    return None
