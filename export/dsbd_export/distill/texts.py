"""Texts to learn from: their files, what of them is held out, and their tokens on disk.

A text is a file, or a line of a file ``*.jsonl``: a string, or an object with a field ``text``. One
in twenty is held out, by the hash of its name alone. Where texts are too few for that, the last
twentieth of all tokens is.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsbd_export.errors import ExportError
from dsbd_runtime.durable_files import put_in_place
from dsbd_runtime.tokenizer import Tokenizer

Tokens = NDArray[np.uint32]

MIN_TRAIN_TOKENS = 2_000
MIN_HELD_OUT_TOKENS = 200
_PIECE_CHARS = 2**18  # encoded at a time: the memory of the tokenizer, and of a file's text
_HELD_OUT_BYTES = 13  # of 256 values of a hash's first byte: 5 %
_TRAIN, _HELD_OUT = "train.bin", "held_out.bin"
_HELD_OUT_SHARE = 20  # one of so many tokens, where texts are too few


@dataclass(frozen=True)
class TextFile:
    """A file, and its name within what the user gave: it decides what is held out."""

    path: Path
    name: str


@dataclass(frozen=True, kw_only=True)
class TokenStreams:
    """Tokens of all texts, one behind the other, memory-mapped.

    Attributes:
        train, held_out: (num_tokens,) uint32.
        split: how they were told apart, for people.
    """

    train: Tokens
    held_out: Tokens
    split: str


def find_files(data: tuple[str, ...], exclude: tuple[str, ...]) -> list[TextFile]:
    """Return the files of ``data``, sorted by name; hidden ones only where they are named.

    Raises:
        ExportError: an entry leads to no file.
    """
    found: dict[Path, str] = {}
    for entry in data:
        files = list(_files_of(entry))
        if not files:
            raise ExportError(
                f"data={entry!r} leads to no file; give a file, a folder, or a pattern such as "
                "'texts/**/*.md'"
            )
        found |= {file.path: file.name for file in files if not _is_excluded(file, exclude)}
    if not found:
        raise ExportError(f"exclude={', '.join(exclude)} leaves no file of data; exclude less")
    return sorted((TextFile(path, name) for path, name in found.items()), key=lambda f: f.name)


def _files_of(entry: str) -> Iterator[TextFile]:
    path = Path(entry).expanduser()
    if path.is_file():
        yield TextFile(path, path.name)
        return
    root, pattern = _root_of(path), str(path)
    if path.is_dir():
        root, pattern = path, os.path.join(glob.escape(str(path)), "**")
    for name in glob.glob(pattern, recursive=True):
        if os.path.isfile(name):
            yield TextFile(Path(name), Path(name).relative_to(root).as_posix())


def _root_of(pattern: Path) -> Path:
    """Return the folder above the first part of a pattern that is not a plain name."""
    parts = itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts[:-1])
    return Path(*parts)


def _is_excluded(file: TextFile, exclude: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(file.name, pattern) for pattern in exclude)


def is_held_out(name: str) -> bool:
    """Return whether a text belongs to the held-out 5 %, by the hash of its name alone."""
    return hashlib.sha256(name.encode()).digest()[0] < _HELD_OUT_BYTES


def check_readable(files: list[TextFile]) -> None:
    """Raise ExportError for files that are not UTF-8, all of them counted."""
    wrong = [file for file in files if not _is_utf8(file.path)]
    if wrong:
        raise ExportError(
            f"{len(wrong)} of {len(files)} files of data are not UTF-8, the first is "
            f"{wrong[0].path}; convert them, choose others by a pattern, or exclude them"
        )


def _is_utf8(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            while file.read(_PIECE_CHARS):
                pass
    except UnicodeDecodeError:
        return False
    return True


def texts_of(file: TextFile) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield (name, pieces) of every text of a file; pieces end at a line's end where they can."""
    if file.path.suffix != ".jsonl":
        yield file.name, _pieces(file.path)
        return
    with file.path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                text = _text_of_line(line, f"{file.path}:{number}")
                yield f"{file.name}:{number}", iter([text])


def _pieces(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", newline="") as file:
        while piece := file.read(_PIECE_CHARS):
            yield piece + file.readline(_PIECE_CHARS)


def _text_of_line(line: str, where: str) -> str:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{where} is invalid JSON ({error}); write one object a line") from error
    text = content.get("text") if isinstance(content, dict) else content
    if not isinstance(text, str):
        raise ExportError(f'{where} has no text; write a string or {{"text": "..."}}')
    return text


def write_streams(
    files: list[TextFile], tokenizer: Tokenizer, eos: int | None, folder: Path
) -> None:
    """Write the tokens of all texts to ``folder``, which appears when it is complete.

    One piece of a text is in memory at a time. A text begins as a prompt does, and ends with
    ``eos`` where there is one.
    """
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with (partial / _TRAIN).open("wb") as train, (partial / _HELD_OUT).open("wb") as held_out:
        for file in files:
            for name, pieces in texts_of(file):
                sink = held_out if is_held_out(name) else train
                for number, piece in enumerate(pieces):
                    ids = tokenizer.encode(piece, add_special_tokens=number == 0)
                    sink.write(np.array(ids, dtype=np.uint32).tobytes())
                if eos is not None:
                    sink.write(np.array([eos], dtype=np.uint32).tobytes())
    put_in_place(partial, folder)


def open_streams(folder: Path) -> TokenStreams:
    """Return the tokens that ``write_streams`` wrote.

    Raises:
        ExportError: they are too few to learn from.
    """
    train, held_out = (_mapped(folder / name) for name in (_TRAIN, _HELD_OUT))
    split = f"{_HELD_OUT_BYTES} of 256 texts, by the hash of their names"
    if len(held_out) < MIN_HELD_OUT_TOKENS or len(train) < MIN_TRAIN_TOKENS:
        both = np.concatenate([train, held_out]) if len(held_out) else train
        begin = len(both) - max(len(both) // _HELD_OUT_SHARE, MIN_HELD_OUT_TOKENS)
        train, held_out = both[: max(begin, 0)], both[max(begin, 0) :]
        split = "the end of all texts, which are too few to leave out whole ones"
    if len(train) < MIN_TRAIN_TOKENS:
        raise ExportError(
            f"data has {len(train) + len(held_out)} tokens, at least "
            f"{MIN_TRAIN_TOKENS + MIN_HELD_OUT_TOKENS} are needed, and millions for a good draft; "
            "give more texts"
        )
    return TokenStreams(train=train, held_out=held_out, split=split)


def _mapped(file: Path) -> Tokens:
    """Return the tokens of a file; an empty one cannot be mapped."""
    if not file.stat().st_size:
        return np.zeros(0, dtype=np.uint32)
    return np.memmap(file, dtype=np.uint32, mode="r")


def windows(
    stream: NDArray[np.integer], count: int, length: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draw ``count`` windows of ``length`` tokens at random offsets: (count, length) int64."""
    starts = rng.integers(0, len(stream) - length + 1, size=count)
    drawn: NDArray[np.int64] = stream[starts[:, None] + np.arange(length)].astype(np.int64)
    return drawn
