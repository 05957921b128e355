"""Texts to learn from: their files, held-out texts, and their tokens on disk.

A text is a file, or a line of a ``*.jsonl`` file. Such a line is a string, an object with a field
``text``, or a chat: an object with a field ``messages``. One text in twenty is held out, by the
hash of its name. If there are too few texts for that, the last twentieth of all tokens and of all
prompts of chats is held out.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_errors.git_lfs import pointer_refusal
from dsbd_errors.text_files import opened_text
from dsbd_export.chats import Chat, ChatTokens, Prompts
from dsbd_export.errors import ExportError
from dsbd_runtime.bundle_files.durable_files import put_in_place
from dsbd_runtime.text.tokenizer import Tokenizer

Tokens = NDArray[np.uint32]

MIN_TRAIN_TOKENS = 2_000
MIN_HELD_OUT_TOKENS = 200
_PIECE_CHARS = 2**18  # characters encoded at a time, to bound memory
_HELD_OUT_BYTES = 13  # of the 256 values of a hash's first byte: 5 %
CHATS, SOURCES, WINDOWS = "chats", "sources", "windows of sound"
MIN_TRAIN_PROMPTS = 16
MIN_HELD_OUT_PROMPTS = 4
_TRAIN, _HELD_OUT = _SIDES = "train", "held_out"
_TOKENS, _PROMPTS, _ENDS = ".bin", "_prompts.bin", "_prompts_ends.bin"  # follow a side's name
_HELD_OUT_SHARE = 20  # a twentieth of all tokens, if texts are too few


@dataclass(frozen=True)
class TextFile:
    """A file, and its name in the user's folder or pattern; the name decides about holding out."""

    path: Path
    name: str


@dataclass(frozen=True, kw_only=True)
class TokenStreams:
    """Tokens of all texts, one after the other, memory-mapped."""

    # train, held_out: (num_tokens,) uint32
    train: Tokens
    held_out: Tokens
    # prompts of chats, or sources
    train_prompts: Prompts
    held_out_prompts: Prompts
    split: str

    @property
    def has_texts(self) -> bool:
        return bool(len(self.train))

    @property
    def has_chats(self) -> bool:
        """Return whether there are prompts of chats or sources."""
        return bool(len(self.train_prompts))


def find_files(data: tuple[str, ...], exclude: tuple[str, ...]) -> list[TextFile]:
    """Return the files of ``data``, sorted by name; ExportError if an entry matches no file."""
    name_by_path: dict[Path, str] = {}
    for entry in data:
        files = list(_files_of(entry))
        if not files:
            raise ExportError(
                f"data={entry!r} matches no file; give a file, a folder, or a pattern such as "
                "'texts/**/*.md'"
            )
        name_by_path |= {
            file.path: file.name
            for file in files
            if not any(fnmatch.fnmatch(file.name, pattern) for pattern in exclude)
        }
    if not name_by_path:
        raise ExportError(f"exclude={', '.join(exclude)} leaves no file of data; exclude less")
    if reason := next(filter(None, map(pointer_refusal, name_by_path)), None):
        raise ExportError(reason)
    return sorted(
        (TextFile(path, name) for path, name in name_by_path.items()), key=lambda f: f.name
    )


def readable_files(option: str, data: Sequence[str]) -> list[TextFile]:
    """Return the UTF-8 files of an option; its name ``option`` is part of ExportErrors."""
    try:
        files = find_files(tuple(data), ())
        check_readable(files)
    except ExportError as error:
        raise ExportError(f"{option}: {error}") from error
    return files


def _files_of(entry: str) -> Iterator[TextFile]:
    path = Path(entry).expanduser()
    if path.is_file():
        yield TextFile(path, path.name)
        return
    # The root is the folder before the first part with wildcards.
    plain = itertools.takewhile(lambda part: not glob.has_magic(part), path.parts[:-1])
    root, pattern = Path(*plain), str(path)
    if path.is_dir():
        root, pattern = path, os.path.join(glob.escape(str(path)), "**")
    for name in glob.glob(pattern, recursive=True):
        if os.path.isfile(name):
            yield TextFile(Path(name), Path(name).relative_to(root).as_posix())


