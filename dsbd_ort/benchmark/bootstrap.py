"""Statistics of paired measurements with bootstrap confidence intervals, also for lab/."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

NUM_RESAMPLES = 4000
CONFIDENCE = 0.95
STATISTICS: dict[str, Callable[..., Any]] = {"mean": np.mean, "median": np.median}


@dataclass(frozen=True)
class Estimate:
    """A statistic and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    quartile_1: float
    quartile_3: float


def bootstrap(values: Sequence[float], statistic: Literal["mean", "median"]) -> Estimate:
    """Return a statistic of values, one per pair, and its percentile interval (fixed seed)."""
    data = np.asarray(values, dtype=np.float64)  # (num_pairs,)
    compute = STATISTICS[statistic]
    rng = np.random.default_rng(0)
    resampled = compute(rng.choice(data, (NUM_RESAMPLES, len(data))), axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, (tail, 1 - tail))
    return Estimate(float(compute(data)), float(low), float(high))


def spread(values: Sequence[float]) -> Spread:
    """Return median and quartiles."""
    first, median, third = np.quantile(np.asarray(values, dtype=np.float64), (0.25, 0.5, 0.75))
    return Spread(float(median), float(first), float(third))
