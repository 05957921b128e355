"""Picture files for tests: drawn by a seed, and headers of files that nobody would write."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

GREY, RGB = 0, 2  # color types of PNG
STRIPS = [(1, 200), (200, 1), (2, 400), (1, 1), (3, 7)]
PAGES = [  # heights and widths
    *[(height, 1000) for height in (5, 50, 300, 707, 1414, 3000)],
    *[(1754, 1240), (1240, 1754), (3508, 2480), (2480, 7016), (20, 4000), (4000, 20)],
]


def drawn(height: int, width: int, channels: int = 3, seed: int = 0) -> Image.Image:
    """Return noise, which shows every difference of two resizings."""
    shape = (height, width) if channels == 1 else (height, width, channels)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def file_of(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def png(width: int, height: int, *, bits: int = 8, color: int = RGB, data: bytes = b"") -> bytes:
    """Return a PNG of any header; ``data``: its rows, each after the number of its filter."""
    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(data)), (b"IEND", b"")]
    file = b"\x89PNG\r\n\x1a\n"
    for kind, body in chunks:
        file += struct.pack(">I", len(body)) + kind + body
        file += struct.pack(">I", zlib.crc32(kind + body))
    return file


def png_of_16_bits(height: int, width: int, channels: int) -> bytes:
    """Return a PNG of noise with 16 bits for each of 1 or 3 channels."""
    rows = np.random.default_rng(0).bytes(height * width * channels * 2)
    stride = width * channels * 2
    data = b"".join(b"\0" + rows[at : at + stride] for at in range(0, len(rows), stride))
    return png(width, height, bits=16, color=RGB if channels == 3 else GREY, data=data)


def random_sizes() -> list[tuple[int, int]]:
    """Return heights and widths of 1 to 6,000, with an aspect of at most 200."""
    drawn_sizes = np.exp(np.random.default_rng(0).uniform(0, np.log(6000), (500, 2))).astype(int)
    return [(h, w) for h, w in drawn_sizes.tolist() if max(h, w) <= 200 * min(h, w)]


def values_of(processor: Any) -> dict[str, Any]:
    """Return the settings of a processor of transformers that every entry has."""
    return {
        "resample": int(processor.resample),
        "rescale_factor": processor.rescale_factor,
        "mean": list(processor.image_mean),
        "std": list(processor.image_std),
    }
