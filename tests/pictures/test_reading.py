"""Pictures as transformers opens them, and files that are refused in one line."""

import base64
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image

from dsbd_ort.media.pictures import MOST_BYTES, MOST_PIXELS, read_picture, resized
from dsbd_runtime.errors import InputError
from tests.pictures.files import drawn, file_of, png, png_of_16_bits
from tests.test_import_boundaries import loaded_by

ORIENTATION = 0x112


def _with_orientation(number: int) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = number
    return file_of(drawn(16, 24), "JPEG", exif=exif)


def _palette(**options: Any) -> bytes:
    return file_of(drawn(20, 30).quantize(16), **options)


FILES = {
    "RGB": file_of(drawn(20, 30)),
    "RGBA": file_of(drawn(20, 30, 4)),
    "grey": file_of(drawn(20, 30, 1)),
    "grey and alpha": file_of(drawn(20, 30, 4).convert("LA")),
    "black and white": file_of(drawn(20, 30, 1).convert("1")),
    "palette": _palette(),
    "palette, one transparent": _palette(transparency=3),
    "palette, alphas": _palette(transparency=bytes(range(0, 160, 10))),
    "16 bits of grey": png_of_16_bits(20, 30, 1),
    "16 bits of RGB": png_of_16_bits(20, 30, 3),
    "16 bits, TIFF": file_of(
        Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30)), "TIFF"
    ),
    "JPEG": file_of(drawn(20, 30), "JPEG"),
    "CMYK": file_of(drawn(20, 30).convert("CMYK"), "JPEG"),
    "CMYK, TIFF": file_of(drawn(20, 30).convert("CMYK"), "TIFF"),
    "WebP": file_of(drawn(20, 30, 4), "WEBP", lossless=True),
    "GIF": file_of(drawn(20, 30), "GIF"),
    "BMP": file_of(drawn(20, 30), "BMP"),
    "PPM": file_of(drawn(20, 30), "PPM"),
    "MPO": file_of(drawn(20, 30), "MPO", save_all=True, append_images=[drawn(10, 15)]),
    "1 x 1": file_of(drawn(1, 1)),
    "1 x 200": file_of(drawn(1, 200)),
    **{f"orientation {number}": _with_orientation(number) for number in range(1, 9)},
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_files_are_read_as_by_transformers(name: str, tmp_path: Path) -> None:
    path = tmp_path / "picture"
    path.write_bytes(FILES[name])
    expected = np.asarray(load_image(base64.b64encode(FILES[name]).decode()))
    for source in (path, str(path), FILES[name], io.BytesIO(FILES[name])):
        pixels = read_picture(source)
        assert pixels.dtype == np.uint8 and np.array_equal(pixels, expected)


def test_images_of_pillow_are_converted_as_by_transformers() -> None:
    """Transparency is white, and the orientation is that of the image: the caller loaded it."""
    for name in ("RGBA", "grey", "palette, one transparent", "orientation 6"):
        image = Image.open(io.BytesIO(FILES[name]))
        expected = convert_to_rgb(image, return_numpy=True)
        assert np.array_equal(read_picture(image), expected)
    pixels = np.asarray(drawn(5, 6))
    assert np.array_equal(read_picture(pixels), pixels)


def test_an_orientation_turns_the_size() -> None:
    assert read_picture(_with_orientation(1)).shape == (16, 24, 3)
    assert read_picture(_with_orientation(6)).shape == (24, 16, 3)


def test_resizing_is_that_of_pillow() -> None:
    image = drawn(40, 30)
    for resample in range(6):
        expected = np.asarray(image.resize((25, 10), resample))
        assert np.array_equal(resized(np.asarray(image), (10, 25), resample), expected)


def _frames(file_format: str) -> bytes:
    others = [drawn(8, 8, seed=1), drawn(8, 8, seed=2)]
    return file_of(drawn(8, 8), file_format, save_all=True, append_images=others)


def _gif_bomb() -> bytes:
    """Return a GIF whose one frame of a few bytes says that it has 65,535 x 65,535 pixels."""
    file = bytearray(file_of(drawn(8, 8), "GIF"))
    file[6:10] = b"\xff\xff\xff\xff"
    return bytes(file)


