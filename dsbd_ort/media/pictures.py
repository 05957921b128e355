"""Pictures: files and images to pixels with Pillow, and to rows of prompts.

Limits are checked before anything is decoded. Orientation and colors are handled as in
transformers, both for files and for Pillow images.
"""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dsbd_errors import install_hint
from dsbd_errors.git_lfs import pointer_refusal
from dsbd_ort.media.message_parts import MediaLimits, ReadMedium
from dsbd_runtime.errors import InputError
from dsbd_runtime.media.given_picture import GivenPicture
from dsbd_runtime.parts.source.pixel_values import Pixels, Size

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_BYTES = 2**26  # largest file
MOST_PIXELS = 2**28 // 3  # 256 MiB as RGB, above which Pillow warns. A3 at 600 dpi: 70 million
MOST_ASPECT = 200
_FORMATS = "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"  # others might run programs
_EXPECTED = f"expected a file of one of the formats {', '.join(_FORMATS)}"


def read_picture(source: Any) -> Pixels:
    """Return the pixels of a picture, read-only.

    source: a path, the bytes of a file, a file opened for bytes, an image of Pillow, or its pixels,
        (height, width, 3) uint8.

    InputError: the source cannot be read, is not a picture, is cut, has several frames, no pixels
    or too many, or one side more than 200 times as long as the other; or Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        hint = install_hint("vision")
        raise InputError(f"pictures need the package pillow; {hint}") from error
    name = f"the picture {Path(source)}" if isinstance(source, str | os.PathLike) else "the picture"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd tags, and sizes that are checked here
        try:
            if isinstance(source, np.ndarray):
                source = Image.fromarray(source)
            if isinstance(source, Image.Image):
                _check(source, name)
                return np.asarray(_on_white(source))
            image = Image.open(io.BytesIO(_bytes_of(source, name)), formats=_FORMATS)
            _check(image, name)
            return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        except InputError:
            raise
        except UnidentifiedImageError as error:  # its text is a memory address
            raise InputError(f"{name} is not readable as a picture; {_EXPECTED}") from error
        except Exception as error:  # errors of Pillow's formats have no other common base
            raise InputError(f"{name} is damaged, cut or too large: {error}") from error


def resized(pixels: Pixels, size: Size, resample: int) -> Pixels:
    """Return a picture in another size; see Resize."""
    from PIL import Image

    height, width = size
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling(resample)))


class PictureFrontEnd:
    """Front end of pictures; the manifest's entries contain the differences. See MediumFrontEnd."""

    part_type, noun = "image", "picture"
    shorten = "give fewer pictures, or smaller ones"

    def __init__(self, entry: GivenPicture, placeholder: str) -> None:
        self._entry, self._placeholder = entry, placeholder

    def read(self, content: Any, most_rows: int, limits: MediaLimits) -> ReadMedium:
        """See MediumFrontEnd. Only the resized pixels are kept; the entry limits their number."""
        picture, entry = read_picture(content), self._entry
        size = picture.shape[:2]
        pixels = entry.resized(picture, resized)
        return ReadMedium(
            num_rows=entry.num_rows(size),
            expansion=entry.expansion(size, self._placeholder),
            pieces=lambda: entry.pieces(pixels),
            grid=entry.grid(size),
        )


def _bytes_of(source: Any, name: str) -> bytes:
    try:
        if isinstance(source, str | os.PathLike):
            if refusal := pointer_refusal(Path(source)):
                raise InputError(f"{name} cannot be read: {refusal}")
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


def _check(image: Image, name: str) -> None:
    """Raise InputError for an image that is too large, too narrow or animated."""
    width, height = image.size
    if not 0 < width * height <= MOST_PIXELS:
        limit = f"1 to {MOST_PIXELS} pixels; make it smaller"
        raise InputError(f"{name} has {width} x {height} pixels, expected {limit}")
    if max(image.size) > MOST_ASPECT * min(image.size):
        raise InputError(
            f"{name} has {width} x {height} pixels, expected one side to be at most {MOST_ASPECT} "
            "times as long as the other; cut it into several"
        )
    if getattr(image, "is_animated", False) and image.format != "MPO":  # JPEG with previews
        raise InputError(f"{name} has several frames or pages; give each as a picture of its own")


def _on_white(image: Image) -> Image:
    """Return an image of Pillow in RGB; transparent pixels become white."""
    from PIL import Image as images

    if "A" in image.getbands() or image.info.get("transparency") is not None:
        white = images.new("RGBA", image.size, (255, 255, 255, 255))
        image = images.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")
