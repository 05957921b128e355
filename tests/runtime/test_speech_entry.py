"""Entry of a speech model in the manifest, and windows of sound as sources."""

from dataclasses import replace

import numpy as np
import pytest

from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.parts.source.encoder_entry import INPUT_FEATURES, EncoderEntry, encoder_input
from dsbd_runtime.parts.source.speech_entry import SoundFeatures, SpeechEntry, check_speech

ENTRY = SpeechEntry(
    sampling_rate=16_000,
    num_mels=4,
    n_fft=400,
    hop_length=160,
    chunk_seconds=1,
    num_frames=100,
    no_timestamps_token_id=60,
    previous_token_id=58,
    no_speech_token_id=59,
    suppress_tokens=[1, 2],
    begin_suppress_tokens=[3],
    languages={"en": 52, "de": 53},
    tasks={"transcribe": 54, "translate": 55},
)
ENCODER = EncoderEntry(
    vocab_size=112, context_length=100, start_token_id=51, cross=[], speech=ENTRY
)


def features(seed=0, shape=(4, 100)):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def test_windows_are_the_same_source_where_their_content_is():
    values = features()
    one, same = SoundFeatures(values), SoundFeatures(features())
    values[:] = 0  # the window is a copy
    assert np.array_equal(one.values, features())
    assert one == same and hash(one) == hash(same)
    assert one != SoundFeatures(features(1))
    assert one != SoundFeatures(features().reshape(100, 4))
    assert one == SoundFeatures(features().astype(np.float64))
    with pytest.raises(ValueError, match="read-only"):
        one.values[0] = 0


@pytest.mark.parametrize("wrong", [features(shape=(4,)), np.full((4, 100), np.nan, np.float32)])
def test_what_is_no_window_is_refused(wrong):
    with pytest.raises(InputError, match="expected \\(mels, frames\\) finite numbers"):
        SoundFeatures(wrong)


def test_an_encoder_reads_windows_of_its_own_shape_alone():
    name, values = encoder_input(ENCODER, SoundFeatures(features()))
    assert (name, values.shape) == (INPUT_FEATURES, (1, 4, 100))
    for wrong in ((1, 2, 3), SoundFeatures(features(shape=(4, 50))), None):
        with pytest.raises(InputError, match="reads sound: expected SoundFeatures of 4 mels"):
            encoder_input(ENCODER, wrong)
    with pytest.raises(InputError, match="expected a tuple of token ids"):
        encoder_input(replace(ENCODER, speech=None), SoundFeatures(features()))


WRONG = [
    ({"num_frames": 200}, "num_frames is 200, expected 100, the frames of 1 s"),
    ({"hop_length": 0}, "hop_length is 0, expected a number above 0"),
    ({"sampling_rate": 16_000_000, "hop_length": 160_000}, "sampling_rate is 16000000, expected"),
    ({"n_fft": 10**9}, "n_fft is 1000000000, expected at most 4096"),
    ({"num_mels": 10**6}, "num_mels is 1000000, expected at most 512"),
    ({"hop_length": 10**6}, "hop_length is 1000000, expected at most 4096"),
    ({"hop_length": 1, "num_frames": 16_000, "chunk_seconds": 10**9}, "chunk_seconds is 10"),
    ({"chunk_seconds": 300, "hop_length": 1, "num_frames": 4_800_000}, "num_frames is 48"),
    ({"sampling_rate": 100, "hop_length": 1, "n_fft": 101}, "window is 100, expected 101 to 144"),
    ({"max_initial_timestamp_index": -1}, "max_initial_timestamp_index is -1, expected a number"),
    ({"no_speech_token_id": 112}, "no_speech_token_id is 112, expected 0 to 111"),
    ({"suppress_tokens": [5, -1]}, r"suppress_tokens\[1\] is -1"),
    ({"languages": {"en": 500}}, "en is 500"),
    ({"tasks": None}, "languages or tasks alone"),
    ({"language": "xx"}, "language is 'xx', expected one of en, de"),
]


@pytest.mark.parametrize(("changes", "words"), WRONG)
def test_a_contradictory_entry_is_refused(changes, words):
    check_speech(ENTRY, 112, "dsbd.json")
    with pytest.raises(BundleError, match=words):
        check_speech(replace(ENTRY, **changes), 112, "dsbd.json")
