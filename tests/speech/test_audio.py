"""Audio files of every form: their samples, or one line that says what is wrong."""

import io
import os
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dsbd_ort.audio.audio_files import read_audio
from dsbd_runtime.errors import InputError
from tests.speech.audio_files import FLOAT, MU_LAW, PCM, chunk, file_of, wav_bytes
from tests.speech.sounds import noise, speech_like, tone

soundfile = pytest.importorskip("soundfile")
SPEECH = speech_like(0.7)
FORMS = [(PCM, 8), (PCM, 16), (PCM, 24), (PCM, 32), (FLOAT, 32), (FLOAT, 64)]


@pytest.mark.parametrize(("kind", "bits"), FORMS)
@pytest.mark.parametrize("extensible", [False, True])
def test_every_form_of_wav(kind: int, bits: int, extensible: bool) -> None:
    data = wav_bytes(SPEECH, kind=kind, bits=bits, extensible=extensible)
    found = read_audio(data)
    assert found.dtype == np.float32 and found.shape == SPEECH.shape
    step = 0 if kind == FLOAT else 2.0 ** (1 - bits)
    np.testing.assert_allclose(found, SPEECH, rtol=0, atol=step / 2 + 1e-7)
    of_library, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    assert rate == 16_000
    np.testing.assert_array_equal(found, of_library)


@pytest.mark.parametrize("format", ["FLAC", "OGG", "MP3", "AIFF", "AU", "CAF", "W64", "RF64"])
def test_other_formats_by_soundfile(format: str, tmp_path: Path) -> None:
    file = tmp_path / f"speech.{format.lower()}"
    soundfile.write(file, SPEECH, 16_000, format=format)
    wanted, _ = soundfile.read(file, dtype="float32")
    for source in (file, file.read_bytes()):
        np.testing.assert_allclose(read_audio(source), wanted, rtol=0, atol=1e-7)


def test_mu_law_in_a_wav_file(tmp_path: Path) -> None:
    file = tmp_path / "call.wav"
    soundfile.write(file, SPEECH, 16_000, subtype="ULAW")
    np.testing.assert_array_equal(read_audio(file), soundfile.read(file, dtype="float32")[0])


def test_sources_are_paths_bytes_and_files(tmp_path: Path) -> None:
    data, file = wav_bytes(SPEECH), tmp_path / "speech.wav"
    file.write_bytes(data)
    wanted = read_audio(data)
    for source in (file, str(file), bytearray(data), io.BytesIO(data)):
        np.testing.assert_array_equal(read_audio(source), wanted)  # type: ignore[arg-type]
    with file.open("rb") as opened:
        np.testing.assert_array_equal(read_audio(opened), wanted)
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as end:
            end.write(data)

    writer = threading.Thread(target=write)
    writer.start()
    with os.fdopen(reading, "rb") as pipe:
        np.testing.assert_array_equal(read_audio(pipe), wanted)
    writer.join()


@pytest.mark.parametrize("channels", [2, 6, 8])
def test_channels_are_mixed(channels: int) -> None:
    parts = [noise(0.1, seed) for seed in range(channels)]
    data = wav_bytes(np.stack(parts, axis=1), kind=FLOAT, bits=32)
    np.testing.assert_allclose(read_audio(data), np.mean(parts, axis=0), rtol=0, atol=1e-7)


@pytest.mark.parametrize("rate", [8_000, 44_100, 48_000])
def test_other_rates_are_resampled(rate: int) -> None:
    both = np.stack([tone(1.0, 300.0, rate)] * 2, axis=1)
    found = read_audio(wav_bytes(both, rate, kind=FLOAT, bits=32))
    np.testing.assert_allclose(found[400:-400], tone(1.0, 300.0)[400:-400], rtol=0, atol=5e-5)
    assert len(read_audio(wav_bytes(both, rate), 8_000)) == 8_000


