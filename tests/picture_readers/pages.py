"""Pictures of pages, and messages with them."""

from typing import Any

import numpy as np
from PIL import Image


def page(seed: int = 0, size: tuple[int, int] = (90, 40)) -> Image.Image:
    """Return a picture of so many columns and rows: lines of ink on paper that is not white."""
    width, height = size
    rng = np.random.default_rng(seed)
    pixels = rng.integers(180, 256, (height, width, 3), dtype=np.uint8)
    is_ink = (np.arange(height)[:, None] % 8 < 3) & (rng.random((height, width)) < 0.5)
    pixels[is_ink] //= 4
    return Image.fromarray(pixels)


def message(picture: Any, text: str | None = None) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image", "image": picture}]
    if text is not None:
        parts.append({"type": "text", "text": text})
    return [{"role": "user", "content": parts}]
