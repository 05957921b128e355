"""Pictures in prompts: their sizes, tiles and grids, inputs of the encoder, rows and positions.

The caller resizes pictures, so that everything here is numpy and exact. Sizes are computed with
floats and rounded as transformers does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.rows import Ints
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.given_medium import MediumEntry
from dsbd_runtime.parts.given_prompt import GivenPiece
from dsbd_runtime.parts.part import FLOAT32, INT64, Tensors, TensorSpec
from dsbd_runtime.parts.pixel_values import NUM_CHANNELS, Pixels, PixelValues, Resize, Size
from dsbd_runtime.typed_json import UnknownEntryError, check_counts, mismatch

PIXEL_VALUES, PATCHES, COORDS = "pixel_values", "patches", "coords"
TAPS, TAP_WEIGHTS = "taps", "tap_weights"
Grid = tuple[int, int, int]
"""Rows of a picture in time, height and width."""

_MOST_SIDE = 4096  # of a tile, or of a picture that is cut into tiles
_MOST_PIXELS = 2**26  # of a picture that is cut into patches
_MOST_ROWS = 2**16  # of a tile
_MOST_TILES_OF_SIDE = 16  # there are marks for no more


@dataclass(frozen=True, kw_only=True)
class GivenPicture(PixelValues):
    """A picture in a prompt: base of the kinds."""

    def num_rows(self, size: Size) -> int:
        """Return how many rows of the prompt a picture of this size is."""
        raise NotImplementedError

    def grid(self, size: Size) -> Grid | None:
        """Return the rows on each axis of positions; None: they have one axis."""
        return None

    def expansion(self, size: Size, placeholder: str) -> str:
        """Return the text for a picture, with one placeholder for each row."""
        raise NotImplementedError

    def resized(self, picture: Pixels, resize: Resize) -> Pixels:
        """Return a picture as ``pieces`` takes it."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class _Tiles(GivenPicture):
    """A picture as tiles of one size, of which each is a piece, and then the whole as one more.

    | input of the encoder | shape, type | meaning |
    |---|---|---|
    | pixel_values | [1,3,H,H] float32 | one tile |

    Attributes:
        tile_size: pixels of each side of a tile, H.
        tile_rows: rows of the prompt for each tile.
        tile_mark: text before every tile, and after the last.
        whole_mark: text before the tile that shows the whole picture.
    """

    tile_size: int
    tile_rows: int
    tile_mark: str = "<fake_token_around_image>"
    whole_mark: str = "<global-img>"

    @property
    def encoder_inputs(self) -> Tensors:
        shape = None, NUM_CHANNELS, self.tile_size, self.tile_size
        return {PIXEL_VALUES: TensorSpec(FLOAT32, shape)}

    def layout(self, size: Size) -> tuple[int, int]:
        """Return the rows and columns of tiles: (0, 0) for the whole alone, (1, 1) without it."""
        raise NotImplementedError

    def num_tiles(self, size: Size) -> int:
        rows, columns = self.layout(size)
        return rows * columns + (rows * columns != 1)

    def num_rows(self, size: Size) -> int:
        return self.tile_rows * self.num_tiles(size)

    def expansion(self, size: Size, placeholder: str) -> str:
        rows, columns = self.layout(size)
        mark, tile = self.tile_mark, placeholder * self.tile_rows
        lines = [
            "".join(f"{mark}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        ]
        if rows * columns == 1:
            return f"{lines[0]}\n"
        ends = "".join(f"{line}\n" for line in lines) + "\n" if lines else ""
        return f"{ends}{mark}{self.whole_mark}{tile}{mark}"

    def pieces(self, features: Pixels) -> list[GivenPiece]:
        """See MediumEntry, of tiles (T, H, H, 3)."""
        expected = self.tile_size, self.tile_size, NUM_CHANNELS
        _check_pixels(features, features.shape[1:] == expected, f"tiles, (T, {expected})")
        return [
            GivenPiece({PIXEL_VALUES: self.normalized(tile)[None]}, self.tile_rows)
            for tile in features
        ]

    def check_tiles(self, where: str) -> None:
        self.check_values(where)
        check_counts({"tile_size": self.tile_size}, where, _MOST_SIDE)
        check_counts({"tile_rows": self.tile_rows}, where, _MOST_ROWS)

    def _cut(self, canvas: Pixels, whole: Pixels | None) -> Pixels:
        """Return the tiles of a canvas, row by row, and the whole: (T, H, H, 3)."""
        side = self.tile_size
        rows, columns = canvas.shape[0] // side, canvas.shape[1] // side
        blocks = canvas.reshape(rows, side, columns, side, NUM_CHANNELS).swapaxes(1, 2)
        tiles = blocks.reshape(rows * columns, side, side, NUM_CHANNELS)
        return tiles if whole is None else np.concatenate([tiles, whole[None]])


@dataclass(frozen=True, kw_only=True)
class TiledPicture(_Tiles, MediumEntry):
    """Tiles of a picture that keeps its aspect, such as of Idefics3 and SmolVLM.

    Attributes:
        longest_edge: pixels of the longer side, before both grow to multiples of tiles.
    """

    kind: str = "tiles"
    longest_edge: int

    def check(self, where: str) -> None:
        self.check_tiles(where)
        check_counts({"longest_edge": self.longest_edge}, where, 2 * _MOST_SIDE)

    def layout(self, size: Size) -> tuple[int, int]:
        height, width = (side // self.tile_size for side in self._sizes(size)[1])
        return (height, width) if height * width > 1 else (0, 0)

    def resized(self, picture: Pixels, resize: Resize) -> Pixels:
        """See GivenPicture: (T, H, H, 3). Twice, as transformers does, and once more the whole."""
        for size in self._sizes(picture.shape[:2]):
            picture = resize(picture, size, self.resample)
        if picture.shape[0] * picture.shape[1] == self.tile_size**2:
            return picture[None]
        whole = resize(picture, (self.tile_size, self.tile_size), self.resample)
        return self._cut(picture, whole)

    def _sizes(self, size: Size) -> tuple[Size, Size]:
        """Return the sizes that a picture gets, one after the other."""
        height, width = _with_longest(size, self.longest_edge)
        if size[1] >= size[0]:
            height += height % 2
        else:
            width += width % 2
        first = max(height, 1), max(width, 1)
        if max(first) > _MOST_SIDE:
            height, width = _with_longest(first, _MOST_SIDE)
            first = max(height, 1), max(width, 1)
        height, width = _with_longest(first, _up(max(first), self.tile_size))
        return first, (_up(height, self.tile_size), _up(width, self.tile_size))


@dataclass(frozen=True, kw_only=True)
class CanvasPicture(_Tiles, MediumEntry):
    """Tiles of the canvas whose aspect is nearest to that of the picture, as GraniteDocling.

    Attributes:
        least_tiles, most_tiles: of a canvas, without the one for the whole.
        dense_most_tiles: of the canvas of a dense picture, one that a canvas of ``most_tiles``
            would shrink, in width, below ``dense_most_scale`` and whose width is more than
            ``dense_least_aspect`` and at most ``dense_most_aspect`` times its height. 0: no
            picture is dense. A bound of 0 is none.
    """

    kind: str = "canvas-tiles"
    least_tiles: int
    most_tiles: int
    dense_most_tiles: int = 0
    dense_most_scale: float = 0.0
    dense_least_aspect: float = 0.0
    dense_most_aspect: float = 0.0

    def check(self, where: str) -> None:
        self.check_tiles(where)
        most = _MOST_TILES_OF_SIDE**2
        check_counts({"least_tiles": self.least_tiles}, where, self.most_tiles)
        check_counts({"most_tiles": self.most_tiles}, where, most)
        if not (self.dense_most_tiles == 0 or self.least_tiles <= self.dense_most_tiles <= most):
            expected = f"0, or {self.least_tiles} to {most}"
            raise mismatch(expected, self.dense_most_tiles, f"{where}: dense_most_tiles")

    def layout(self, size: Size) -> tuple[int, int]:
        return self._canvas(
            size, self.dense_most_tiles if self._is_dense(size) else self.most_tiles
        )

    def resized(self, picture: Pixels, resize: Resize) -> Pixels:
        """See GivenPicture: (T, H, H, 3)."""
        side = self.tile_size
        rows, columns = self.layout(picture.shape[:2])
        canvas = resize(picture, (rows * side, columns * side), self.resample)
        is_cut = rows * columns > 1
        return self._cut(canvas, resize(picture, (side, side), self.resample) if is_cut else None)

    def _is_dense(self, size: Size) -> bool:
        height, width = size
        scale, least, most = self.dense_most_scale, self.dense_least_aspect, self.dense_most_aspect
        if not self.dense_most_tiles or (scale <= 0 and least <= 0):
            return False
        if (least > 0 and width / height <= least) or (most > 0 and width / height > most):
            return False
        columns = self._canvas(size, self.most_tiles)[1]
        return scale <= 0 or columns * self.tile_size / width < scale

    def _canvas(self, size: Size, most_tiles: int) -> tuple[int, int]:
        """Return rows and columns. Of canvases as near, the largest that the picture half fills."""
        height, width = size
        sides = range(1, min(most_tiles, _MOST_TILES_OF_SIDE) + 1)
        grids = [(rows, columns) for columns in sides for rows in sides]
        nearest, found = math.inf, (1, 1)
        for rows, columns in sorted(grids, key=math.prod):
            if not self.least_tiles <= rows * columns <= most_tiles:
                continue
            distance = abs(width / height - columns / rows)
            is_filled = width * height > 0.5 * self.tile_size**2 * rows * columns
            if distance < nearest or (distance == nearest and is_filled):
                nearest, found = distance, (rows, columns)
        return found


@dataclass(frozen=True, kw_only=True)
class GridPicture(GivenPicture, MediumEntry):
    """A picture of any size as a grid of patches, of which squares are joined to rows.

    Patches are in the order of their squares: row by row, and within each.

    | input of the encoder | shape, type | meaning |
    |---|---|---|
    | patches | [N,3*P*P] float32 | channel, row, column of each pixel |
    | coords | [N,2] int64 | row and column of each patch |
    | taps | [N,4] int64 | with learned positions: those that each patch is between |
    | tap_weights | [N,4] float32 | and their weights, whose sum is 1 |

    Attributes:
        patch_size: pixels of each side of a patch, P.
        merge_size: patches of each side of a square that is one row.
        sizing: how a size is chosen, see ``SIZINGS``.
        least_pixels, most_pixels: of the picture after it was resized.
        positions_side: of the square of learned positions; None: positions are not learned.
        align_corners: whether the corners of the grid are at the first and last of these.
    """

    kind: str = "grid"
    patch_size: int
    merge_size: int
    sizing: str
    least_pixels: int
    most_pixels: int
    positions_side: int | None = None
    align_corners: bool = False

    @property
    def unit(self) -> int:
        """Pixels of each side of a square."""
        return self.patch_size * self.merge_size

    @property
    def encoder_inputs(self) -> Tensors:
        inputs = {
            PATCHES: TensorSpec(FLOAT32, (None, NUM_CHANNELS * self.patch_size**2)),
            COORDS: TensorSpec(INT64, (None, 2)),
        }
        if self.positions_side is not None:
            inputs[TAPS] = TensorSpec(INT64, (None, 4))
            inputs[TAP_WEIGHTS] = TensorSpec(FLOAT32, (None, 4))
        return inputs

    def check(self, where: str) -> None:
        self.check_values(where)
        sides = {"patch_size": self.patch_size, "merge_size": self.merge_size}
        check_counts(sides | {"positions_side": self.positions_side or 1}, where, _MOST_SIDE)
        check_counts({"most_pixels": self.most_pixels}, where, _MOST_ROWS * self.unit**2)
        check_counts({"most_pixels": self.most_pixels}, where, _MOST_PIXELS)
        check_counts({"least_pixels": self.least_pixels}, where, self.most_pixels)
        if self.sizing not in SIZINGS:
            raise UnknownEntryError("sizing", self.sizing, where)

    def size(self, size: Size) -> Size:
        """Return the size of a picture after it was resized, in whole squares."""
        return SIZINGS[self.sizing](self, size)

    def grid(self, size: Size) -> Grid:
        height, width = self.size(size)
        return 1, height // self.unit, width // self.unit

    def num_rows(self, size: Size) -> int:
        return math.prod(self.grid(size))

    def expansion(self, size: Size, placeholder: str) -> str:
        return placeholder * self.num_rows(size)

    def resized(self, picture: Pixels, resize: Resize) -> Pixels:
        return resize(picture, self.size(picture.shape[:2]), self.resample)

    def pieces(self, features: Pixels) -> list[GivenPiece]:
        """See MediumEntry, of (height, width, 3) pixels in whole squares."""
        rows, rest = divmod(np.array(features.shape[:2]), self.unit)
        is_whole = features.shape[2:] == (NUM_CHANNELS,) and bool(rows.all() and not rest.any())
        _check_pixels(features, is_whole, f"a picture of whole squares of {self.unit} pixels")
        patch, merge, (height, width) = self.patch_size, self.merge_size, rows.tolist()
        values = self.normalized(features)
        squares = values.reshape(NUM_CHANNELS, height, merge, patch, width, merge, patch)
        patches = squares.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, NUM_CHANNELS * patch**2)
        return [self.piece(patches, height * merge, width * merge)]

    def piece(self, patches: NDArray[np.float32], height: int, width: int) -> GivenPiece:
        """Return the piece of patches, (height * width, 3 * P * P), in the order of squares."""
        merge = self.merge_size
        places = np.indices((height, width))  # (2, height, width)
        squares = places.reshape(2, height // merge, merge, width // merge, merge)
        coords = squares.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
        inputs: dict[str, NDArray[np.generic]] = {PATCHES: patches, COORDS: coords}
        if self.positions_side is not None:
            rows, row_weights = self._taps(coords[:, 0], height, self.positions_side)
            columns, weights = self._taps(coords[:, 1], width, self.positions_side)
            taps = rows[:, :, None] * self.positions_side + columns[:, None, :]
            inputs[TAPS] = taps.reshape(-1, 4)
            inputs[TAP_WEIGHTS] = (row_weights[:, :, None] * weights[:, None, :]).reshape(-1, 4)
        return GivenPiece(inputs, height * width // merge**2)

    def _taps(self, index: Ints, length: int, side: int) -> tuple[Ints, NDArray[np.float32]]:
        """Return the two learned positions around places on an axis, (n, 2), and their weights.

        Of 2 places on an axis of 4 positions, the corners aligned, the last is at 3: [3, 3] with
        the weights [1, 0]. Else they are at 0.5 and 2.5: [0, 1] and [2, 3], each 0.5.
        """
        place = index.astype(np.float32)
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

    Rows of a picture are placed from the next position on each axis. Text is on a diagonal, which
    goes on after the largest position. With placeholders P and the grid (1, 1, 2), [7, P, P, 8]
    is at [[0, 1, 1], [0, 1, 1], [0, 1, 2]]; 8 follows at 3.

    InputError: there are more or fewer placeholders than rows, or text within a picture.
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
    for own, grid in zip(np.split(places, np.cumsum(counts)[:-1]), grids, strict=True):
        if own[-1] - own[0] + 1 != len(own):
            raise InputError("a prompt has text between the rows of a picture; keep them together")
        num_text = int(own[0]) - end
        parts.append(np.tile(np.arange(num_text) + position, (3, 1)))
        position, end = position + num_text, int(own[-1]) + 1
        parts.append(np.indices(grid).reshape(3, -1) + position)
        position += max(grid)
    return np.concatenate(parts, axis=1)


def _by_area(entry: GridPicture, size: Size) -> Size:
    """Return the size whose area is within its limits, with nearly the same aspect."""
    (height, width), unit = size, entry.unit
    nearest = round(height / unit) * unit, round(width / unit) * unit
    if math.prod(nearest) > entry.most_pixels:
        factor = math.sqrt(height * width / entry.most_pixels)
        height, width = (math.floor(side / factor / unit) * unit for side in size)
        return max(unit, height), max(unit, width)
    if math.prod(nearest) < entry.least_pixels:
        factor = math.sqrt(entry.least_pixels / (height * width))
        return _up(height * factor, unit), _up(width * factor, unit)
    return nearest


def _by_area_from_units(entry: GridPicture, size: Size) -> Size:
    """Return the size by area of a picture whose sides were first raised to a unit, in turn."""
    (height, width), unit = size, entry.unit
    if height < unit:
        height, width = unit, round(width * unit / height)
    if width < unit:
        height, width = round(height * unit / width), unit
    return _by_area(entry, (height, width))


def _by_area_from_one_unit(entry: GridPicture, size: Size) -> Size:
    """Return the size by area of a picture that was first enlarged until no side is below one."""
    factor = max(entry.unit / size[0], entry.unit / size[1], 1)
    return _by_area(entry, (int(size[0] * factor), int(size[1] * factor)))


def _by_longest_edge(entry: GridPicture, size: Size) -> Size:
    """Return the size that fits into the square of ``most_pixels``; a picture is never enlarged."""
    factor = max(max(size) / math.isqrt(entry.most_pixels), 1)
    height, width = (_up(math.floor(side / factor), entry.unit) for side in size)
    return height, width


SIZINGS: dict[str, Callable[[GridPicture, Size], Size]] = {
    "area": _by_area,  # Qwen3-VL
    "area-from-units": _by_area_from_units,  # PaddleOCR-VL
    "area-from-one-unit": _by_area_from_one_unit,  # GLM-OCR
    "longest-edge": _by_longest_edge,  # LightOnOCR
}
"""How the size of a picture on a grid is chosen, by the name in the manifest."""


def _with_longest(size: Size, longest: int) -> Size:
    """Return the size with this longer side and the same aspect, the other side rounded down."""
    height, width = size
    aspect = width / height
    if width >= height:
        return int(longest / aspect), longest
    return longest, int(longest * aspect)


def _up(number: float, unit: int) -> int:
    """Return the next multiple of a unit from a number on."""
    return math.ceil(number / unit) * unit


def _check_pixels(pixels: Pixels, has_shape: bool, expected: str) -> None:
    if pixels.dtype != np.uint8 or not has_shape:
        raise InputError(
            f"the pixels of a picture are {pixels.dtype} of shape {pixels.shape}, expected uint8 "
            f"of {expected}"
        )