def test_other_chunks_are_passed_over() -> None:
    before = chunk(b"LIST", b"INFOISFT\x05\0\0\0Lavf\0") + chunk(b"junk", b"odd")
    np.testing.assert_array_equal(
        read_audio(wav_bytes(SPEECH, before=before) + chunk(b"LIST", b"a_tail")),
        read_audio(wav_bytes(SPEECH)),
    )


def _flac(samples: np.ndarray) -> bytes:
    return file_of(samples, "FLAC")


WHOLE = wav_bytes(SPEECH)
BAD = {  # what: (bytes of a file, the message)
    "text": (b"What is said here?\n" * 90, "is not audio that can be read"),
    "zeros": (bytes(5000), "is not audio that can be read"),
    "JSON": (b'{"a": 1}', "is not audio that can be read"),
    "empty": (b"", "is an empty file"),
    "no samples": (wav_bytes(np.zeros(0)), "has no samples"),
    "no samples, but a list": (
        wav_bytes(np.zeros(0)) + chunk(b"LIST", b"INFOISFT\5\0\0\0Lavf\0\0"),
        "has no samples",
    ),
    "no samples, AIFF": (file_of(np.zeros(0), "AIFF"), "has no samples"),
    "1 kHz": (wav_bytes(SPEECH, 1_000), "sampling rate of 1000 Hz; expected 4000 to 384000"),
    "0 Hz": (wav_bytes(SPEECH, 0), "sampling rate of 0 Hz"),
    "4 GHz": (wav_bytes(SPEECH, 2**32 - 1, bits=8), "4294967295 Hz"),
    "12 channels": (wav_bytes(np.zeros((99, 12))), "has 12 channels; expected 1 to 8"),
    "0 channels": (WHOLE[:22] + b"\0\0" + WHOLE[24:], "has 0 channels"),
    "NaN": (wav_bytes(np.array([0.0, np.nan]), kind=FLOAT, bits=32), "nan; expected numbers from "),
    "beyond float32": (wav_bytes(np.full(9, 1e300), kind=FLOAT, bits=64), r"sample 1e\+300; exp"),
    "infinity": (wav_bytes(np.array([0, -np.inf]), kind=FLOAT, bits=64), "has the sample -inf"),
    "cut": (WHOLE[:-1001], "is cut: its header has 22400 bytes of samples, the file 21399"),
    "cut in its head": (WHOLE[:30], "ends before its samples begin: it is cut"),
    "cut after its head": (WHOLE[:36], "ends before its samples begin: it is cut"),
    "cut FLAC": (_flac(noise(3.0))[:20_000], "is (damaged or )?cut"),
    "no format": (WHOLE[:12] + WHOLE[36:], "without a format before its samples"),
    "short format": (WHOLE[:12] + chunk(b"fmt ", b"\1\0") + WHOLE[36:], "has 2 bytes"),
    "contradiction": (WHOLE[:32] + b"\7\0" + WHOLE[34:], "1 channels of 16 bits take 2 bytes"),
    "cut mu-law": (wav_bytes(SPEECH, kind=MU_LAW, bits=8)[:60], "is (damaged or )?cut|not audio"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_audio_is_one_line(kind: str, tmp_path: Path) -> None:
    data, message = BAD[kind]
    for name in ("bad.wav", "bad.raw"):  # of another name as of none
        file = tmp_path / name
        file.write_bytes(data)
        with pytest.raises(InputError, match=message) as raised:
            read_audio(file)
        assert str(raised.value).startswith(f"the audio {file} ") and "\n" not in str(raised.value)
    with pytest.raises(InputError, match=message):
        read_audio(data)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "pointer.wav").write_text("version https://git-lfs.github.com/spec/v1\n")
    for path, message in (
        (tmp_path / "none.wav", "No such file"),
        (tmp_path, "Is a directory"),
        ("a\0b", "cannot be read"),
        (tmp_path / "pointer.wav", "is a pointer of git LFS, .* run 'git lfs pull' in"),
    ):
        with pytest.raises(InputError, match=message):
            read_audio(path)


@pytest.mark.parametrize(
    "source", [None, 5, io.StringIO("text")], ids=lambda given: type(given).__name__
)
def test_what_is_no_source(source: object) -> None:
    with pytest.raises(InputError, match="the audio is a"):
        read_audio(source)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [wav_bytes, _flac])
