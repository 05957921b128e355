"""Front ends of pictures in prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsbd_ort.medium_front_end import MediaLimits, MediumFrontEnd, ReadMedium
from dsbd_ort.pictures.reading import read_picture, resized
from dsbd_runtime.parts.given_grid import GridPicture
from dsbd_runtime.parts.given_medium import MediumEntry
from dsbd_runtime.parts.given_picture import CanvasPicture, GivenPicture, TiledPicture


class PictureFrontEnd:
    """The front end of all kinds of pictures; what differs is in their entries."""

    part_type, noun = "image", "picture"
    shorten = "give fewer pictures, or smaller ones"

    def __init__(self, entry: GivenPicture, placeholder: str) -> None:
        self._entry, self._placeholder = entry, placeholder

    def read(self, content: Any, most_rows: int, limits: MediaLimits) -> ReadMedium:
        """See MediumFrontEnd. Only resized pixels are kept, whose number the entry limits."""
        picture, entry = read_picture(content), self._entry
        size = picture.shape[:2]
        pixels = entry.resized(picture, resized)
        return ReadMedium(
            num_rows=entry.num_rows(size),
            expansion=entry.expansion(size, self._placeholder),
            pieces=lambda: entry.pieces(pixels),
            grid=entry.grid(size),
        )


PICTURE_FRONT_ENDS: dict[type[MediumEntry], Callable[[Any, str], MediumFrontEnd]] = {
    kind: PictureFrontEnd for kind in (TiledPicture, CanvasPicture, GridPicture)
}
"""By the kind of the manifest's entry: front ends of it and of the placeholder's spelling."""
