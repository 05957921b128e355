"""Picture files to pixels by Pillow, with limits that are checked before anything is decoded.

Orientation and colors are those of transformers, for pictures that it opens itself and for images
of Pillow.
"""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dsbd_errors import install_hint
from dsbd_runtime.errors import InputError
from dsbd_runtime.parts.pixel_values import NUM_CHANNELS, Pixels, Size

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_BYTES = 2**26  # of a file
MOST_PIXELS = 2**28 // 3  # from which Pillow warns of bombs; 600 dpi of A3 are 70 million
MOST_ASPECT = 200
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # EPS would run programs
_EXPECTED = "expected a file of one of BMP, GIF, JPEG, PNG, PPM, TIFF or WebP"


def read_picture(source: Any) -> Pixels:
    """Return the pixels of a picture, which nobody may change.

    source: a path, the bytes of a file, a file opened for bytes, an image of Pillow, or pixels.

    InputError: it cannot be read, is no picture, is cut, has several frames, no pixels, too many,
    or a side more than 200 times as long as the other; or Pillow is not installed.
    """
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != NUM_CHANNELS:
            raise InputError(
                f"the pixels of a picture are {source.dtype} of shape {source.shape}; expected "
                "uint8 of (height, width, 3)"
            )
        _check_size(source.shape[:2], "the picture")
        return source
    with warnings.catch_warnings():  # of what transformers reads without a word
        warnings.simplefilter("ignore")
        return _read_by_pillow(source)


def resized(pixels: Pixels, size: Size, resample: int) -> Pixels:
    """Return a picture in another size; see Resize."""
    from PIL import Image

    height, width = size
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling(resample)))


def _read_by_pillow(source: Any) -> Pixels:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        needed = install_hint("vision")
        raise InputError(f"reading pictures needs the package pillow; {needed}") from error
    name = f"the picture {Path(source)}" if isinstance(source, str | os.PathLike) else "the picture"
    is_image = isinstance(source, Image.Image)
    image = source if is_image else _opened(_bytes_of(source, name), name)
    _check(image, name)
    try:
        rgb = _on_white(image) if is_image else ImageOps.exif_transpose(image).convert("RGB")
        return np.asarray(rgb)
    except Exception as error:  # Pillow's formats share no base but this one
        raise InputError(f"{name} is damaged or cut ({error}); copy it again") from error


def _bytes_of(source: Any, name: str) -> bytes:
    try:
        if isinstance(source, str | os.PathLike):
            with Path(source).open("rb") as file:
                data: Any = file.read(MOST_BYTES + 1)
        else:
            data = source.read(MOST_BYTES + 1) if hasattr(source, "read") else source
    except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{name} cannot be read: {reason}") from error
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InputError(
            f"{name} is a {type(data).__name__}; expected a path, bytes, a file opened for bytes, "
            "an image of Pillow, or pixels"
        )
    if not 0 < len(data) <= MOST_BYTES:
        size = f"more than {MOST_BYTES} bytes" if len(data) else "no bytes"
        raise InputError(f"{name} has {size}; {_EXPECTED}, of at most {MOST_BYTES} bytes")
    return bytes(data)


def _opened(data: bytes, name: str) -> Image:
    """Return an image whose header was read."""
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(data), formats=_FORMATS)
    except UnidentifiedImageError as error:
        raise InputError(
            f"{name} is no picture that can be read, or is cut; {_EXPECTED}"
        ) from error
    except (
        Exception
    ) as error:  # Pillow's formats share no base but this one; bombs are of their own
        raise InputError(f"{name} cannot be read: {error}") from error


def _check(image: Image, name: str) -> None:
    _check_size(image.size[::-1], name)
    if getattr(image, "is_animated", False) and image.format != "MPO":  # whose others are previews
        raise InputError(
            f"{name} has several frames or pages; give each as a picture of its own, such as PNG"
        )


def _check_size(size: Size, name: str) -> None:
    height, width = size
    if not 0 < height * width <= MOST_PIXELS:
        limit = f"1 to {MOST_PIXELS}; make it smaller" if height * width else "at least 1"
        raise InputError(f"{name} has {width} x {height} pixels, expected {limit}")
    if max(size) > MOST_ASPECT * min(size):
        raise InputError(
            f"{name} has {width} x {height} pixels, expected sides of which one is at most "
            f"{MOST_ASPECT} times the other; cut it into several"
        )


def _on_white(image: Image) -> Image:
    """Return an image of Pillow in RGB; its caller has seen to its orientation."""
    from PIL import Image as images

    if "A" in image.getbands() or image.info.get("transparency") is not None:
        white = images.new("RGBA", image.size, (255, 255, 255, 255))
        image = images.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")
