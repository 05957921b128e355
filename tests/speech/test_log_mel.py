"""Log-mel features against those of transformers, and by windows against the whole."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from dsbd_ort.audio.log_mel import LogMel, MelForm, mel_filters
from dsbd_runtime.errors import InputError
from tests.speech.sounds import RATE, chirp, noise, speech_like, tone
from tests.speech.test_segmentation import SPEECH

WHISPER = MelForm.of_windows(SPEECH)
QWEN = replace(WHISPER, num_mels=128, least_samples=8_000)
GRANITE = replace(WHISPER, n_fft=512, least_samples=0, is_htk=True, keeps_last=True)
SOUNDS = {
    "speech-like": speech_like(7.3),
    "30 s": speech_like(30.0),
    "noise": noise(3.1),
    "faint": noise(12.0) * np.float32(1e-5),
    "silence": np.zeros(1000, np.float32),
    "one sample": np.ones(1, np.float32),
    "long": speech_like(67.77),
    "long, one sample more than hops": noise(31.0)[: 160 * 3050 + 1],
}


def of_transformers(samples: np.ndarray, num_mels: int, *, by_numpy: bool = False) -> np.ndarray:
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=num_mels)
    padded = np.pad(samples, (0, max(0, extractor.n_samples - len(samples))))
    if by_numpy:
        return extractor._np_extract_fbank_features(padded[None], "cpu")[0]
    return extractor(
        padded, sampling_rate=RATE, return_tensors="np", padding="longest", truncation=False
    ).input_features[0]


@pytest.mark.parametrize("num_mels", [80, 128])
@pytest.mark.parametrize("sound", SOUNDS)
def test_features_are_those_of_transformers(sound: str, num_mels: int) -> None:
    samples = SOUNDS[sound]
    features = LogMel(MelForm.of_windows(replace(SPEECH, num_mels=num_mels)))(samples)
    wanted = of_transformers(samples, num_mels)
    assert features.dtype == np.float32 and features.shape == wanted.shape
    np.testing.assert_allclose(features, wanted, rtol=0, atol=5e-5)


@pytest.mark.parametrize("samples", [tone(30.0), chirp(18.7)], ids=["tone", "chirp"])
def test_pure_tones_are_those_of_its_exact_form(samples: np.ndarray) -> None:
    """Far from a tone its spectrum is the rounding error of fp32, which torch is given."""
    features = LogMel(WHISPER)(samples)
    wanted = of_transformers(samples, 80, by_numpy=True)
    np.testing.assert_allclose(features, wanted, rtol=0, atol=5e-6)


@pytest.mark.parametrize("num_mels", [80, 128])
def test_filters_are_those_of_transformers(num_mels: int) -> None:
    from transformers import WhisperFeatureExtractor

    wanted = WhisperFeatureExtractor(feature_size=num_mels).mel_filters
    np.testing.assert_allclose(mel_filters(num_mels, 400, RATE), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sound", SOUNDS)
@pytest.mark.parametrize("length", [3000, 777, 1])
def test_windows_together_are_the_whole(sound: str, length: int) -> None:
    mel = LogMel(WHISPER)
    whole, windows = mel(SOUNDS[sound]), mel.windows(SOUNDS[sound])
    assert windows.num_frames == whole.shape[1]
    firsts = range(0, windows.num_frames, length)
    if length == 1:  # both ends, where samples are reflected
        firsts = [0, 1, windows.num_frames - 2, windows.num_frames - 1]
    for first in firsts:
        window = windows.window(first, length)
        part = whole[:, first : first + length]
        assert window.shape == (80, length)
        # another number of rows may take another order of sums in a product
        np.testing.assert_allclose(window[:, : part.shape[1]], part, rtol=0, atol=1e-6)
        assert not window[:, part.shape[1] :].any()


def test_memory_is_that_of_a_block() -> None:
    samples, mel = noise(300.0), LogMel(WHISPER)
    tracemalloc.start()
    windows = mel.windows(samples)
    windows.window(9000, 3000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * 2**20  # features alone take 9.6 MB, a spectrum of all of it 96


@pytest.mark.parametrize(
    "samples",
    [np.zeros(0, np.float32), np.zeros((2, 9), np.float32), np.zeros(9), np.zeros(9, np.int16)],
    ids=lambda samples: f"{samples.dtype}{samples.shape}",
)
def test_other_arrays_are_no_samples(samples: np.ndarray) -> None:
    with pytest.raises(InputError, match=r"expected float32 of one dimension, at least one sample"):
        LogMel(WHISPER)(samples)


def test_a_window_begins_in_the_audio() -> None:
    windows = LogMel(WHISPER).windows(noise(1.0))
    with pytest.raises(InputError, match="frame 3000: the audio has frames 0 to 2999"):
        windows.window(3000, 3000)


OTHER_SOUNDS = {
    "speech-like": speech_like(3.3),
    "noise after silence": np.concatenate([np.zeros(4000, np.float32), noise(3.0)[:44_123]]),
    "a whole number of hops": noise(1.0)[:14_400],
    "odd number of frames": noise(1.0)[:14_500],
}


def _of_qwen(samples: np.ndarray) -> np.ndarray:
    """Return the valid frames of transformers' extractor, (num_mels, frames)."""
    from transformers import Qwen3ASRFeatureExtractor

    found = Qwen3ASRFeatureExtractor()(
        samples, sampling_rate=RATE, return_tensors="np", padding=True, return_attention_mask=True
    )
    return found["input_features"][0][:, : int(found["attention_mask"].sum())]


@pytest.mark.parametrize("sound", OTHER_SOUNDS)
def test_qwens_form_is_that_of_transformers(sound: str) -> None:
    samples = OTHER_SOUNDS[sound]
    features, wanted = LogMel(QWEN)(samples), _of_qwen(samples)
    assert features.dtype == np.float32 and features.shape == wanted.shape
    np.testing.assert_allclose(features, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("sound", OTHER_SOUNDS)
def test_granites_form_is_that_of_torch(sound: str) -> None:
    """Its extractor needs torchaudio, whose filters of HTK are those of transformers."""
    import torch
    from transformers.audio_utils import mel_filter_bank

    samples = OTHER_SOUNDS[sound]
    filters = mel_filter_bank(257, 80, 0.0, 8000.0, RATE, norm=None, mel_scale="htk")
    window = torch.hann_window(400)
    spectrum = torch.stft(
        torch.from_numpy(samples), 512, 160, 400, window=window, return_complex=True
    )
    logs = (torch.from_numpy(filters.T).float() @ spectrum.abs() ** 2).clip(min=1e-10).log10()
    wanted = (torch.maximum(logs, logs.max() - 8.0) / 4 + 1).numpy()
    np.testing.assert_allclose(LogMel(GRANITE)(samples), wanted, rtol=0, atol=2e-5)


def test_short_sounds_of_qwen_are_half_a_second() -> None:
    features = LogMel(QWEN)(noise(0.01))
    assert features.shape == (128, 50)
    np.testing.assert_allclose(features, _of_qwen(noise(0.01)), atol=2e-5)


@pytest.mark.parametrize("form", [QWEN, GRANITE], ids=["qwen", "granite"])
def test_one_sample_has_finite_features(form: MelForm) -> None:
    assert np.isfinite(LogMel(form)(np.ones(1, np.float32))).all()
