"""Pictures as sources: the manifest entry of a picture that an encoder reads, and its pixels.

Every picture is fitted to one size. Its encoder returns the same number of rows for each.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from dsbd_runtime.parts.source_values import SourceValues
from dsbd_runtime.typed_json import check_counts, mismatch

STRETCHED, PADDED = FITS = ("stretched", "padded")
"""How a picture is fitted: to both sides, or by its proportions, with zeros around it."""

CHANNELS = 3
MOST_PIXELS = 4096  # of a side: a page of Donut has 2,560
_MOST_POSITIONS = 65_536
_RESAMPLINGS = range(6)  # Pillow's numbers


class PicturePixels(SourceValues):
    """The pixels of a picture as its encoder reads them, (3, height, width)."""

    axes = ("channels", "height", "width")


@dataclass(frozen=True, kw_only=True)
class PictureEntry:
    """Manifest entry of a picture: how pixels are made, in RGB, and how many rows they become.

    Attributes:
        height, width: of the picture that the encoder reads.
        num_positions: rows that the encoder returns.
        resample: Pillow's number of the filter that resizes.
        rescale_factor: the numbers 0 to 255 are multiplied by it.
        mean, std: by channel: the mean is subtracted, then the result divided.
        fit: one of ``FITS``.
        is_turned: whether a picture is turned if its longer side is not that of the size.
    """

    height: int
    width: int
    num_positions: int
    resample: int
    rescale_factor: float
    mean: list[float]
    std: list[float]
    fit: str = STRETCHED
    is_turned: bool = False

    input_name: ClassVar[str] = "pixel_values"
    source_type: ClassVar[type[PicturePixels]] = PicturePixels
    noun: ClassVar[str] = "pictures"

    @property
    def shape(self) -> tuple[int, int, int]:
        return CHANNELS, self.height, self.width

    def check(self, where: str) -> None:
        """Raise BundleError unless the values are consistent, and a request can pay for them."""
        check_counts({"height": self.height, "width": self.width}, where, MOST_PIXELS)
        check_counts({"num_positions": self.num_positions}, where, _MOST_POSITIONS)
        if self.resample not in _RESAMPLINGS:
            raise mismatch("a filter of Pillow, 0 to 5", self.resample, f"{where}: resample")
        if self.fit not in FITS:
            raise mismatch(f"one of {', '.join(FITS)}", self.fit, f"{where}: fit")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != CHANNELS or not all(map(math.isfinite, values)):
                raise mismatch(f"{CHANNELS} finite numbers", values, f"{where}: {name}")
        for name, numbers in (("std", self.std), ("rescale_factor", [self.rescale_factor])):
            if not all(0 < number < math.inf for number in numbers):
                raise mismatch("numbers above 0", numbers, f"{where}: {name}")
