"""Pictures as prompts of encoder-decoders: a message with one picture, which is the source.

A text in the same message begins the output, such as the token of a task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsbd_ort.media_parts import content_of
from dsbd_ort.media_prompts import MediaPrompt
from dsbd_ort.medium_front_end import OWN_LIMITS, MediaLimits
from dsbd_ort.pictures.reading import read_picture, resized
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.encoder_entry import EncoderEntry
from dsbd_runtime.parts.picture_entry import PictureEntry
from dsbd_runtime.text.chat_messages import Message
from dsbd_runtime.text.tokenizer import Tokenizer

_EXPECTED = (
    "this model reads one picture and holds no conversation: expected one message of the user "
    "with a part of type 'image' or 'image_url' and, if the model has tasks, a part of type 'text'"
)


class PictureReader:
    """Reads messages with a picture for an encoder-decoder that reads pictures."""

    def __init__(self, encoder: EncoderEntry, picture: PictureEntry, tokenizer: Tokenizer) -> None:
        self._start, self._picture, self._tokenizer = encoder.start_token_id, picture, tokenizer

    def read(self, messages: Sequence[Message], limits: MediaLimits = OWN_LIMITS) -> MediaPrompt:
        """Return the tokens that the output begins with, and its source.

        InputError: these are not one message with one picture, or the picture is invalid.
        """
        parts = messages[0].get("content") if len(messages) == 1 else None
        is_of_user = len(messages) == 1 and messages[0].get("role") == "user"
        if not is_of_user or not isinstance(parts, Sequence) or isinstance(parts, str):
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
        content = content_of(part, place, "image", limits)
        try:
            source = self._picture.source(read_picture(content), resized)
        except InputError as error:
            raise InputError(f"{place}: {error}") from error
        return MediaPrompt(self._begin("".join(texts)), source)

    def _begin(self, text: str) -> list[int]:
        """Return the first tokens of the output, with the text of a task."""
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        is_begun = token_ids and (self._picture.task_is_start or token_ids[0] == self._start)
        return token_ids if is_begun else [self._start, *token_ids]


def conversation_of(picture: Any, text: str = "") -> list[Message]:
    """Return a prompt of a picture: a path, bytes, a file or an image of Pillow."""
    parts: list[Message] = [{"type": "image", "image": picture}]
    return [{"role": "user", "content": [*parts, *([{"type": "text", "text": text}] * bool(text))]}]