def is_held_out(name: str) -> bool:
    """Return whether a text belongs to the held-out 5 %, by the hash of its name alone."""
    return hashlib.sha256(name.encode()).digest()[0] < _HELD_OUT_BYTES


def check_readable(files: list[TextFile]) -> None:
    """Raise ExportError with the number of files that are not UTF-8, if any."""
    reasons = {file.path: reason for file in files if (reason := _why_not_utf_8(file.path))}
    if reasons:
        path, reason = next(iter(reasons.items()))
        raise ExportError(
            f"{len(reasons)} of {len(files)} files of data are not UTF-8, the first is {path} "
            f"({reason}); convert them, choose others by a pattern, or exclude them"
        )


def _why_not_utf_8(path: Path) -> str:
    try:
        with path.open("rb") as opened, opened_text(opened) as file:
            while file.read(_PIECE_CHARS):
                pass
    except UnicodeError as error:
        return str(error)
    return ""


def texts_of(file: TextFile) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield (name, pieces) of every text of a file; pieces end at line ends if possible."""
    if file.path.suffix != ".jsonl":
        with file.path.open("rb") as bytes_of, opened_text(bytes_of, newline="") as opened:
            blocks = iter(lambda: opened.read(_PIECE_CHARS), "")
            yield file.name, (block + opened.readline(_PIECE_CHARS) for block in blocks)
        return
    for name, where, content in json_lines(file):
        yield name, _text_in(content, where)


def json_lines(file: TextFile) -> Iterator[tuple[str, str, Any]]:
    """Yield name, place (for error messages) and content of every line; or raise ExportError."""
    with file.path.open("rb") as opened, opened_text(opened) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file.path}:{number}"
            try:
                content = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ExportError(
                    f"{where} is invalid JSON ({error}); write one object a line"
                ) from error
            yield f"{file.name}:{number}", where, content


def _text_in(content: Any, where: str) -> Iterable[str]:
    if isinstance(content, dict) and "messages" in content:
        if "text" in content:
            raise ExportError(f"{where} has both a text and messages; write one of them")
        if not isinstance(content["messages"], list):
            raise ExportError(
                f"{where} has messages that are no list; write "
                '{"messages": [{"role": "user", "content": "Hello"}]}'
            )
        return Chat(content["messages"], where)
    text = content.get("text") if isinstance(content, dict) else content
    if not isinstance(text, str):
        raise ExportError(
            f'{where} has no text; write a string, {{"text": "..."}} or {{"messages": [...]}}'
        )
    return [text]


def write_streams(
    files: Iterable[TextFile],
    tokenizer: Tokenizer,
    chats: ChatTokens,
    eos: int | None,
    folder: Path,
) -> None:
    """Write the tokens of all texts; a text begins like a prompt and ends with ``eos``, if any."""
    with opened_sinks(folder) as sink_of:
        for file in files:
            for name, pieces in texts_of(file):
                sink = sink_of(name)
                if isinstance(pieces, Chat):
                    sink.write(chats.text(pieces))
                    for prompt in chats.prompts(pieces):
                        sink.write_prompt(prompt)
                    continue
                for number, piece in enumerate(pieces):
                    sink.write(tokenizer.encode(piece, add_special_tokens=number == 0))
                if eos is not None:
                    sink.write([eos])


@contextlib.contextmanager
def opened_sinks(folder: Path) -> Iterator[Callable[[str], Sink]]:
    """Yield a function from a text's name to its sink; ``folder`` appears at the end."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with contextlib.ExitStack() as opened:
        sinks = {side: Sink(partial, side, opened) for side in _SIDES}
        yield lambda name: sinks[_HELD_OUT if is_held_out(name) else _TRAIN]
    put_in_place(partial, folder)


