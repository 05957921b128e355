"""Bytes of audio files: WAV in every form that is read, and in some that are not."""

import io
import struct

import numpy as np
from numpy.typing import NDArray

PCM, FLOAT, MU_LAW, EXTENSIBLE = 1, 3, 7, 0xFFFE


def wav_bytes(
    samples: NDArray[np.floating],
    rate: int = 16_000,
    *,
    kind: int = PCM,
    bits: int = 16,
    extensible: bool = False,
    num_data_bytes: int | None = None,
    before: bytes = b"",
) -> bytes:
    """Return a WAV file of samples from -1 to 1, (n,) or (n, channels).

    num_data_bytes: what the header says instead of the truth; before: chunks in front of samples.
    """
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    data = stored(samples, kind, bits)
    frame_bytes = channels * bits // 8
    fields = struct.pack("<HHIIHH", kind, channels, rate, rate * frame_bytes, frame_bytes, bits)
    if extensible:
        fields = struct.pack("<H", EXTENSIBLE) + fields[2:]
        guid = struct.pack("<H", kind) + bytes.fromhex("000000001000800000aa00389b71")
        fields += struct.pack("<HHI", 22, bits, 0) + guid
    said = len(data) if num_data_bytes is None else num_data_bytes
    chunks = chunk(b"fmt ", fields) + before + b"data" + struct.pack("<I", said) + data
    return b"RIFF" + struct.pack("<I", (4 + len(chunks)) & 0xFFFF_FFFF) + b"WAVE" + chunks


def file_of(
    samples: NDArray[np.floating], format: str, rate: int = 16_000, **options: object
) -> bytes:
    """Return a file of a format that soundfile writes."""
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format, **options)
    return file.getvalue()


def chunk(name: bytes, content: bytes) -> bytes:
    return name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


def stored(samples: NDArray[np.floating], kind: int, bits: int) -> bytes:
    if kind == FLOAT:
        return samples.astype(f"<f{bits // 8}").tobytes()
    scaled = np.round(samples.astype(np.float64) * 2 ** (bits - 1))
    integers = np.clip(scaled, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1).astype(np.int64)
    if bits == 8:
        return (integers + 128).astype(np.uint8).tobytes()
    as_bytes = integers.astype("<i8").reshape(-1, 1).view(np.uint8)
    return as_bytes[:, : bits // 8].tobytes()
