"""Resampling against scipy's, against the tones it must keep, and by blocks against the whole."""

import tracemalloc

import numpy as np
import pytest
from scipy.signal import resample_poly

from dsbd_ort.audio.resampling import resampled, taps_between
from tests.speech.sounds import noise, speech_like, tone

RATES = [8_000, 11_025, 44_100, 48_000, 96_000, 44_101, 383_999]  # two coprime to 16,000


def whole(samples: np.ndarray, from_rate: int, to_rate: int = 16_000) -> np.ndarray:
    return np.concatenate(list(resampled([samples], from_rate, to_rate)))


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("hertz", [50.0, 440.0, 3000.0])
def test_a_tone_stays_a_tone(rate: int, hertz: float) -> None:
    given, wanted = tone(0.5, hertz, rate), tone(0.5, hertz)
    found = whole(given, rate)
    assert found.dtype == np.float32 and len(found) == -(-len(given) * 16_000 // rate)
    inside = slice(400, len(wanted) - 400)  # silence before and after is no tone
    np.testing.assert_allclose(found[inside], wanted[inside], rtol=0, atol=5e-5)


def test_interpolated_taps_are_those_of_the_phase() -> None:
    exact = taps_between(44_100, 16_000)  # 160 phases
    near = taps_between(44_100 * 101, 16_000 * 101 + 1)  # as many as outputs, at nearly this ratio
    assert len(exact.table) == exact.num_phases and len(near.table) < near.num_phases // 100
    phases = np.arange(160)
    found = near.of(phases * near.num_phases // 160)
    np.testing.assert_allclose(found, exact.of(phases), rtol=0, atol=2e-6)


@pytest.mark.parametrize("rate", [44_101, 383_999])
def test_a_rate_costs_no_table_of_all_its_phases(rate: int) -> None:
    """An audio of 844 bytes at 383,999 Hz took 9 s and 2.3 GB."""
    tracemalloc.start()
    assert len(whole(noise(0.01, rate=rate), rate)) in (160, 161)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30 * 2**20


@pytest.mark.parametrize("rate", [24_000, 44_100, 48_000])
def test_what_the_lower_rate_cannot_hold_is_gone(rate: int) -> None:
    found = whole(tone(0.5, 8_200.0, rate), rate)
    assert np.abs(found[400:-400]).max() < 3e-5  # of 0.5: 84 dB below


@pytest.mark.parametrize("rate", RATES[:5])
def test_speech_is_as_scipy_has_it(rate: int) -> None:
    given = speech_like(1.0, rate=rate)
    given = np.convolve(given, np.ones(5) / 5, "same").astype(np.float32)
    divisor = np.gcd(rate, 16_000)
    up, down = 16_000 // divisor, rate // divisor
    wanted = resample_poly(given, up, down, window=("kaiser", 9.0))
    error = whole(given, rate) - wanted
    assert np.sqrt(np.mean(error**2)) < 0.01 * np.sqrt(np.mean(wanted**2))  # its filter is shorter


@pytest.mark.parametrize("rate", [8_000, 44_100, 48_000, 44_101])
@pytest.mark.parametrize("block", [1, 7, 1000, 9999])
def test_blocks_together_are_the_whole(rate: int, block: int) -> None:
    given = noise(0.2, rate=rate)[: 400 if block == 1 else None]
    parts = [given[first : first + block] for first in range(0, len(given), block)]
    found = np.concatenate(list(resampled(parts, rate, 16_000)))
    np.testing.assert_array_equal(found, whole(given, rate))


@pytest.mark.parametrize("number", [0, 1, 2, 30, 47, 48, 200])
@pytest.mark.parametrize("rate", [8_000, 44_100])
def test_few_samples(number: int, rate: int) -> None:
    given = np.ones(number, np.float32)
    found = list(resampled([given], rate, 16_000))
    assert sum(map(len, found)) == -(-number * 16_000 // rate)


def test_the_same_rate_changes_nothing() -> None:
    given = noise(0.1)
    assert next(resampled([given], 16_000, 16_000)) is given
