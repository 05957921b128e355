"""Audio whose headers have no length, a wrong one, or that of one file of several."""

import io
import struct

import numpy as np
import pytest

from dsbd_ort.audio.audio_files import read_audio
from dsbd_ort.audio.pieces import Section
from dsbd_runtime.errors import InputError
from tests.speech.audio_files import FLOAT, PCM, file_of, wav_bytes
from tests.speech.sounds import noise, speech_like

pytest.importorskip("soundfile")
SPEECH = speech_like(0.7)
WHOLE = wav_bytes(SPEECH)
SIZE = 40  # of a WAV file's samples, where it stands
FRAME = 576  # samples of an MP3 frame at 16 kHz
DELAY = 1105  # samples by which an MP3 encoder and decoder delay, without a header to say so


def swelling(loud_first: bool) -> np.ndarray:
    """Two seconds of noise, the one a thousandth as loud as the other: their bit rates differ."""
    parts = noise(1.0), noise(1.0, seed=1) / 1000
    return np.concatenate(parts if loud_first else parts[::-1])


def mp3(samples: np.ndarray, mode: str = "VARIABLE", rate: int = 16_000) -> bytes:
    return file_of(samples, "MP3", rate, bitrate_mode=mode, compression_level=0.5)


def without_header(data: bytes) -> bytes:
    """Return an MP3 file whose header is a frame of silence, which says nothing of the length."""
    name = b"Xing" if b"Xing" in data else b"Info"
    at = data.index(name)
    return data[:at] + bytes(120) + data[at + 120 :]


@pytest.mark.parametrize("loud_first", [False, True])
@pytest.mark.parametrize("mode", ["VARIABLE", "CONSTANT"])
def test_an_mp3_without_a_header_is_read_to_its_end(mode: str, loud_first: bool) -> None:
    """The length that a decoder guesses from its first frame was taken for known."""
    data = mp3(swelling(loud_first), mode)
    wanted = read_audio(data)
    found = read_audio(without_header(data))
    assert len(wanted) == 32_000 and len(found) % FRAME == 0
    np.testing.assert_allclose(found[FRAME + DELAY :][:32_000], wanted, rtol=0, atol=1e-6)
    assert 0 <= len(found) - FRAME - DELAY - 32_000 < 3 * FRAME


