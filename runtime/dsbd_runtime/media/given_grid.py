"""Pictures in prompts as grids of patches, and the rows' positions in time, height and width.

Sizes are computed with floats and rounded as transformers does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.rows import Ints
from dsbd_runtime.errors import InputError
from dsbd_runtime.media.given_picture import GivenPicture, Grid, rounded_up
from dsbd_runtime.parts.given.given_medium import MediumEntry
from dsbd_runtime.parts.given.given_prompt import GivenPiece
from dsbd_runtime.parts.part import FLOAT32, INT64, Tensors, TensorSpec
from dsbd_runtime.parts.source.pixel_values import NUM_CHANNELS, Pixels, Resize, Size
from dsbd_runtime.typed_json import UnknownEntryError, check_counts

PATCHES, COORDS, TAPS, TAP_WEIGHTS = "patches", "coords", "taps", "tap_weights"
_MOST_SIDE = 4096  # largest side of a patch, a square, and the square of learned positions
_MOST_PIXELS = 2**26
_MOST_ROWS = 2**16


@dataclass(frozen=True, kw_only=True)
class GridPicture(GivenPicture, MediumEntry):
    """A picture of any size as a grid of patches; each square of patches becomes one row.

    Patches are ordered by their squares, row by row, and row by row within each square.

    | input of the encoder | shape, type | meaning |
    |---|---|---|
    | patches | [N,3*P*P] float32 | channel, row, column of each pixel |
    | coords | [N,2] int64 | row and column of each patch |
    | taps | [N,4] int64 | the four learned positions around each patch |
    | tap_weights | [N,4] float32 | the weights of these positions; their sum is 1 |

    Attributes:
        patch_size: pixels of each side of a patch, P.
        merge_size: patches of each side of a square, which becomes one row.
        sizing: how a size is chosen, see ``SIZINGS``.
        least_pixels, most_pixels: limits for the picture after it was resized.
        positions_side: side of the square of learned positions.
        align_corners: whether the corners of the grid are at the first and last learned positions.
    """

    kind: str = "grid"
    patch_size: int
    merge_size: int
    sizing: str
    least_pixels: int
    most_pixels: int
    positions_side: int
    align_corners: bool = False

    @property
    def unit(self) -> int:
        """Pixels of each side of a square."""
        return self.patch_size * self.merge_size

    @property
    def encoder_inputs(self) -> Tensors:
        return {
            PATCHES: TensorSpec(FLOAT32, ("N", NUM_CHANNELS * self.patch_size**2)),
            COORDS: TensorSpec(INT64, ("N", 2)),
            TAPS: TensorSpec(INT64, ("N", 4)),
            TAP_WEIGHTS: TensorSpec(FLOAT32, ("N", 4)),
        }

    def check(self, where: str) -> None:
        self.check_values(where)
        for name in ("patch_size", "merge_size", "positions_side"):
            check_counts({name: getattr(self, name)}, where, _MOST_SIDE)
        check_counts({"most_pixels": self.most_pixels}, where, _MOST_ROWS * self.unit**2)
        check_counts({"most_pixels": self.most_pixels}, where, _MOST_PIXELS)
        check_counts({"least_pixels": self.least_pixels}, where, self.most_pixels)
        if self.sizing not in SIZINGS:
            raise UnknownEntryError("sizing", self.sizing, where)

    def size(self, size: Size) -> Size:
        """Return the size for a picture: whole squares, the area in the limits, a like aspect."""
        unit, least_pixels, most_pixels = self.unit, self.least_pixels, self.most_pixels
        height, width = SIZINGS[self.sizing](size, unit)
        nearest = round(height / unit) * unit, round(width / unit) * unit
        if math.prod(nearest) > most_pixels:
            factor = math.sqrt(height * width / most_pixels)
            height, width = (math.floor(side / factor / unit) * unit for side in (height, width))
            return max(unit, height), max(unit, width)
        if math.prod(nearest) < least_pixels:
            factor = math.sqrt(least_pixels / (height * width))
            return rounded_up(height * factor, unit), rounded_up(width * factor, unit)
        return nearest

    def grid(self, size: Size) -> Grid:
        height, width = self.size(size)
        return 1, height // self.unit, width // self.unit

    def num_rows(self, size: Size) -> int:
        return math.prod(self.grid(size))

    def resized(self, picture: Pixels, resize: Resize) -> Pixels:
        return resize(picture, self.size(picture.shape[:2]), self.resample)

    def pieces(self, features: Pixels) -> list[GivenPiece]:
        """See GivenPicture; ``features``: (height, width, 3)."""
        patch, merge = self.patch_size, self.merge_size
        height, width = (side // self.unit for side in features.shape[:2])
        shape = NUM_CHANNELS, height, merge, patch, width, merge, patch
        squares = self.normalized(features).reshape(shape).transpose(1, 4, 2, 5, 0, 3, 6)
        patches = squares.reshape(-1, NUM_CHANNELS * patch**2)
        return [self.piece(patches, height * merge, width * merge)]

    def piece(self, patches: NDArray[np.float32], height: int, width: int) -> GivenPiece:
        """Return the piece of patches, (height * width, 3 * P * P), in the order of squares."""
        merge = self.merge_size
        places = np.indices((height, width))  # (2, height, width)
        squares = places.reshape(2, height // merge, merge, width // merge, merge)
        coords = squares.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
        rows, row_weights = self._taps(coords[:, 0], height)
        columns, weights = self._taps(coords[:, 1], width)
        taps = rows[:, :, None] * self.positions_side + columns[:, None, :]
        tap_weights = row_weights[:, :, None] * weights[:, None, :]
        inputs: dict[str, NDArray[np.generic]] = {
            PATCHES: patches,
            COORDS: coords,
            TAPS: taps.reshape(-1, 4),
            TAP_WEIGHTS: tap_weights.reshape(-1, 4),
        }
        return GivenPiece(inputs, height * width // merge**2)

    def _taps(self, index: Ints, length: int) -> tuple[Ints, NDArray[np.float32]]:
        """Return the two learned positions around places on an axis, (n, 2), and their weights.

        Example: 2 places on an axis of 4 learned positions. With aligned corners the last place is
        at 3: positions [3, 3], weights [1, 0]. Without, the places are at 0.5 and 2.5: positions
        [0, 1] and [2, 3], all weights 0.5.
        """
        place, side = index.astype(np.float32), self.positions_side
        if self.align_corners:
            place = place * (side - 1) / np.float32(max(length - 1, 1))
        else:
            place = (place + np.float32(0.5)) * side / np.float32(length) - np.float32(0.5)
        low = np.floor(place)
        around = low[:, None] + np.arange(2, dtype=np.float32)
        weights = np.maximum(1 - np.abs(place[:, None] - around), 0)
        return around.astype(np.int64).clip(0, side - 1), weights


def mrope_positions(
    token_ids: Sequence[int], placeholder_token_id: int, grids: Sequence[Grid]
) -> Ints:
    """Return positions in time, height and width of a prompt up to its last given row, (3, end).

    A text token has the same position on all axes. Rows of a picture begin at the next position on
    each axis; the text after it continues after the largest position. With placeholders P and the
    grid (1, 1, 2), the tokens [7, P, P, 8] have the positions [[0, 1, 1], [0, 1, 1], [0, 1, 2]] up
    to the last P; token 8 is at 3.

    InputError: there are more or fewer placeholders than rows, or there is text within a picture.
    """
    places = (np.array(token_ids) == placeholder_token_id).nonzero()[0]
    counts = [math.prod(grid) for grid in grids]
    if len(places) != sum(counts):
        raise InputError(
            f"a prompt has {len(places)} placeholders, expected {sum(counts)}, one for each row of "
            f"{len(grids)} pictures"
        )
    parts: list[Ints] = []
    end = position = 0
    for picture_places, grid in zip(np.split(places, np.cumsum(counts)[:-1]), grids, strict=True):
        if picture_places[-1] - picture_places[0] + 1 != len(picture_places):
            raise InputError("a prompt has text between the rows of a picture; keep them together")
        num_text = int(picture_places[0]) - end
        parts.append(np.tile(np.arange(num_text) + position, (3, 1)))
        position, end = position + num_text, int(picture_places[-1]) + 1
        parts.append(np.indices(grid).reshape(3, -1) + position)
        position += max(grid)
    return np.concatenate(parts, axis=1)


def _from_units(size: Size, unit: int) -> Size:
    """Return the size with sides of at least one unit; first the height, then the width grows."""
    height, width = size
    if height < unit:
        height, width = unit, round(width * unit / height)
    if width < unit:
        height, width = round(height * unit / width), unit
    return height, width


SIZINGS: dict[str, Callable[[Size, int], Size]] = {
    "area": lambda size, unit: size,  # Qwen3-VL
    "area-from-units": _from_units,  # PaddleOCR-VL
}
"""By name in the manifest: computes the size with which ``GridPicture.size`` begins."""
