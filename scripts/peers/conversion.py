"""A tool's own form of the checkpoints, kept under a key that a new twin changes."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

_PATTERNS = ("*.safetensors", "config.json", "tokenizer.json")
_KEY_LENGTH = 12


def checkpoint_key(*checkpoints: Path) -> str:
    """Return a hash of the weights, shapes and tokenizers of checkpoints."""
    digest = hashlib.sha256()
    for checkpoint in checkpoints:
        files = [file for pattern in _PATTERNS for file in sorted(checkpoint.glob(pattern))]
        for file in files:
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:_KEY_LENGTH]


def conversion_key(checkpoints: str, installs: Sequence[Sequence[str]], converter: Path) -> str:
    """Return what a conversion hangs on: the checkpoints' key, the versions, the program."""
    words = "\n".join(" ".join(words) for words in installs)
    digest = hashlib.sha256(f"{checkpoints}\n{words}\n".encode() + converter.read_bytes())
    return digest.hexdigest()[:_KEY_LENGTH]


def converted_folder(folder: Path, convert: Callable[[Path], None]) -> Path:
    """Return ``folder``, filled by ``convert`` unless it is there: it is whole or absent."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
            partial = Path(temporary) / folder.name
            partial.mkdir()
            convert(partial)
            partial.rename(folder)
    return folder
