"""Goodness of fit of counted outcomes to an exact law."""

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TypeVar

import numpy as np
from scipy.stats import chisquare

Outcome = TypeVar("Outcome", bound=Hashable)


def chi_square_p_value(
    counts: Counter[Outcome], law: Mapping[Outcome, float], num_runs: int
) -> float:
    """Return the p-value; outcomes expected fewer than five times are pooled."""
    common = [outcome for outcome, p in law.items() if p * num_runs >= 5]
    expected = [law[outcome] * num_runs for outcome in common]
    observed = [counts[outcome] for outcome in common]
    rare = num_runs - sum(expected)
    if rare > 1e-6 * num_runs:
        expected.append(rare)
        observed.append(num_runs - sum(observed))
    scale = num_runs / sum(expected)
    return float(chisquare(observed, np.array(expected) * scale).pvalue)