def test_an_audio_that_is_too_long(make) -> None:
    data = make(np.zeros(16_000 * 3))
    assert len(read_audio(data, max_seconds=3.0)) == 48_000
    with pytest.raises(InputError, match=r"lasts 3 s, more than the 2 s that are read at a time"):
        read_audio(data, max_seconds=2.0)
    endless = wav_bytes(np.zeros(16_000 * 9), num_data_bytes=0xFFFF_FFFF)
    with pytest.raises(InputError, match="more than the 2 s"):
        read_audio(endless, max_seconds=2.0)


def test_reading_stops_when_it_is_cancelled() -> None:
    data, asked = wav_bytes(noise(9.0), 16_000), []

    def is_cancelled() -> bool:
        asked.append(len(asked))
        return len(asked) > 1

    with pytest.raises(InputError, match="is not needed any more"):
        read_audio(data, is_cancelled=is_cancelled)
    assert len(asked) == 2  # of three blocks


class _Failing(io.BytesIO):
    """A file whose disk fails after some bytes, or that is closed meanwhile."""

    def read(self, count: int | None = -1) -> bytes:
        if self.tell() > 20_000:
            raise OSError("Input/output error")
        return super().read(min(count or 0, 4096) if count else count)


@pytest.mark.parametrize("format", ["WAV", "FLAC", "MP3", "OGG"])
def test_a_file_that_fails_meanwhile(format: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"^the audio cannot be read: Input/output error$"):
        read_audio(_Failing(file_of(noise(20.0), format)))
    assert capfd.readouterr() == ("", "")


def _damaged(format: str) -> Iterator[bytes]:
    whole = file_of(noise(0.1), format, subtype="DOUBLE" if format != "FLAC" else None)
    for length in range(0, 200, 4):
        yield whole[:length]
    for place in range(0, 200, 4):
        for number in (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", bytes(4)):
            yield whole[:place] + number + whole[place + 4 :]


@pytest.mark.parametrize("format", ["AIFF", "CAF", "AU", "W64", "WAV", "RF64", "FLAC"])
def test_damaged_headers_print_nothing(format: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Positions before a file's beginning were a traceback of cffi on stderr."""
    num_refused = 0
    for data in _damaged(format):
        try:
            read_audio(data)
        except InputError as error:
            assert "\n" not in str(error)
            num_refused += 1
    assert num_refused > 20
    assert capfd.readouterr() == ("", "")


def test_memory_is_that_of_the_result(tmp_path: Path) -> None:
    file = tmp_path / "long.wav"
    both = np.stack([noise(30.0, rate=48_000)] * 2, axis=1)
    file.write_bytes(wav_bytes(np.tile(both, (10, 1)), 48_000, bits=24))  # 86 MB
    tracemalloc.start()
    samples = read_audio(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(samples) == 300 * 16_000
    assert peak < samples.nbytes + 40 * 2**20  # 19 MB, and blocks


WITHOUT = """
import sys
sys.modules["soundfile"] = None
from dsbd_ort.audio.audio_files import read_audio
from dsbd_runtime.errors import InputError
print(len(read_audio(sys.argv[1])))
try:
    read_audio(sys.argv[2])
except InputError as error:
    print(error)
"""


def test_without_soundfile_wav_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(WHOLE)
    (tmp_path / "a.flac").write_bytes(_flac(SPEECH))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(tmp_path / "a.wav"), str(tmp_path / "a.flac")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    number, message = done.stdout.splitlines()
    assert int(number) == len(SPEECH)
    assert message == (
        f"the audio {tmp_path / 'a.flac'} is not a WAV file of integers or floats; other formats "
        "need the package soundfile (in a checkout of dsbd-ort run: pip install -c constraints.txt "
        "-e '.[audio]'), or a conversion to WAV with: ffmpeg -i FILE -ar 16000 -ac 1 audio.wav"
    )
