"""Write audio files with FFmpeg, as to a pipe, and the samples that FFmpeg reads of them.

FFmpeg loses a frame where an MP3 file follows another, at the tag between them, and reads Opus
packets of the second file with the state of the first: of these each file is read alone.
"""

import io
import itertools
import sys
from pathlib import Path

import av
import numpy as np


class Pipe:
    """An output that cannot seek."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> int:
        """Take bytes."""
        self.data += data
        return len(data)


def written(samples, rate, format, codec, to_pipe=True, options=None, **codec_options) -> bytes:
    """Return a file of one channel."""
    out = Pipe() if to_pipe else io.BytesIO()
    with av.open(out, "w", format=format, options=options or {}) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono", options=codec_options)
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.rate = rate
        to_codec = av.AudioResampler(stream.format.name, "mono", rate)
        for each in [*to_codec.resample(frame), *to_codec.resample(None)]:
            each.pts = None
            container.mux(stream.encode(each))
        container.mux(stream.encode(None))
    return out.data if to_pipe else out.getvalue()


def read(data: bytes, rate: int) -> np.ndarray:
    """Return the samples; packets that cannot be decoded, such as tags, are left out."""
    to_floats = av.AudioResampler("fltp", "mono", rate)
    parts = []
    with av.open(io.BytesIO(data)) as container:
        for packet in container.demux(audio=0):
            try:
                frames = packet.decode()
            except av.error.InvalidDataError:
                continue
            parts += itertools.chain.from_iterable(map(to_floats.resample, frames))
    return np.concatenate([part.to_ndarray()[0] for part in [*parts, *to_floats.resample(None)]])


def cases():
    """Yield the name of each file, its sampling rate, and the bytes of the files it consists of."""
    noise = np.random.default_rng(0).standard_normal(6 * 44_100).astype(np.float32) / 10
    plain = {"write_xing": "0"}
    vbr = {"global_quality": "472", "flags": "+qscale"}
    for rate in (16_000, 44_100):
        samples = noise[: 6 * rate].copy()
        samples[:rate] *= 1e-5
        for name, part in (("quiet first", samples), ("loud first", samples[::-1].copy())):
            yield (
                f"VBR {name} {rate}",
                rate,
                written(part, rate, "mp3", "libmp3lame", True, plain, **vbr),
            )
        cbr = written(samples, rate, "mp3", "libmp3lame", True, plain, b="64000")
        headed = written(samples, rate, "mp3", "libmp3lame", False, **vbr)
        yield f"CBR {rate}", rate, cbr
        yield f"VBR with a header {rate}", rate, headed
        yield f"CBR after CBR {rate}", rate, cbr, cbr
        yield f"CBR after VBR with a header {rate}", rate, headed, cbr
        for to_pipe in (False, True):
            flac = written(samples, rate, "flac", "flac", to_pipe)
            yield f"FLAC, pipe {to_pipe} {rate}", rate, flac
            yield f"FLAC after FLAC, pipe {to_pipe} {rate}", rate, flac, flac
        wav = bytearray(written(samples, rate, "wav", "pcm_s16le"))
        at = wav.index(b"data") + 4
        for size in (0, 12 * rate + 44, 0xFFFF_FFFF):
            wav[at : at + 4] = size.to_bytes(4, "little")
            yield f"WAV of size {size} {rate}", rate, bytes(wav)
        for format, codec in (("au", "pcm_s16be"), ("aiff", "pcm_s16be"), ("wav", "pcm_mulaw")):
            yield (
                f"{codec} in {format} {rate}",
                rate,
                written(samples, rate, format, codec, format == "au"),
            )
    samples = noise[: 6 * 48_000 // 2]
    opus = written(samples, 48_000, "ogg", "libopus")
    yield "Opus", 48_000, opus
    yield "Opus after Opus", 48_000, opus, opus
    yield "MP2", 48_000, written(samples, 48_000, "mp2", "mp2")


if __name__ == "__main__":
    av.logging.set_level(None)
    folder = Path(sys.argv[1])
    for name, rate, *files in cases():
        (folder / f"{name}.audio").write_bytes(b"".join(files))
        samples = np.concatenate([read(file, rate) for file in files])
        np.savez(folder / f"{name}.npz", samples=samples, rate=rate)
