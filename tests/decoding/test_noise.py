"""The noise, tested like a random generator."""

import numpy as np
import pytest
from scipy.stats import gumbel_r, kstest

from dsbd_ort.decoding.joint_distribution import STAY
from dsbd_ort.decoding.noise import gumbel_noise, mix64, root_key, sample_seed

NUM = 20_000


def uniforms(keys, step=0):
    return gumbel_r.cdf(gumbel_noise(keys, step))


def keys_of(seeds):
    return np.array([root_key(seed) for seed in seeds], dtype=np.uint64)


def test_mix64_is_splitmix64():
    # First three outputs of the reference implementation seeded with 1234567.
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert mix64(np.array([1234567], np.uint64), np.arange(3)).tolist() == known


def test_known_answers_for_other_hosts():
    root = root_key(42)
    child = mix64(np.array([root], np.uint64), np.array([7]))
    assert root == 13679457532755275413
    assert gumbel_noise(child, 3)[0] == pytest.approx(0.5552618999884795, abs=1e-12)


STREAMS = {
    "tokens": lambda: uniforms(mix64(keys_of([5]), np.arange(NUM))),
    "seeds": lambda: uniforms(mix64(keys_of(range(NUM)), np.array([3]))),
    "steps": lambda: np.concatenate(
        [uniforms(mix64(keys_of([9]), np.array([STAY])), step) for step in range(NUM // 10)]
    ),
    "parents": lambda: uniforms(mix64(mix64(keys_of([11]), np.arange(NUM)), np.array([0]))),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_every_stream_is_uniform(stream):
    values = STREAMS[stream]()
    assert 0.0 < values.min() and values.max() < 1.0
    assert kstest(values, "uniform").pvalue > 1e-4


def pairs():
    tokens = np.arange(NUM)
    parent = mix64(keys_of([1]), tokens)
    child = mix64(parent, np.array([4]))
    return {
        "neighbouring tokens": (uniforms(parent)[:-1], uniforms(parent)[1:]),
        "parent and child": (uniforms(parent), uniforms(child, 1)),
        "siblings": (uniforms(child), uniforms(mix64(parent, np.array([5])))),
        "neighbouring seeds": (uniforms(parent), uniforms(mix64(keys_of([2]), tokens))),
        "consecutive steps": (uniforms(parent, 0), uniforms(parent, 1)),
        "key and noise": ((parent >> np.uint64(11)) * 2.0**-53, uniforms(parent)),
        "noise and next key": (uniforms(parent, 4), (child >> np.uint64(11)) * 2.0**-53),
    }


@pytest.mark.parametrize("name", list(pairs()))
def test_pairs_are_independent(name):
    first, second = pairs()[name]
    counts, _, _ = np.histogram2d(first, second, bins=16, range=[[0, 1], [0, 1]])
    expected = counts.sum() / counts.size
    statistic = ((counts - expected) ** 2 / expected).sum()
    deviation = (statistic - 255) / np.sqrt(2 * 255)  # chi-square, about normal
    assert abs(deviation) < 5


def test_noise_is_finite_at_the_ends():
    for bits in (0, 2**64 - 1):
        uniform = ((np.uint64(bits) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
        assert 0.0 < uniform < 1.0


def test_seeds_of_samples_are_the_published_hash_and_never_overlap() -> None:
    assert [sample_seed(7, 0), sample_seed(2**128 - 1, 0)] == [7, 2**128 - 1]
    assert sample_seed(0, 1) == 0x6E789E6AA1B965F4 >> 11  # the second output of SplitMix64 from 0
    many = [sample_seed(seed, index) for seed in range(200) for index in range(1, 50)]
    assert len({*many, *range(200)}) == len(many) + 200
    assert all(0 <= seed < 2**53 for seed in many)
    assert sample_seed(2**64, 1) == sample_seed(1, 1) != sample_seed(0, 1)  # words are folded
