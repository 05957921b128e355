"""Audio files to samples: WAV by numpy, other formats by ``soundfile``; resampled and mixed.

Files are read, mixed and resampled in blocks: only the samples grow with the audio, by 64 kB per
second at 16 kHz.
"""

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dsbd_errors import install_hint
from dsbd_errors.git_lfs import pointer_refusal
from dsbd_ort.audio import wav
from dsbd_ort.audio.pieces import MpegStream, Section, pieces
from dsbd_ort.audio.resampling import resampled
from dsbd_runtime.errors import InputError

Samples = NDArray[np.float32]
AudioSource = str | os.PathLike[str] | bytes | BinaryIO
"""A path, the bytes of a file, or an open binary file."""

Audio = NDArray[np.floating] | AudioSource
"""Samples of one channel, (n,) floats from -1 to 1 at the model's rate, or an audio file."""

SAMPLING_RATE = 16_000
MOST_SECONDS = 4 * 3600.0  # longest audio that is read; its samples take 922 MB
_LEAST_RATE, _MOST_RATE = 4_000, 384_000
_MOST_CHANNELS = 8
_LOUDEST = 2.0**31  # beyond 32-bit integers stored as floats
_MOST_PIECES = 1000
_BLOCK_FRAMES = 65_536
_FFMPEG = "ffmpeg -i FILE -ar 16000 -ac 1 audio.wav"


@dataclass(frozen=True)
class _Opened:
    """An opened audio file.

    num_frames: samples of a channel, None if unknown.
    blocks: (frames, num_channels) float32 or float64 each.
    """

    sampling_rate: int
    num_channels: int
    num_frames: int | None
    blocks: Iterator[NDArray[np.floating]]


def read_audio(
    source: AudioSource,
    sampling_rate: int = SAMPLING_RATE,
    *,
    max_seconds: float = MOST_SECONDS,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> Samples:
    """Return the samples of an audio file, mixed to one channel, (n,) float32 from -1 to 1.

    They are read-only, so that a transcription need not copy them. WAV files of integers or floats
    need no package; FLAC, MP3, Ogg and others need ``soundfile``, of the extra ``audio``. If a file
    is a concatenation of several files, all are read.

    max_seconds: longer audio is refused as soon as its length is known.
    is_cancelled: called for each block; once it returns True, reading ends with an InputError.

    InputError: the file cannot be read, is not audio or is cut; it has no samples, too many, or
    some that are not finite; its sampling rate or number of channels is unusual.
    """
    with contextlib.ExitStack() as stack:
        file, name = _opened_file(source, stack)
        blocks = _resampled_pieces(file, name, sampling_rate, max_seconds)
        try:
            samples = _joined(blocks, sampling_rate, max_seconds, name, is_cancelled)
        except OSError as error:  # such as a folder
            raise InputError(f"{name} cannot be read: {error.strerror or error}") from error
    if not len(samples):
        raise InputError(f"{name} has no samples; record it again")
    samples.flags.writeable = False
    return samples


def _resampled_pieces(
    file: BinaryIO, name: str, sampling_rate: int, max_seconds: float
) -> Iterator[Samples]:
    if not file.read(1):
        raise InputError(f"{name} is an empty file")
    for index, (section, stream) in enumerate(pieces(file)):
        if index >= _MOST_PIECES:
            raise InputError(
                f"{name} consists of more than {_MOST_PIECES} files one after another; "
                f"write it as one with: {_FFMPEG}"
            )
        try:
            with contextlib.ExitStack() as stack:
                opened = _opened_audio(section, stream, name, stack)
                _check(opened, name, max_seconds)
                mixed = (_mixed(block, name) for block in opened.blocks)
                yield from resampled(mixed, opened.sampling_rate, sampling_rate)
        finally:  # soundfile takes a read error for the end of the file
            if section.error is not None:
                raise section.error


def _opened_file(source: AudioSource, stack: contextlib.ExitStack) -> tuple[BinaryIO, str]:
    """Return a file that can seek, at its start, and the name of the audio in messages."""
    if isinstance(source, bytes | bytearray | memoryview):
        return io.BytesIO(source), "the audio"
    if isinstance(source, str | os.PathLike):
        name = f"the audio {Path(source)}"
        try:
            opened = stack.enter_context(Path(source).open("rb"))
        except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{name} cannot be read: {reason}") from error
        if reason := pointer_refusal(Path(source)):
            raise InputError(f"{name} cannot be read: {reason}")
        return opened, name
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


def _opened_audio(
    section: Section, stream: MpegStream | None, name: str, stack: contextlib.ExitStack
) -> _Opened:
    if wav.is_wav(section) and (wav_format := wav.read_format(section, name)) is not None:
        return _Opened(
            wav_format.sampling_rate,
            wav_format.num_channels,
            wav_format.num_frames,
            wav.frames(section, wav_format),
        )
    section.seek(0)
    if stream is not None and stream.said_samples is not None:
        missing = stream.said_samples - stream.num_samples
        if missing > stream.frame_samples:  # one: counts may include the frame of the header
            raise _is_cut(name, stream.num_samples, stream.said_samples)
    return _opened_by_soundfile(section, stream, name, stack)


def _is_cut(name: str, num_read: int, num_frames: int) -> InputError:
    return InputError(
        f"{name} is damaged or cut: it has {num_read} of the {num_frames} samples that its header "
        f"says; copy it again, or save the readable part with: {_FFMPEG}"
    )


def _opened_by_soundfile(
    section: Section, stream: MpegStream | None, name: str, stack: contextlib.ExitStack
) -> _Opened:
    soundfile = _soundfile(name)
    try:
        opened = stack.enter_context(soundfile.SoundFile(section))
    except soundfile.LibsndfileError as error:
        raise InputError(
            f"{name} is not audio that can be read ({_reason(error)}); expected WAV, FLAC, MP3, "
            f"Ogg or AIFF; convert other formats with: {_FFMPEG}"
        ) from error
    num_frames: int | None = int(opened.frames)
    if stream is not None and not stream.said_samples:
        num_frames = stream.num_samples
    elif not 0 <= opened.frames < 2**62:
        num_frames = None
    if num_frames != opened.frames:  # soundfile would seek after every block by the wrong number
        opened.seekable = lambda: False

    blocks = _blocks_of_soundfile(opened, num_frames, name)
    return _Opened(int(opened.samplerate), int(opened.channels), num_frames, blocks)


def _blocks_of_soundfile(
    opened: Any, num_frames: int | None, name: str
) -> Iterator[NDArray[np.floating]]:
    """Yield blocks, (frames, channels) float32; in all there should be ``num_frames`` frames."""
    num_read = 0
    try:
        if opened.seekable():
            opened.seek(0)  # else Opus begins with the lead-in that its decoder needs
        while len(block := opened.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)):
            num_read += len(block)
            yield block
    except _soundfile(name).LibsndfileError as error:
        raise InputError(
            f"{name} is damaged or cut after {num_read / opened.samplerate:.1f} s "
            f"({_reason(error)}); copy it again, or save the readable part with: {_FFMPEG}"
        ) from error
    if num_frames and num_frames - num_read > wav.MOST_MISSING_S * opened.samplerate:
        raise _is_cut(name, num_read, num_frames)


