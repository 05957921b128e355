"""Front end of a medium in prompts: reads a sound or a picture as rows of the prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dsbd_runtime.parts.given_prompt import GivenPiece


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Limits of the media of one conversation.

    Attributes:
        max_seconds: of a sound.
        read_url: returns the file at an http or https URL; None: such URLs are refused.
    """

    max_seconds: float = 3600.0
    read_url: Callable[[str], bytes] | None = None


OWN_LIMITS = MediaLimits()


@dataclass(frozen=True, kw_only=True)
class ReadMedium:
    """A sound or a picture that was read and measured.

    Attributes:
        num_rows: given rows of the prompt.
        expansion: replaces the placeholder in the rendered text; one placeholder for each row.
        pieces: makes the runs of the encoder, after the length of the prompt was checked.
        grid: of a picture whose rows have three positions: its rows in time, height and width.
    """

    num_rows: int
    expansion: str
    pieces: Callable[[], list[GivenPiece]]
    grid: tuple[int, int, int] | None = None


class MediumFrontEnd(Protocol):
    """The front end of a model.

    Attributes:
        part_type: type of the part that a chat template is shown: "audio" or "image".
        noun: "sound" or "picture", for messages to users.
        shorten: what to do if a prompt is too long, such as "give shorter sounds, or fewer".
    """

    @property
    def part_type(self) -> str: ...

    @property
    def noun(self) -> str: ...

    @property
    def shorten(self) -> str: ...

    def read(self, content: Any, most_rows: int, limits: MediaLimits) -> ReadMedium:
        """Read a medium; InputError: it is invalid, or much longer than ``most_rows`` rows."""
        ...
