"""Pictures as sources: the manifest entry of a picture that an encoder reads, and its pixels.

Every picture is fitted to one size. Its encoder returns the same number of rows for each.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.source.pixel_values import NUM_CHANNELS, Pixels, PixelValues, Resize, Size
from dsbd_runtime.parts.source.source_values import SourceValues
from dsbd_runtime.typed_json import check_counts

_MOST_PIXELS = 8_192  # of a side: a page of Donut has 2,560
_MOST_POSITIONS = 65_536
_LONGEST = 16  # limits a picture resized by its shorter side to so many times the page's memory


class PicturePixels(SourceValues):
    """The values of a picture's pixels, (3, height, width)."""

    axes = ("channels", "height", "width")


@dataclass(frozen=True, kw_only=True)
class PictureEntry(PixelValues):
    """Manifest entry of the pictures that an encoder reads.

    Attributes:
        height, width: size of the picture that the encoder reads.
        num_positions: number of rows that the encoder returns.
        keeps_proportions: whether a picture is centered on black; else it is stretched.
        is_turned: whether a portrait is turned first for a landscape size, and the other way round.
        task_is_start: whether a text in the prompt, such as the token of a task, replaces the start
            token; else the text follows the start token.
    """

    height: int
    width: int
    num_positions: int
    keeps_proportions: bool = False
    is_turned: bool = False
    task_is_start: bool = False

    input_name: ClassVar[str] = "pixel_values"
    source_type: ClassVar[type[SourceValues]] = PicturePixels
    noun: ClassVar[str] = "pictures"

    @property
    def shape(self) -> tuple[int, int, int]:
        return NUM_CHANNELS, self.height, self.width

    def check(self, where: str) -> None:
        """Raise BundleError unless the values are valid, and a request can pay for them."""
        check_counts({"height": self.height, "width": self.width}, where, _MOST_PIXELS)
        check_counts({"num_positions": self.num_positions}, where, _MOST_POSITIONS)
        self.check_values(where)

    def source(self, picture: Pixels, resize: Resize) -> PicturePixels:
        """Return a picture, (height, width, 3), as the encoder reads it; InputError: too long."""
        if not self.keeps_proportions:
            return self.source_of(resize(picture, (self.height, self.width), self.resample))
        height, width = picture.shape[:2]
        if self.is_turned and (height - width) * (self.height - self.width) < 0:
            picture = np.rot90(picture, 3)
        for size in self._sizes(*picture.shape[:2]):
            picture = resize(picture, size, self.resample)
        page = np.zeros((self.height, self.width, NUM_CHANNELS), np.uint8)
        height, width = picture.shape[:2]
        top, left = (self.height - height) // 2, (self.width - width) // 2
        page[top : top + height, left : left + width] = picture
        return self.source_of(page)

    def source_of(self, pixels: Pixels) -> PicturePixels:
        """Return pixels of the encoder's size as a source."""
        return PicturePixels(self.normalized(pixels))

    def _sizes(self, height: int, width: int) -> Iterator[Size]:
        """Yield the sizes that a picture is resized to, one after the other, as transformers does.

        Its shorter side becomes the shorter one of the encoder's size. If the longer one is then
        too long, both are reduced: 400 x 100 becomes 192 x 48, then 64 x 16, if it is 64 x 48.
        """
        short = min(self.height, self.width)
        longest = short * max(height, width) // min(height, width)
        if longest > _LONGEST * max(self.height, self.width):
            raise InputError(
                f"the picture has {width} x {height} pixels, which is too long for the page of "
                f"{self.width} x {self.height} that the model reads; cut it into several"
            )
        height, width = (short, longest) if width > height else (longest, short)
        yield height, width
        if height > width and height > self.height:
            yield self.height, max(width * self.height // height, 1)
        elif width > height and width > self.width:
            yield max(height * self.width // width, 1), self.width