def _soundfile(name: str) -> ModuleType:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: its library libsndfile is missing
        raise InputError(
            f"{name} is not a WAV file of integers or floats; other formats need the package "
            f"soundfile ({install_hint('audio')}), or a conversion to WAV with: {_FFMPEG}"
        ) from error
    module: ModuleType = soundfile
    return module


def _reason(error: Any) -> str:
    return str(getattr(error, "error_string", error)).strip().rstrip(".")


def _check(opened: _Opened, name: str, max_seconds: float) -> None:
    if not _LEAST_RATE <= opened.sampling_rate <= _MOST_RATE:
        raise InputError(
            f"{name} has a sampling rate of {opened.sampling_rate} Hz; expected {_LEAST_RATE} to "
            f"{_MOST_RATE}, 16000 or more for the full range of speech"
        )
    if not 1 <= opened.num_channels <= _MOST_CHANNELS:
        raise InputError(
            f"{name} has {opened.num_channels} channels; expected 1 to {_MOST_CHANNELS}, which are "
            f"mixed to one; choose some, or mix them with: {_FFMPEG}"
        )
    if opened.num_frames is not None:
        _check_length(opened.num_frames / opened.sampling_rate, max_seconds, name)


def _check_length(seconds: float, max_seconds: float, name: str) -> None:
    if seconds > max_seconds:
        raise InputError(
            f"{name} lasts {seconds:.0f} s, more than the {max_seconds:.0f} s that are read at a "
            "time; cut it: ffmpeg -i FILE -f segment -segment_time 3600 -c copy part%03d.wav"
        )


def _mixed(block: NDArray[np.floating], name: str) -> Samples:
    """Return the mean of the channels, (frames,) float32; ``block`` is (frames, channels)."""
    largest = np.abs(block).max(initial=0.0)
    if not largest <= _LOUDEST:  # NaN compares as False
        value = block[~(np.abs(block) <= _LOUDEST)][0]
        raise InputError(
            f"{name} has the sample {value:g}; expected numbers from -1 to 1; write it again"
        )
    block = block.astype(np.float32, copy=False)
    mixed: Samples = block[:, 0] if block.shape[1] == 1 else block.mean(axis=1, dtype=np.float32)
    return mixed


def _joined(
    blocks: Iterator[Samples],
    rate: int,
    max_seconds: float,
    name: str,
    is_cancelled: Callable[[], bool],
) -> Samples:
    """Return blocks as one array. It grows with the blocks, because headers may be wrong."""
    samples = np.empty(0, np.float32)
    num_samples = 0
    for block in blocks:
        if is_cancelled():
            raise InputError(f"{name} is not needed any more")
        end = num_samples + len(block)
        _check_length(end / rate, max_seconds + 1 / rate, name)
        if end > len(samples):
            samples.resize(end + end // 4, refcheck=False)
        samples[num_samples:end] = block
        num_samples = end
    samples.resize(num_samples, refcheck=False)
    return samples


def read_samples(
    audio: Audio, sampling_rate: int, *, max_seconds: float = MOST_SECONDS
) -> NDArray[np.float32]:
    """Return the samples of an audio, (n,) float32 at the model's rate; InputError: not valid.

    A writeable array is copied, because it is read while the audio is transcribed.
    """
    if not isinstance(audio, np.ndarray):
        return read_audio(audio, sampling_rate, max_seconds=max_seconds)
    if audio.ndim != 1 or audio.dtype.kind != "f" or not len(audio):
        raise InputError(
            f"the samples are {audio.dtype} of shape {audio.shape}; expected floats from -1 to 1 "
            f"in one dimension, mono audio at {sampling_rate} Hz, at least one"
        )
    samples = audio.astype(np.float32, copy=audio.flags.writeable)
    if not (np.isfinite(samples.min()) and np.isfinite(samples.max())):  # NaN is both
        place = int(np.flatnonzero(~np.isfinite(samples))[0])
        raise InputError(f"sample {place} is {samples[place]}; expected finite numbers")
    return samples
