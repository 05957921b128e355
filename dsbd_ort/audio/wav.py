"""WAV files: PCM of 8 to 32 bits and floats, read in blocks with only numpy."""

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.audio.pieces import Section
from dsbd_runtime.errors import InputError

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_FORMATS = {_PCM: (8, 16, 24, 32), _FLOAT: (32, 64)}
_UNKNOWN_SIZE = 0x7FFF_0000
"""A data chunk of this size or more, or of size 0, was written by a program that did not know the
size. Such a chunk ends with the file."""
_MOST_FORMAT_BYTES = 4096
_MOST_CHUNKS = 10_000
MOST_MISSING_S = 0.02
"""Seconds that may be missing: some writers include the header or a whole last block in sizes."""
_BLOCK_FRAMES = 65_536


@dataclass(frozen=True, kw_only=True)
class WavFormat:
    """The format of the samples in a WAV file.

    num_bytes: bytes of all samples that follow; None: up to the end of the file.
    """

    is_float: bool
    bits: int
    num_channels: int
    sampling_rate: int
    num_bytes: int | None = None

    @property
    def frame_bytes(self) -> int:
        return self.num_channels * self.bits // 8

    @property
    def num_frames(self) -> int | None:
        """Number of samples of a channel; None: up to the end of the file."""
        if self.num_bytes is None or not self.num_channels:
            return None
        return self.num_bytes // self.frame_bytes


def is_wav(file: Section) -> bool:
    """Return whether a file, now at its start, begins as a WAV file; its position is kept."""
    head = file.read(12)
    file.seek(0)
    return head[:4] in (b"RIFF", b"RF64") and head[8:] == b"WAVE"


def read_format(file: Section, name: str) -> WavFormat | None:
    """Return the format of a WAV file, and move to its first sample.

    None: another encoding, such as mu-law. InputError: the file is cut, or has no format.
    """
    file.seek(12)
    fields: bytes | None = None
    long_size = 0  # bytes of samples in files that may have more than 4 GiB (RF64)
    for _ in range(_MOST_CHUNKS):
        head = file.read(8)
        if len(head) < 8:
            break
        kind, size, begin = head[:4], int.from_bytes(head[4:], "little"), file.tell()
        if kind == b"data":
            if fields is None:
                raise InputError(f"{name} is a WAV file without a format before its samples")
            wav = _format(fields, name)
            said = long_size or (0 if size >= _UNKNOWN_SIZE else size)
            byte_rate = (
                wav.sampling_rate * wav.frame_bytes
                if wav is not None
                else int.from_bytes(fields[8:12], "little")
            )
            num_bytes = _num_bytes(file, said, byte_rate, name)
            return wav and replace(wav, num_bytes=num_bytes)
        if kind == b"fmt ":
            fields = file.read(min(size, _MOST_FORMAT_BYTES))
        if kind == b"ds64":
            long_size = int.from_bytes(file.read(16)[8:], "little") % (2**64 - 1)  # -1: unknown
        file.seek(begin + size + size % 2)  # chunks begin at even bytes
    raise InputError(f"{name} is a WAV file that ends before its samples begin: it is cut")


def _format(fields: bytes, name: str) -> WavFormat | None:
    if len(fields) < 16:
        raise InputError(f"{name} is a WAV file whose format has {len(fields)} bytes, expected 16")
    kind, num_channels, rate, _, frame_bytes, bits = struct.unpack_from("<HHIIHH", fields)
    if kind == _EXTENSIBLE and len(fields) >= 26:
        (kind,) = struct.unpack_from("<H", fields, 24)
    if bits not in _FORMATS.get(kind, ()):
        return None
    wav_format = WavFormat(
        is_float=kind == _FLOAT,
        bits=bits,
        num_channels=num_channels,
        sampling_rate=rate,
    )
    if num_channels and frame_bytes != wav_format.frame_bytes:
        raise InputError(
            f"{name} is a WAV file whose header contradicts itself: {num_channels} channels of "
            f"{bits} bits take {wav_format.frame_bytes} bytes, it says {frame_bytes}"
        )
    return wav_format


def _num_bytes(file: Section, said: int, byte_rate: int, name: str) -> int | None:
    """Return the bytes of samples that follow; None: up to the end of the file.

    said: bytes that the header states, 0 if unknown.
    byte_rate: bytes per second.
    InputError: the file is cut.
    """
    begin = file.tell()
    num_there = file.seek(0, io.SEEK_END) - begin
    is_unknown = not said and not _are_chunks(file, begin)
    file.seek(begin)
    if is_unknown:
        return None
    if said - num_there > MOST_MISSING_S * byte_rate:
        raise InputError(
            f"{name} is cut: its header has {said} bytes of samples, the file {num_there}; "
            "copy it again, or save the readable part with: ffmpeg -i FILE whole.wav"
        )
    return min(said, num_there)


def _are_chunks(file: Section, begin: int) -> bool:
    """Return whether chunks fill the file from ``begin`` on, so that there are no samples."""
    end = file.seek(0, io.SEEK_END)
    for _ in range(_MOST_CHUNKS):
        file.seek(begin)
        head = file.read(8)
        if not head[:4].strip().isalnum():  # also at the end
            break
        size = int.from_bytes(head[4:], "little")
        begin += 8 + size + size % 2
    return begin == end


def frames(file: Section, wav: WavFormat) -> Iterator[NDArray[np.floating]]:
    """Yield samples from -1 to 1 in blocks, (frames, num_channels) float32 (float64 if stored)."""
    num_left = wav.num_frames
    while num_left != 0:
        wanted = _BLOCK_FRAMES if num_left is None else min(_BLOCK_FRAMES, num_left)
        data = file.read(wanted * wav.frame_bytes)
        num_read = len(data) // wav.frame_bytes
        if not num_read:
            return
        yield _floats(data[: num_read * wav.frame_bytes], wav).reshape(-1, wav.num_channels)
        num_left = None if num_left is None else num_left - num_read


def _floats(data: bytes, wav: WavFormat) -> NDArray[np.floating]:
    if wav.is_float:
        return np.frombuffer(data, f"<f{wav.bits // 8}")
    if wav.bits == 8:  # unsigned
        return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / np.float32(128)
    if wav.bits == 24:
        padded = np.zeros((len(data) // 3, 4), np.uint8)  # as the upper bytes of 32 bits
        padded[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        integers = padded.view("<i4")[:, 0]
        return integers.astype(np.float32) / np.float32(2**31)
    stored = np.frombuffer(data, f"<i{wav.bits // 8}")
    return stored.astype(np.float32) / np.float32(2 ** (wav.bits - 1))
