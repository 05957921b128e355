"""The threshold policy's estimate, against a simulation of the scheme it describes."""

import numpy as np
import pytest

from dsbd_ort.decoding.sample_rule import threshold_width, waiting_distribution

P = np.array([0.5, 0.2, 0.2, 0.1])
Q = np.array([0.2, 0.4, 0.1, 0.1])  # the missing 0.2 lies outside the target's candidates


def simulated_counts(p, q, num_drafts, num_runs, rng):
    """Accept i.i.d. drafts by rejection with a residual that an acceptance resets."""
    outside = np.append(q, 1 - q.sum())
    counts = np.zeros(num_drafts + 1)
    for _ in range(num_runs):
        residual, accepted = p, 0
        for s in rng.choice(len(outside), size=num_drafts, p=outside):
            r = residual[s] if s < len(p) else 0.0
            if rng.random() < r / outside[s]:
                accepted, residual = accepted + 1, p
            else:
                residual = np.maximum(residual - q, 0)
                residual = residual / residual.sum()
        counts[accepted] += 1
    return counts / num_runs


def acceptance_counts(p, q, num_drafts):
    """Pr[exactly n of the drafts are accepted], n from 0 on, by summing over the waits."""
    waits = waiting_distribution(p, q, num_drafts)
    law = np.zeros(num_drafts + 1)
    law[0] = 1.0
    at_least = [1.0]
    for _ in range(num_drafts + 1):
        law = np.convolve(law, np.append(0.0, waits))[: num_drafts + 1]
        at_least.append(law.sum())
    return -np.diff(at_least)


@pytest.mark.parametrize("num_drafts", [1, 2, 4])
def test_acceptance_counts_match_a_simulation(num_drafts):
    rng = np.random.default_rng(0)
    simulated = simulated_counts(P, Q, num_drafts, 20_000, rng)
    np.testing.assert_allclose(acceptance_counts(P, Q, num_drafts), simulated, atol=0.015)


def test_acceptance_counts_are_a_distribution_and_one_draft_is_the_overlap():
    assert acceptance_counts(P, Q, 5).sum() == pytest.approx(1.0)
    assert acceptance_counts(P, Q, 1)[1] == pytest.approx(np.minimum(P, Q).sum())


def test_equal_laws_accept_every_draft():
    np.testing.assert_allclose(acceptance_counts(P, P, 3), [0, 0, 0, 1], atol=1e-12)


@pytest.mark.parametrize("num_drafts", [5, 64, 700])
def test_the_width_is_that_of_the_counts(num_drafts):
    """Also beyond 640 drafts, where convolutions go by the Fourier transform."""
    waits = waiting_distribution(P, Q, num_drafts)
    at_least = acceptance_counts(P, Q, num_drafts)[::-1].cumsum()[::-1]
    for threshold in (0.01, 0.3, 0.7, 0.99):
        expected = max(n for n, prob in enumerate(at_least) if prob >= threshold)
        assert threshold_width(waits, num_drafts, 0, threshold) == expected


def one_by_one(p, q, num_drafts):
    """``waiting_distribution`` by subtracting q from the residual draft by draft."""
    residual, rejected, waits = p, 1.0, []
    for _ in range(num_drafts):
        accepted = min(np.minimum(residual, q).sum(), 1.0)
        waits.append(rejected * accepted)
        rejected *= 1.0 - accepted
        rest = np.maximum(residual - q, 0.0)
        residual = rest / rest.sum() if rest.sum() > 0.0 else residual
    return np.array(waits)


@pytest.mark.parametrize("seed", range(20))
def test_waits_are_those_of_the_residuals(seed):
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(30, 0.3)), rng.dirichlet(np.full(30, 0.3))
    q[rng.integers(30, size=5)] = 0.0
    waits = waiting_distribution(p, q, 12)
    np.testing.assert_allclose(waits, one_by_one(p, q, 12), atol=1e-9)


WAITS = np.array([0.5, 0.25, 0.125])  # at least 1 of 3 drafts: 0.875, 2: 0.5, 3: 0.125


@pytest.mark.parametrize(
    ("most", "least", "threshold", "width"),
    [
        (3, 1, 0.95, 1),
        (3, 1, 0.875, 1),
        (3, 1, 0.5, 2),
        (3, 1, 0.125, 3),
        (2, 1, 0.125, 2),
        (3, 2, 0.95, 2),
        (8, 1, 0.1, 3),
        (8, 1, 0.0, 3),
    ],
)
def test_threshold_width(most, least, threshold, width):
    assert threshold_width(WAITS, most, least, threshold) == width