def test_a_whole_mp3_of_44_1_khz_without_a_header() -> None:
    """Its frames differ by a byte, so the guess was a few samples too long: "cut"."""
    data = without_header(mp3(noise(1.0, rate=44_100), "CONSTANT", 44_100))
    num_frames = -(-(44_100 + DELAY) // 1152) + 1
    assert abs(len(read_audio(data)) * 44_100 / 16_000 / 1152 - num_frames) < 1.01


def test_an_mp3_whose_header_knows_more_is_cut() -> None:
    data = mp3(noise(2.0))
    with pytest.raises(InputError, match=r"is damaged or cut: it has \d+ of the \d+ samples"):
        read_audio(data[: len(data) // 2])
    at = data.index(b"Xing") + 8
    (number,) = struct.unpack_from(">I", data, at)
    one_more = data[:at] + struct.pack(">I", number + 1) + data[at + 4 :]  # counts the header
    np.testing.assert_array_equal(read_audio(one_more)[:32_000], read_audio(data))


KINDS = {
    "MP3": lambda samples: mp3(samples),
    "MP3 without a header": lambda samples: without_header(mp3(samples)),
    "FLAC": lambda samples: file_of(samples, "FLAC"),
    "Ogg Vorbis": lambda samples: file_of(samples, "OGG"),
    "Ogg Opus": lambda samples: file_of(samples, "OGG", subtype="OPUS"),
    "WAV": wav_bytes,
    "WAV, mu-law": lambda samples: file_of(samples, "WAV", subtype="ULAW"),
    "AIFF": lambda samples: file_of(samples, "AIFF"),
    "AU": lambda samples: file_of(samples, "AU"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_files_one_after_another_are_all_read(kind: str) -> None:
    parts = [KINDS[kind](noise(0.5 + seed / 10, seed)) for seed in range(3)]
    wanted = np.concatenate([read_audio(part) for part in parts])
    found = read_audio(b"".join(parts))
    assert len(wanted) >= 1.8 * 16_000
    if kind == "MP3 without a header":  # one stream to its decoder, whose filter goes on
        assert len(found) == len(wanted)
        np.testing.assert_allclose(found[: 7 * FRAME], wanted[: 7 * FRAME], rtol=0, atol=1e-6)
    else:
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    "between", [b"", b"ID3\4\0\0\0\0\x10\0" + bytes(2048), b"TAG" + bytes(125)]
)
def test_mp3_files_of_other_forms_and_tags_between(between: bytes) -> None:
    parts = [
        mp3(noise(0.4)),
        without_header(mp3(noise(0.5, rate=24_000), "CONSTANT", 24_000)),
        mp3(np.stack([noise(0.6, rate=44_100)] * 2, axis=1), rate=44_100),
    ]
    wanted = np.concatenate([read_audio(part) for part in parts])
    np.testing.assert_array_equal(read_audio(between.join(parts) + between), wanted)
    if between.startswith(b"ID3"):
        np.testing.assert_array_equal(read_audio(between + between.join(parts)), wanted)


@pytest.mark.parametrize("kind", ["FLAC", "Ogg Vorbis", "WAV"])
def test_an_id3_tag_before_other_formats(kind: str) -> None:
    one, tag = KINDS[kind](noise(0.5)), b"ID3\4\0\0\0\0\1\0" + bytes(128)
    wanted = read_audio(one)
    for number, data in ((1, tag + one), (2, tag + one * 2), (2, (tag + one) * 2)):
        np.testing.assert_array_equal(read_audio(data), np.tile(wanted, number))


def test_a_section_returns_no_more_than_it_is_asked_for() -> None:
    """libsndfile's buffer has no room for more."""
    section = Section(io.BytesIO(bytes(4)), 0, 4, is_endless=True)
    for count, wanted in ((10, 10), (128, 128), (500, 128)):
        section.seek(-128, io.SEEK_END)
        assert len(section.read(count)) == wanted


def test_a_file_of_too_many_files() -> None:
    one = wav_bytes(np.zeros(2))
    assert len(read_audio(one * 1000)) == 2000
    with pytest.raises(InputError, match="consists of more than 1000 files one after another"):
        read_audio(one * 1001)


def test_all_files_together_may_be_too_long() -> None:
    one = file_of(noise(1.0), "FLAC")
    assert len(read_audio(one * 2, max_seconds=2.0)) == 32_000
    with pytest.raises(InputError, match="lasts 3 s, more than the 2 s"):
        read_audio(one * 3, max_seconds=2.0)


def test_a_flac_file_that_does_not_know_its_length() -> None:
    """As an encoder writes it to a pipe."""
    samples = noise(5.0)
    data = bytearray(file_of(samples, "FLAC"))
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    np.testing.assert_array_equal(read_audio(data), read_audio(file_of(samples, "FLAC")))


@pytest.mark.parametrize(("kind", "bits"), [(PCM, 16), (PCM, 24), (FLOAT, 32)])
@pytest.mark.parametrize("size", [0, 0x7FFF_F000, 0x7FFF_FFFF, 0xFFFF_FFFF])
def test_a_wav_file_that_does_not_know_its_length(kind: int, bits: int, size: int) -> None:
    data = wav_bytes(SPEECH, kind=kind, bits=bits, num_data_bytes=size)
    wanted = read_audio(wav_bytes(SPEECH, kind=kind, bits=bits))
    np.testing.assert_array_equal(read_audio(data), wanted)
    zeros = wav_bytes(np.zeros(400), kind=kind, bits=bits, num_data_bytes=size)
    np.testing.assert_array_equal(read_audio(zeros), np.zeros(400, np.float32))


@pytest.mark.parametrize("size", [0, 2**64 - 1])
def test_an_rf64_file_that_does_not_know_its_length(size: int) -> None:
    data = file_of(SPEECH, "RF64")
    at = data.index(b"ds64") + 16
    unknown = data[:at] + struct.pack("<Q", size) + data[at + 8 :]
    np.testing.assert_array_equal(read_audio(unknown), read_audio(data))
    with pytest.raises(InputError, match="is cut: its header has 22400 bytes of samples"):
        read_audio(data[:-1000])


@pytest.mark.parametrize("too_many", [1, 8, 36, 44, 600])
@pytest.mark.parametrize("subtype", ["PCM_16", "ULAW"])
def test_a_size_that_is_a_few_bytes_too_large(too_many: int, subtype: str) -> None:
    data = file_of(SPEECH, "WAV", subtype=subtype)
    too_many = too_many if subtype == "PCM_16" else too_many // 2
    at = data.index(b"data") + 4
    (size,) = struct.unpack_from("<I", data, at)
    wrong = data[:at] + struct.pack("<I", size + too_many) + data[at + 4 :]
    np.testing.assert_array_equal(read_audio(wrong), read_audio(data))
    wrong = data[:at] + struct.pack("<I", size + 700) + data[at + 4 :]
    with pytest.raises(InputError, match=f"is cut: its header has {size + 700} bytes of samples"):
        read_audio(wrong)
