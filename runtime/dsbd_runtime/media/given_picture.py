"""Pictures in prompts as tiles: their layout, inputs of the encoder, rows and text.

The caller resizes pictures, so that this module needs only numpy and is exact. Sizes are computed
with floats and rounded as transformers does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dsbd_runtime.parts.given.given_medium import MediumEntry
from dsbd_runtime.parts.given.given_prompt import GivenPiece
from dsbd_runtime.parts.part import FLOAT32, Tensors, TensorSpec
from dsbd_runtime.parts.source.pixel_values import NUM_CHANNELS, Pixels, PixelValues, Resize, Size
from dsbd_runtime.typed_json import check_counts, mismatch

PIXEL_VALUES = "pixel_values"
Grid = tuple[int, int, int]
"""Rows of a picture in time, height and width."""

_MOST_SIDE = 4096  # largest side of a tile, and of a picture before rounding up to tiles
_MOST_ROWS = 2**16  # most rows of a tile
_MARK = "<fake_token_around_image>"  # before every tile, and after the last tile
_MOST_TILES_OF_SIDE = 16  # marks for more tiles do not exist


@dataclass(frozen=True, kw_only=True)
class GivenPicture(PixelValues):
    """A picture in a prompt: base of the kinds."""

    def num_rows(self, size: Size) -> int:
        """Return the number of rows in the prompt for a picture of this size."""
        raise NotImplementedError

    def grid(self, size: Size) -> Grid | None:
        """Return the number of rows on each of three axes of positions; None: one axis."""
        return None

    def expansion(self, size: Size, placeholder: str) -> str:
        """Return the text for a picture, with one placeholder for each row."""
        return placeholder * self.num_rows(size)

    def resized(self, picture: Pixels, resize: Resize) -> Pixels:
        """Return a picture resized for ``pieces``."""
        raise NotImplementedError

    def pieces(self, features: Pixels) -> list[GivenPiece]:
        """See MediumEntry; ``features``: a result of ``resized``."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class _Tiles(GivenPicture):
    """A picture as tiles of one size, row by row, then the whole picture as one more tile.

    | input of the encoder | shape, type | meaning |
    |---|---|---|
    | pixel_values | [1,3,H,H] float32 | one tile; each tile is a piece |

    Attributes:
        tile_size: pixels of each side of a tile, H.
        tile_rows: rows of the prompt for each tile.
    """

    tile_size: int
    tile_rows: int

    @property
    def encoder_inputs(self) -> Tensors:
        shape = "T", NUM_CHANNELS, self.tile_size, self.tile_size
        return {PIXEL_VALUES: TensorSpec(FLOAT32, shape)}

    def check(self, where: str) -> None:
        self.check_values(where)
        check_counts({"tile_size": self.tile_size}, where, _MOST_SIDE)
        check_counts({"tile_rows": self.tile_rows}, where, _MOST_ROWS)

    def layout(self, size: Size) -> tuple[int, int]:
        """Return rows and columns of tiles. (0, 0): only the whole picture; (1, 1): one tile."""
        raise NotImplementedError

    def num_rows(self, size: Size) -> int:
        num_tiles = math.prod(self.layout(size))
        return self.tile_rows * (num_tiles + (num_tiles != 1))

    def expansion(self, size: Size, placeholder: str) -> str:
        rows, columns = self.layout(size)
        text, tile = "", placeholder * self.tile_rows
        for row in range(1, rows + 1):
            text += "".join(f"{_MARK}<row_{row}_col_{n + 1}>{tile}" for n in range(columns)) + "\n"
        if rows * columns == 1:
            return text
        text += "\n" if text else ""
        return f"{text}{_MARK}<global-img>{tile}{_MARK}"

    def pieces(self, features: Pixels) -> list[GivenPiece]:
        """See GivenPicture; ``features``: (T, H, H, 3)."""
        return [
            GivenPiece({PIXEL_VALUES: self.normalized(tile)[None]}, self.tile_rows)
            for tile in features
        ]

    def _cut(self, canvas: Pixels, picture: Pixels, resize: Resize) -> Pixels:
        """Return the tiles of a canvas, then the whole picture if several tiles: (T, H, H, 3)."""
        side = self.tile_size
        shape = canvas.shape[0] // side, side, canvas.shape[1] // side, side, NUM_CHANNELS
        tiles = canvas.reshape(shape).swapaxes(1, 2).reshape(-1, side, side, NUM_CHANNELS)
        if len(tiles) == 1:
            return tiles
        return np.concatenate([tiles, resize(picture, (side, side), self.resample)[None]])


