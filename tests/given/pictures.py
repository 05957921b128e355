"""Pictures, and conversations with them."""

import base64
from typing import Any

from PIL import Image

from tests.pictures.files import drawn, file_of

QUESTION = "What does the picture show?"


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return drawn(height, width, seed=seed)


def png(image: Image.Image) -> bytes:
    return file_of(image)


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def asked(*pictures: object, text: str = QUESTION) -> list[dict[str, Any]]:
    """Return a conversation: a user's pictures, and a question."""
    parts: list[dict[str, Any]] = [{"type": "image", "image": each} for each in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def asked_by_url(url: str) -> list[dict[str, Any]]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [part, {"type": "text", "text": QUESTION}]}]