class Sink:
    """Writes the files of the training texts, or of the held-out texts."""

    def __init__(self, folder: Path, side: str, opened: contextlib.ExitStack) -> None:
        self._tokens, self._prompts, self._ends = (
            opened.enter_context((folder / f"{side}{ending}").open("wb"))
            for ending in (_TOKENS, _PROMPTS, _ENDS)
        )
        self._end = 0

    def write(self, ids: list[int]) -> None:
        self._tokens.write(np.array(ids, dtype=np.uint32).tobytes())

    def write_prompt(self, ids: list[int]) -> None:
        self._prompts.write(np.array(ids, dtype=np.uint32).tobytes())
        self._end += len(ids)
        self._ends.write(np.array([self._end], dtype=np.int64).tobytes())


def open_streams(folder: Path, kind: str = CHATS) -> TokenStreams:
    """Return the tokens in a folder of ``opened_sinks``; ExportError if there are too few."""
    train, held_out = (_mapped(folder / f"{side}{_TOKENS}", np.uint32) for side in _SIDES)
    prompts, held_out_prompts = (
        Prompts(
            _mapped(folder / f"{side}{_PROMPTS}", np.uint32),
            _mapped(folder / f"{side}{_ENDS}", np.int64),
        )
        for side in _SIDES
    )
    split = f"{_HELD_OUT_BYTES} of 256 texts, by the hash of their names"
    if len(prompts) + len(held_out_prompts):
        prompts, held_out_prompts, split = _split_prompts(prompts, held_out_prompts, split, kind)
    if (len(train) or not len(prompts)) and (
        len(held_out) < MIN_HELD_OUT_TOKENS or len(train) < MIN_TRAIN_TOKENS
    ):
        both = np.concatenate([train, held_out]) if len(held_out) else train
        begin = len(both) - max(len(both) // _HELD_OUT_SHARE, MIN_HELD_OUT_TOKENS)
        train, held_out = both[: max(begin, 0)], both[max(begin, 0) :]
        split = "the end of all texts, which are too few to leave out whole ones"
        if len(train) < MIN_TRAIN_TOKENS:
            besides = " in addition to its chats" if len(prompts) else ""
            raise ExportError(
                f"data has {len(both)} tokens{besides}, at least "
                f"{MIN_TRAIN_TOKENS + MIN_HELD_OUT_TOKENS} are needed, and millions for a good "
                "draft; give more texts"
            )
    return TokenStreams(
        train=train,
        held_out=held_out,
        train_prompts=prompts,
        held_out_prompts=held_out_prompts,
        split=split,
    )


def _split_prompts(
    train: Prompts, held_out: Prompts, split: str, kind: str
) -> tuple[Prompts, Prompts, str]:
    """Return prompts to learn from, held-out prompts, and how they were split."""
    if len(held_out) < MIN_HELD_OUT_PROMPTS:
        both = Prompts(
            np.concatenate([held_out.tokens, train.tokens]),
            np.concatenate([held_out.ends, train.ends + len(held_out.tokens)]),
        )
        count = max(len(both) // _HELD_OUT_SHARE, MIN_HELD_OUT_PROMPTS)
        train, held_out = both.without_end(min(count, len(both)))
        split = f"the end of all {kind}, which are too few to leave out whole ones"
    if len(train) < MIN_TRAIN_PROMPTS:
        counted = "prompts in chats" if kind == CHATS else kind
        raise ExportError(
            f"data has {len(train) + len(held_out)} {counted}, at least "
            f"{MIN_TRAIN_PROMPTS + MIN_HELD_OUT_PROMPTS} are needed, and thousands for a good "
            f"draft; give more {kind}"
        )
    return train, held_out, split


def _mapped(file: Path, dtype: type[np.generic]) -> NDArray[Any]:
    """Return the numbers in a file, memory-mapped unless the file is empty."""
    if not file.stat().st_size:
        return np.zeros(0, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r")


def windows(
    stream: NDArray[np.integer], count: int, length: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draw ``count`` windows of ``length`` tokens at random offsets: (count, length) int64."""
    starts = rng.integers(0, len(stream) - length + 1, size=count)
    drawn: NDArray[np.int64] = stream[starts[:, None] + np.arange(length)].astype(np.int64)
    return drawn
