"""Pixels of pictures, and their values as encoders read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_runtime.typed_json import mismatch

Pixels = NDArray[np.uint8]
"""A picture, (height, width, 3): red, green and blue from 0 to 255."""

Size = tuple[int, int]
"""Height and width in pixels."""

Resize = Callable[[Pixels, Size, int], Pixels]
"""Returns a picture in another size; the number selects one of Pillow's filters."""

NUM_CHANNELS = 3
_LAST_FILTER = 5  # Image.Resampling.HAMMING


@dataclass(frozen=True, kw_only=True)
class PixelValues:
    """Manifest fields of the values of pixels: a base of the entries of pictures.

    Attributes:
        resample: Pillow's number of the filter that resizes pictures.
        rescale_factor: factor for the values of pixels from 0 to 255.
        mean, std: for red, green and blue; ``mean`` is subtracted from these products, then the
            difference is divided by ``std``.
    """

    resample: int
    rescale_factor: float
    mean: list[float]
    std: list[float]

    def check_values(self, where: str) -> None:
        """Raise BundleError unless the values of pixels are finite numbers."""
        if not 0 <= self.resample <= _LAST_FILTER:
            raise mismatch(f"0 to {_LAST_FILTER}", self.resample, f"{where}: resample")
        is_of_channels = len(self.mean) == len(self.std) == NUM_CHANNELS
        if not is_of_channels or not np.isfinite(self._by_level()).all():
            expected = "three numbers each that make finite values"
            raise mismatch(expected, [self.mean, self.std], f"{where}: mean and std")

    def normalized(self, pixels: Pixels) -> NDArray[np.float32]:
        """Return the values of pixels, (..., height, width, 3), as (..., 3, height, width)."""
        values = self._by_level()
        channels = [values[channel][pixels[..., channel]] for channel in range(NUM_CHANNELS)]
        return np.stack(channels, axis=-3)

    def _by_level(self) -> NDArray[np.float32]:
        """Return the values of the 256 levels of each channel, (3, 256), as transformers rounds."""
        levels = (np.arange(256) * self.rescale_factor).astype(np.float32)
        mean, std = np.array([self.mean, self.std], np.float32)[:, :, None]
        with np.errstate(all="ignore"):  # refused by check_values
            values: NDArray[np.float32] = (levels - mean) / std
        return values