@dataclass(frozen=True, kw_only=True)
class TiledPicture(_Tiles, MediumEntry):
    """Tiles of a picture that nearly keeps its aspect, as in Idefics3 and SmolVLM.

    Attributes:
        longest_edge: pixels of the longer side, before both sides are rounded up to tiles.
    """

    kind: str = "tiles"
    longest_edge: int

    def check(self, where: str) -> None:
        super().check(where)
        check_counts({"longest_edge": self.longest_edge}, where, 2 * _MOST_SIDE)

    def layout(self, size: Size) -> tuple[int, int]:
        rows, columns = (side // self.tile_size for side in self._sizes(size)[1])
        return (rows, columns) if rows * columns > 1 else (0, 0)

    def resized(self, picture: Pixels, resize: Resize) -> Pixels:
        """See GivenPicture: (T, H, H, 3). Resizes twice in turn, as transformers does."""
        for size in self._sizes(picture.shape[:2]):
            picture = resize(picture, size, self.resample)
        return self._cut(picture, picture, resize)

    def _sizes(self, size: Size) -> tuple[Size, Size]:
        """Return the two sizes that a picture gets before it is cut."""
        height, width = _with_longest(size, self.longest_edge)
        if size[1] >= size[0]:
            first = max(height + height % 2, 1), width
        else:
            first = height, max(width + width % 2, 1)
        if max(first) > _MOST_SIDE:
            first = _with_longest(first, _MOST_SIDE)
        height, width = _with_longest(first, rounded_up(max(first), self.tile_size))
        return first, (rounded_up(height, self.tile_size), rounded_up(width, self.tile_size))


@dataclass(frozen=True, kw_only=True)
class CanvasPicture(_Tiles, MediumEntry):
    """Tiles of the canvas whose aspect is nearest to the picture's, as in GraniteDocling.

    Attributes:
        least_tiles, most_tiles: limits of the tiles of a canvas.
        dense_most_tiles: used instead of ``most_tiles`` for a picture that meets two conditions.
            Its canvas with ``most_tiles`` scales its width by less than ``dense_most_scale``. And
            its width is more than ``dense_least_aspect`` and at most ``dense_most_aspect`` times
            its height. Numbers that are 0 are not used.
    """

    kind: str = "canvas-tiles"
    least_tiles: int
    most_tiles: int
    dense_most_tiles: int = 0
    dense_most_scale: float = 0.0
    dense_least_aspect: float = 0.0
    dense_most_aspect: float = 0.0

    def check(self, where: str) -> None:
        super().check(where)
        max_tiles = _MOST_TILES_OF_SIDE**2
        check_counts({"least_tiles": self.least_tiles}, where, self.most_tiles)
        check_counts({"most_tiles": self.most_tiles}, where, max_tiles)
        if self.dense_most_tiles and not self.least_tiles <= self.dense_most_tiles <= max_tiles:
            expected = f"0, or {self.least_tiles} to {max_tiles}"
            raise mismatch(expected, self.dense_most_tiles, f"{where}: dense_most_tiles")

    def layout(self, size: Size) -> tuple[int, int]:
        return self._canvas(
            size, self.dense_most_tiles if self._is_dense(size) else self.most_tiles
        )

    def resized(self, picture: Pixels, resize: Resize) -> Pixels:
        """See GivenPicture: (T, H, H, 3)."""
        height, width = (count * self.tile_size for count in self.layout(picture.shape[:2]))
        return self._cut(resize(picture, (height, width), self.resample), picture, resize)

    def _is_dense(self, size: Size) -> bool:
        aspect = size[1] / size[0]
        scale, least, most = self.dense_most_scale, self.dense_least_aspect, self.dense_most_aspect
        if not self.dense_most_tiles or (scale <= 0 and least <= 0):
            return False
        if (least > 0 and aspect <= least) or (most > 0 and aspect > most):
            return False
        width = self._canvas(size, self.most_tiles)[1] * self.tile_size
        return scale <= 0 or width / size[1] < scale

    def _canvas(self, size: Size, most_tiles: int) -> tuple[int, int]:
        """Return rows and columns of the nearest canvas, of several the largest half filled."""
        sides = range(1, min(most_tiles, _MOST_TILES_OF_SIDE) + 1)
        grids = [(rows, columns) for columns in sides for rows in sides]
        nearest, canvas = math.inf, (1, 1)
        for rows, columns in sorted(grids, key=math.prod):
            if not self.least_tiles <= rows * columns <= most_tiles:
                continue
            distance = abs(size[1] / size[0] - columns / rows)
            is_filled = math.prod(size) > 0.5 * self.tile_size**2 * rows * columns
            if distance < nearest or (distance == nearest and is_filled):
                nearest, canvas = distance, (rows, columns)
        return canvas


def rounded_up(number: float, unit: int) -> int:
    """Return the least multiple of a unit that is not below a number."""
    return math.ceil(number / unit) * unit


def _with_longest(size: Size, longest: int) -> Size:
    """Return the size with this longer side and the same aspect; the other side is rounded down."""
    height, width = size
    aspect = width / height
    if width >= height:
        return int(longest / aspect), longest
    return longest, int(longest * aspect)
