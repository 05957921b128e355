"""Audio files concatenated in one file, as ``cat`` and some recorders write them."""

import io
import re
import struct
from collections.abc import Iterator
from typing import BinaryIO

from dsbd_ort.speech.mpeg_frames import MpegStream, after_id3, is_mpeg, mpeg_streams

_SIZES = {b"RIFF": "<4xI", b"FORM": ">4xI", b".snd": ">4xII"}  # of the file, by its first bytes
_PATTERNS = {  # of the first bytes, by which the beginning of another file is found
    b"fLaC": re.compile(rb"fLaC[\x00\x80]\x00\x00\x22"),
    b"OggS": re.compile(rb"OggS\x00[\x02\x03]\x00{8}"),
}
_KINDS = {*_SIZES, *_PATTERNS}
_MOST_PATTERN = 14
_CHUNK = 2**20
_TAIL = 128  # the last bytes of an MP3 file, where libmpg123 looks for a tag
_ENDLESS = 2**40


class Section:
    """Some bytes of a file as a file of its own.

    C code reads it by callbacks, which cannot raise exceptions: an error of reading is stored in
    ``error``, and the section ends there.

    is_endless: report a size of 1 TiB, so that no length is guessed from it.
    """

    def __init__(self, file: BinaryIO, begin: int, end: int, *, is_endless: bool = False) -> None:
        self._file = file
        self._begin = begin
        self._num_bytes = end - begin
        self._size = _ENDLESS if is_endless else end - begin
        self._place = 0
        self.error: OSError | None = None

    def read(self, count: int = -1) -> bytes:
        """Return the next bytes, fewer than ``count`` at the end."""
        if self._place >= self._num_bytes:
            is_tail = self._num_bytes < self._place == self._size - _TAIL
            return bytes(_TAIL if count < 0 else min(count, _TAIL)) if is_tail else b""
        left = self._num_bytes - self._place
        try:
            self._file.seek(self._begin + self._place)
            data = self._file.read(left if count < 0 else min(count, left))
        except OSError as error:
            self.error = error
            return b""
        except ValueError as error:  # it was closed meanwhile
            self.error = OSError(str(error))
            return b""
        self._place += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position; one before the beginning changes nothing."""
        place = offset + (0, self._place, self._size)[whence]
        self._place = place if place >= 0 else self._place
        return self._place

    def tell(self) -> int:
        """Return the position."""
        return self._place


def pieces(file: BinaryIO) -> Iterator[tuple[Section, MpegStream | None]]:
    """Yield the audio files within a file; for MPEG audio, with their stream.

    A file of an unknown kind is yielded as a whole.
    """
    end = file.seek(0, io.SEEK_END)
    begin = min(after_id3(file, 0), end)
    file.seek(begin)
    kind = file.read(4)
    if is_mpeg(kind) or (begin and kind not in _KINDS):
        stream = None
        for stream in mpeg_streams(file, begin, end):
            is_endless = not stream.said_samples
            yield Section(file, stream.begin, stream.end, is_endless=is_endless), stream
        if stream is not None:
            return
    begin = begin if kind in _KINDS else 0
    for place in _later_beginnings(file, kind, begin, end):
        yield Section(file, begin, place), None
        begin = place
    yield Section(file, begin, end), None


def _later_beginnings(file: BinaryIO, kind: bytes, begin: int, end: int) -> Iterator[int]:
    """Yield where further files of a kind begin, after the one at ``begin``."""
    if kind in _SIZES:
        yield from _after_sizes(file, kind, begin, end)
    elif kind in _PATTERNS:
        place_after = begin  # of an Ogg file, after the first page of the stream before
        for place in _matches(file, _PATTERNS[kind], begin, end):
            if place > place_after:  # not one of the streams that an Ogg file begins with together
                yield place
            place_after = _page_end(file, place) if kind == b"OggS" else place


def _after_sizes(file: BinaryIO, kind: bytes, place: int, end: int) -> Iterator[int]:
    while True:
        file.seek(place)
        head = file.read(12)
        if len(head) < 12:
            return
        size = sum(struct.unpack_from(_SIZES[kind], head))
        place = after_id3(file, place + size + (0 if kind == b".snd" else 8 + size % 2))
        file.seek(place)
        if place + 12 > end or file.read(4) != kind:
            return
        yield place


def _matches(file: BinaryIO, pattern: re.Pattern[bytes], begin: int, end: int) -> Iterator[int]:
    for first in range(begin, end, _CHUNK):
        file.seek(first)
        data = file.read(_CHUNK + _MOST_PATTERN - 1)
        yield from (first + each.start() for each in pattern.finditer(data))


def _page_end(file: BinaryIO, begin: int) -> int:
    file.seek(begin + 26)
    num_segments = file.read(1)
    return begin + 27 + sum(num_segments) + sum(file.read(sum(num_segments)))
