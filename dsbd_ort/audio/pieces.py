"""Audio files that are concatenated in one file, as ``cat`` and some recorders write them.

The length of an MPEG stream (MP3, MP2) may be in its first frame (Xing, Info, VBRI). If not, its
frames are counted, because their bit rate may change. This module decodes nothing.
"""

import io
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import BinaryIO, NamedTuple

_SYNC = re.compile(rb"\xff[\xe2-\xe7\xf2-\xf7\xfa-\xff][\x10-\x1b\x20-\x2b\x30-\x3b\x40-\x4b"
                   rb"\x50-\x5b\x60-\x6b\x70-\x7b\x80-\x8b\x90-\x9b\xa0-\xab\xb0-\xbb\xc0-\xcb"
                   rb"\xd0-\xdb\xe0-\xeb]")  # fmt: skip
"""Three bytes that may begin a frame. Reserved versions, layers and rates and free format do not
match."""
_RATES = (44_100, 48_000, 32_000)
_KBITS = {  # (whether version 1, layer): the bit rates of indices 1 to 14
    (True, 1): tuple(range(32, 449, 32)),
    (True, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (False, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (False, 3): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_SIDE_BYTES = {(True, False): 32, (True, True): 17, (False, False): 17, (False, True): 9}
"""Bytes between the header of a frame and its Xing header, by (version 1, mono)."""
_HEAD_BYTES = 54  # bytes of a frame up to the end of the number of frames in its header
_LEAST_SEARCH, _MOST_SEARCH = 2**10, 2**16  # bytes searched at a time; the next frame is near


class _Frame(NamedTuple):
    """A frame by its header: its bytes, samples of a channel, and the properties of its stream."""

    num_bytes: int
    num_samples: int
    kind: tuple[bool, int, int, bool]  # version 1, layer, sampling rate, mono


@dataclass(frozen=True)
class MpegStream:
    """Consecutive frames of one kind, in the bytes from ``begin`` to ``end``.

    num_samples: samples of a channel in the complete frames, without the header frame.
    said_samples: number of samples that the header frame states, 0 if it states none; None without
        a header frame.
    frame_samples: samples of a channel in one frame.
    """

    begin: int
    end: int
    num_samples: int
    said_samples: int | None
    frame_samples: int


def after_id3(file: BinaryIO, begin: int) -> int:
    """Return the place after the ID3v2 tag at ``begin``; without a tag, ``begin`` itself."""
    file.seek(begin)
    head = file.read(10)
    if len(head) < 10 or head[:3] != b"ID3":
        return begin
    size = sum((byte & 0x7F) << (7 * i) for i, byte in enumerate(reversed(head[6:])))
    return begin + 10 + size + (10 if head[5] & 0x10 else 0)  # with a footer


def mpeg_streams(file: BinaryIO, begin: int, end: int) -> Iterator[MpegStream]:
    """Yield the streams in the bytes from ``begin`` to ``end``, without the tags between them."""
    place = _next_frame(file, begin, end)
    while place is not None:
        stream = _stream(file, place, end)
        if stream.num_samples > stream.frame_samples:  # one frame: counts may include the header
            yield stream
        place = _next_frame(file, stream.end, end)


def _stream(file: BinaryIO, begin: int, end: int) -> MpegStream:
    file.seek(begin)
    head = file.read(_HEAD_BYTES)
    first = _frame(head[:4])
    assert first is not None  # ``_next_frame`` checked it
    said = _said_frames(head, first)
    place = begin if said is None else begin + first.num_bytes
    num_frames = 0
    while not said or num_frames < said:
        file.seek(place)
        head = file.read(_HEAD_BYTES)
        frame = _frame(head[:4])
        if frame is None or frame.kind != first.kind or place + frame.num_bytes > end:
            break
        if num_frames and _said_frames(head, frame) is not None:  # the header of the next stream
            break
        place, num_frames = place + frame.num_bytes, num_frames + 1
    spf = first.num_samples
    return MpegStream(begin, max(place, begin + 1), num_frames * spf, said and said * spf, spf)


def _next_frame(file: BinaryIO, begin: int, end: int) -> int | None:
    """Return the place of the first frame that a frame of the same kind follows, or None."""
    first, size = after_id3(file, begin), _LEAST_SEARCH
    while first < end:
        file.seek(first)
        data = file.read(size + 3)
        for match in _SYNC.finditer(data):
            place = match.start()
            if (frame := _frame(data[place : place + 4])) is None:
                continue
            file.seek(first + place + frame.num_bytes)
            after = _frame(file.read(4))
            if after is not None and after.kind == frame.kind:
                return first + place
        first, size = first + size, min(2 * size, _MOST_SEARCH)
    return None


@lru_cache(maxsize=1024)
def _frame(header: bytes) -> _Frame | None:
    """Return the frame that begins with these four bytes; None if they begin no frame."""
    if len(header) < 4 or not _SYNC.match(header):
        return None
    version, layer = header[1] >> 3 & 3, 4 - (header[1] >> 1 & 3)
    is_first = version == 3
    bits = 1000 * _KBITS[is_first, layer][(header[2] >> 4) - 1]
    rate = _RATES[header[2] >> 2 & 3] >> {3: 0, 2: 1, 0: 2}[version]
    padding = header[2] >> 1 & 1
    kind = (is_first, layer, rate, header[3] >> 6 == 3)
    if layer == 1:
        return _Frame(4 * (12 * bits // rate + padding), 384, kind)
    num_samples = 576 if layer == 3 and not is_first else 1152
    return _Frame(num_samples // 8 * bits // rate + padding, num_samples, kind)


def _said_frames(head: bytes, frame: _Frame) -> int | None:
    """Return the number of frames that a header frame states, 0 if none; None: not a header."""
    is_first, layer, _, is_mono = frame.kind
    if layer != 3:
        return None
    xing = head[4 + _SIDE_BYTES[is_first, is_mono] :]
    if xing[:4] in (b"Xing", b"Info") and len(xing) >= 12:
        flags, number = struct.unpack_from(">II", xing, 4)
        return int(number) if flags & 1 else 0
    if head[36:40] == b"VBRI" and len(head) >= 54:
        return int.from_bytes(head[50:54], "big")
    return None


_SIZES = {b"RIFF": "<4xI", b"FORM": ">4xI", b".snd": ">4xII"}  # a file's size, by its first bytes
_PATTERNS = {  # first bytes of a file, to search for the beginning of the next file
    b"fLaC": re.compile(rb"fLaC[\x00\x80]\x00\x00\x22"),
    b"OggS": re.compile(rb"OggS\x00[\x02\x03]\x00{8}"),
}
_KINDS = {*_SIZES, *_PATTERNS}
_MOST_PATTERN = 14
_CHUNK = 2**20
_TAIL = 128  # the last bytes of an MP3 file, where libmpg123 looks for a tag
_ENDLESS = 2**40


class Section:
    """Some bytes of a file as a separate file; with ``is_endless`` it reports a size of 1 TiB.

    C code reads it with callbacks, which cannot raise exceptions. So a read error is stored in
    ``error``, and the section ends there.
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
        """Move to a position; a position before the beginning is ignored."""
        place = offset + (0, self._place, self._size)[whence]
        self._place = place if place >= 0 else self._place
        return self._place

    def tell(self) -> int:
        return self._place


def pieces(file: BinaryIO) -> Iterator[tuple[Section, MpegStream | None]]:
    """Yield the audio files within a file, MPEG audio with its stream; other kinds as one file."""
    end = file.seek(0, io.SEEK_END)
    begin = min(after_id3(file, 0), end)
    file.seek(begin)
    kind = file.read(4)
    if _SYNC.match(kind) or (begin and kind not in _KINDS):
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
    if kind in _SIZES:
        yield from _after_sizes(file, kind, begin, end)
    elif kind in _PATTERNS:
        place_after = begin  # for Ogg, the place after the previous stream's first page
        for place in _matches(file, _PATTERNS[kind], begin, end):
            if place > place_after:  # else one of several streams at the beginning of an Ogg file
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