WAV = b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x80\x3e\0\0\0\x7d\0\0\2\0\x10\0data\0\0\0\0"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a sound": (lambda: WAV, "the picture is not readable as a picture; expected a file of one"),
    "a text": (lambda: b"hello", "not readable as a picture"),
    "no bytes": (lambda: b"", "the picture has no bytes"),
    "too many bytes": (lambda: b"\0" * (MOST_BYTES + 1), "more than 67108864 bytes"),
    "cut in the header": (lambda: FILES["RGB"][:20], "cut or too large: Truncated File Read"),
    "cut PNG": (lambda: FILES["RGB"][:-200], "damaged, cut or too large: "),
    "cut JPEG": (lambda: FILES["JPEG"][:-200], "damaged, cut or too large: "),
    "cut WebP": (lambda: FILES["WebP"][:-200], "damaged, cut or too large: "),
    "cut TIFF": (lambda: FILES["16 bits, TIFF"][:100], "damaged, cut or too large: "),
    "a header alone": (lambda: png(200, 100), "damaged, cut or too large: "),
    "50,000 x 50,000": (lambda: png(50_000, 50_000), "too large: .*2500000000 pixels"),
    "10,000 x 10,000": (
        lambda: png(10_000, 10_000),
        "10000 x 10000 pixels, expected 1 to 89478485",
    ),
    "no pixels": (lambda: png(0, 10), "0 x 10 pixels|not readable"),
    "no pixels, BMP": (lambda: _bmp_of_no_pixels(), "0 x 8 pixels|not readable"),
    "1 x 201": (lambda: file_of(drawn(1, 201)), "201 x 1 pixels, .* at most 200 times as long"),
    "201 x 1": (lambda: file_of(drawn(201, 1)), "1 x 201 pixels, .* at most 200 times as long"),
    "bomb": (_gif_bomb, "too large: .* pixels|65535 x 65535 pixels"),
    "animated GIF": (lambda: _frames("GIF"), "several frames or pages"),
    "animated PNG": (lambda: _frames("PNG"), "several frames or pages"),
    "animated WebP": (lambda: _frames("WEBP"), "several frames or pages"),
    "pages": (lambda: _frames("TIFF"), "several frames or pages"),
    "PostScript": (lambda: file_of(drawn(8, 8), "EPS"), "not readable as a picture"),
    "no file": (
        lambda: "/nowhere/page.png",
        r"the picture /nowhere/page.png cannot be read: No such",
    ),
    "a folder": (lambda: Path("/"), "the picture / cannot be read: Is a directory"),
    "NUL": (lambda: "a\0b", "cannot be read: "),
    "a number": (lambda: 5, "the picture is a int; expected a path, bytes"),
    "a text file": (lambda: io.StringIO("abc"), "the picture is a str; expected a path, bytes"),
    "floats": (lambda: np.zeros((8, 8, 3)), "Cannot handle this data type"),
}


def _bmp_of_no_pixels() -> bytes:
    file = bytearray(file_of(drawn(8, 8), "BMP"))
    file[18:22] = bytes(4)
    return bytes(file)


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_one_line(name: str) -> None:
    make, expected = REFUSED[name]
    with pytest.raises(InputError, match=expected) as caught:
        read_picture(make())
    assert "\n" not in str(caught.value) and " at 0x" not in str(caught.value)


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    (tmp_path / "page.png").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(InputError, match=r"page\.png is a pointer of git LFS, .* 'git lfs pull'"):
        read_picture(tmp_path / "page.png")


def test_nothing_is_decoded_of_a_picture_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded"))
    for name in ("10,000 x 10,000", "1 x 201", "pages"):
        with pytest.raises(InputError):
            read_picture(REFUSED[name][0]())


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r"need the package pillow; .*\[vision\]"):
        read_picture(b"")


def test_pillow_is_imported_when_a_picture_is_read() -> None:
    assert "PIL" not in loaded_by("import dsbd_ort.media.pictures")


@pytest.mark.long
def test_the_largest_picture() -> None:
    side = int(MOST_PIXELS**0.5)
    assert read_picture(file_of(Image.new("L", (side, side)))).shape == (side, side, 3)
    with pytest.raises(InputError, match=f"{side + 1} x {side + 1} pixels, expected 1 to"):
        read_picture(png(side + 1, side + 1))
