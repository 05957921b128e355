"""Audio files to samples: WAV by numpy alone, other formats by ``soundfile``, resampled and mixed.

Files are read, mixed and resampled by blocks: what grows with the audio is its samples alone, 64 kB
a second at 16 kHz.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dsbd_errors import install_hint
from dsbd_ort.speech import wav
from dsbd_ort.speech.resampling import resampled
from dsbd_runtime.errors import InputError

Samples = NDArray[np.float32]
AudioSource = str | os.PathLike[str] | bytes | BinaryIO
"""A path, the bytes of a file, or an open binary file."""

SAMPLING_RATE = 16_000
MOST_SECONDS = 4 * 3600.0
"""Longest audio that is read: of its samples alone 922 MB."""
_LEAST_RATE, _MOST_RATE = 4_000, 384_000
_MOST_CHANNELS = 8
_LOUDEST = 2.0**31  # beyond integers of 32 bits that somebody stored as floats
_BLOCK_FRAMES = 65_536
_FFMPEG = "ffmpeg -i FILE -ar 16000 -ac 1 audio.wav"


@dataclass(frozen=True)
class _Opened:
    """An audio as its file has it.

    Attributes:
        sampling_rate, num_channels: of the file.
        num_frames: samples of a channel, None where the file does not say.
        blocks: of samples, (frames, num_channels) float32.
    """

    sampling_rate: int
    num_channels: int
    num_frames: int | None
    blocks: Callable[[], Iterator[NDArray[np.float32]]]


def read_audio(
    source: AudioSource,
    sampling_rate: int = SAMPLING_RATE,
    *,
    max_seconds: float = MOST_SECONDS,
) -> Samples:
    """Return the samples of an audio file, mixed to one channel, (n,) float32 from -1 to 1.

    They are read-only, so that a transcription need not copy them. WAV files of integers or floats
    are read as they are; FLAC, MP3, Ogg and others with the package ``soundfile``, of the extra
    ``audio``.

    Args:
        source: a path, the bytes of a file, or a file opened for bytes.
        sampling_rate: of the result, in Hz.
        max_seconds: a longer audio is refused, as soon as it is known to be longer.

    Raises:
        InputError: it cannot be read, is no audio, is cut, has no samples, too many or some that
            are not finite, or a sampling rate or number of channels that no speech has.
    """
    with contextlib.ExitStack() as stack:
        file, name = _opened_file(source, stack)
        opened = _opened_audio(file, name, stack)
        _check(opened, name, max_seconds)
        mixed = (_mixed(block, name) for block in opened.blocks())
        blocks = resampled(mixed, opened.sampling_rate, sampling_rate)
        seconds = opened.num_frames and opened.num_frames / opened.sampling_rate
        samples = _joined(blocks, seconds, sampling_rate, max_seconds, name)
    if not len(samples):
        raise InputError(f"{name} has no samples; record it again")
    samples.flags.writeable = False
    return samples


def _opened_file(source: AudioSource, stack: contextlib.ExitStack) -> tuple[BinaryIO, str]:
    """Return a file that can seek, at its start, and the name of the audio in messages."""
    if isinstance(source, bytes | bytearray | memoryview):
        return io.BytesIO(source), "the audio"
    if isinstance(source, str | os.PathLike):
        name = f"the audio {Path(source)}"
        try:
            return stack.enter_context(Path(source).open("rb")), name
        except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{name} cannot be read: {reason}") from error
    if not hasattr(source, "read"):
        raise InputError(
            f"the audio is a {type(source).__name__}; expected a path, bytes or a file opened for "
            "bytes"
        )
    if not isinstance(source.read(0), bytes):
        raise InputError("the audio is a file opened for text; open it for bytes: open(path, 'rb')")
    if source.seekable() and source.tell() == 0:
        return source, "the audio"
    return io.BytesIO(source.read()), "the audio"


def _opened_audio(file: BinaryIO, name: str, stack: contextlib.ExitStack) -> _Opened:
    try:
        head = file.read(1)
    except OSError as error:  # such as a folder
        raise InputError(f"{name} cannot be read: {error.strerror}") from error
    if not head:
        raise InputError(f"{name} is an empty file")
    file.seek(0)
    if wav.is_wav(file) and (found := wav.read_format(file, name)) is not None:
        return _Opened(
            found.sampling_rate,
            found.num_channels,
            found.num_frames,
            lambda: wav.frames(file, found),
        )
    file.seek(0)
    return _opened_by_soundfile(file, name, stack)


class _Nameless:
    """A file without the name by whose end soundfile would take it for raw samples."""

    def __init__(self, file: BinaryIO) -> None:
        self.read, self.seek, self.tell = file.read, file.seek, file.tell


def _opened_by_soundfile(file: BinaryIO, name: str, stack: contextlib.ExitStack) -> _Opened:
    soundfile = _soundfile(name)
    try:
        opened = stack.enter_context(soundfile.SoundFile(_Nameless(file)))
    except soundfile.LibsndfileError as error:
        raise InputError(
            f"{name} is no audio that can be read ({_reason(error)}); expected WAV, FLAC, MP3, Ogg "
            f"or AIFF; others become WAV by {_FFMPEG}"
        ) from error

    def blocks() -> Iterator[NDArray[np.float32]]:
        num_read = 0
        try:
            while len(block := opened.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)):
                num_read += len(block)
                yield block
        except soundfile.LibsndfileError as error:
            raise InputError(
                f"{name} is damaged or cut behind {num_read / opened.samplerate:.1f} s "
                f"({_reason(error)}); copy it again, or keep what is there by {_FFMPEG}"
            ) from error
        if num_read < num_frames < 2**62:  # beyond: unknown
            raise InputError(
                f"{name} is cut: it has {num_read} of the {num_frames} samples that its header "
                f"says; copy it again, or keep what is there by {_FFMPEG}"
            )

    num_frames = int(opened.frames)
    known = num_frames if 0 <= num_frames < 2**62 else None
    return _Opened(int(opened.samplerate), int(opened.channels), known, blocks)


def _soundfile(name: str) -> ModuleType:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: without its library libsndfile
        raise InputError(
            f"{name} is no WAV file of integers or floats; other formats need the package "
            f"soundfile ({install_hint('audio')}), or become WAV by {_FFMPEG}"
        ) from error
    module: ModuleType = soundfile
    return module


def _reason(error: Any) -> str:
    return str(getattr(error, "error_string", error)).strip().rstrip(".")


def _check(opened: _Opened, name: str, max_seconds: float) -> None:
    """Raise InputError for an audio that is not read, as far as its header says."""
    if not _LEAST_RATE <= opened.sampling_rate <= _MOST_RATE:
        raise InputError(
            f"{name} has a sampling rate of {opened.sampling_rate} Hz; expected {_LEAST_RATE} to "
            f"{_MOST_RATE}, 16000 and more for all of speech"
        )
    if not 1 <= opened.num_channels <= _MOST_CHANNELS:
        raise InputError(
            f"{name} has {opened.num_channels} channels; expected 1 to {_MOST_CHANNELS}, which are "
            f"mixed to one; choose some, or mix them by {_FFMPEG}"
        )
    if opened.num_frames is not None:
        _check_length(opened.num_frames / opened.sampling_rate, max_seconds, name)


def _check_length(seconds: float, max_seconds: float, name: str) -> None:
    if seconds > max_seconds:
        raise InputError(
            f"{name} lasts {seconds:.0f} s, more than the {max_seconds:.0f} s that are read at a "
            "time; cut it: ffmpeg -i FILE -f segment -segment_time 3600 -c copy part%03d.wav"
        )


def _mixed(block: NDArray[np.float32], name: str) -> Samples:
    """Return the mean of the channels, (frames,) float32."""
    largest = np.abs(block).max(initial=0.0)
    if not largest <= _LOUDEST:  # NaN compares as False
        value = block[~(np.abs(block) <= _LOUDEST)][0]
        raise InputError(
            f"{name} has the sample {value:g}; expected numbers from -1 to 1; write it again"
        )
    mixed: Samples = block[:, 0] if block.shape[1] == 1 else block.mean(axis=1, dtype=np.float32)
    return mixed


def _joined(
    blocks: Iterator[Samples], seconds: float | None, rate: int, max_seconds: float, name: str
) -> Samples:
    """Return blocks as one array; ``seconds`` of them are expected."""
    samples = np.empty(math.ceil((seconds or 0.0) * rate) + 1, np.float32)
    num_samples = 0
    for block in blocks:
        end = num_samples + len(block)
        _check_length(end / rate, max_seconds + 1 / rate, name)
        if end > len(samples):
            samples.resize(max(end, 2 * len(samples)), refcheck=False)
        samples[num_samples:end] = block
        num_samples = end
    return samples[:num_samples]
