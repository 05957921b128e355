"""The estimate of draft policy "throughput": how often layers are accepted, and the loop's cost.

Kept from request to request, one for each setting. A layer's *gap* (see ``throughput.py``) says how
sure it is; the accepted layers of each gap are counted, apart for first layers and for later ones.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.drafting.budget import DraftBudget
from dsbd_ort.decoding.drafting.cost_curve import never_falling

Floats = NDArray[np.float64]
_GAP_EDGES = np.array([0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.3, 1.6, 2.0, 2.5, 3.0, 4.0, 6.0])
_GAP_CENTRES = np.concatenate([_GAP_EDGES - 0.5 * np.diff(_GAP_EDGES, prepend=0.0), [8.0]])
_NUM_BINS = len(_GAP_CENTRES)
_FIRST_GUESS = 1.0 - 0.5 * np.exp(-_GAP_CENTRES)  # half without a gap, more the wider the gap
_GUESS_WEIGHT = 2.0  # observations of each gap that the guess counts for, always
_LEVEL_WEIGHT = 3.0  # accepted layers that the first guess counts for, of all gaps together
_MEMORY = 0.985  # weight that a layer's observations keep after another
_MANY_CHOSEN = 8  # layers from which on a running mean takes a tenth of the next one
_MANY, _LATER = 32, 4  # layers after which rates are taken anew only after so many more
_RATE_MEMORY = 0.9  # weight that an iteration's rate of tokens keeps after another
_GUESSED_LOOP = 2e-4  # seconds of an iteration
_GUESSED_LAYER = 0.6  # of an iteration
_LEAST_DISTURBANCE = 2e-5  # seconds


@dataclass
class LoopCost:
    """The seconds of the loop itself, outside engine calls; the latest iterations count most.

    Attributes:
        iteration: seconds of an iteration without a draft; ``layer``: that a drafted layer adds.
        num_plain, num_drafted: iterations without and with a draft so far.
    """

    iteration: float = _GUESSED_LOOP
    layer: float = _GUESSED_LAYER * _GUESSED_LOOP
    num_plain: int = 0
    num_drafted: int = 0

    def learn(self, num_layers: int, seconds: float) -> None:
        """Count an iteration; a disturbance counts at most four times what was expected."""
        expected = self.iteration + num_layers * self.layer
        error = min(max(seconds, 0.0), 4.0 * expected + _LEAST_DISTURBANCE) - expected
        if num_layers:
            self.num_drafted += 1
            self.layer = max(self.layer + error * _step(self.num_drafted) / num_layers, 0.0)
        else:
            self.num_plain += 1
            self.iteration += error * _step(self.num_plain)
            if not self.num_drafted:
                self.layer = _GUESSED_LAYER * self.iteration


def _step(num_seen: int) -> float:
    """Return the weight of the latest of so many observations in a running mean."""
    return 0.05 if num_seen >= 20 else 1.0 / (num_seen + 0.2)


@dataclass
class AcceptanceEstimator:
    """How often a gap was enough, and how fast tokens are committed.

    For a gap that was rarely seen the guess is the first guess times the level of all gaps: how
    often layers were accepted over how often that was guessed. So a bad draft is recognized after a
    few layers, whatever their gaps were.

    Attributes:
        enough, seen: (2, num_bins) float64. Layers, by gap, that were accepted, and all; the
            observations of a layer count ``_MEMORY`` times as much after another.
        rates: (2, num_bins) float64. The estimates made from them: a wider gap is never worse.
        num_learned: layers so far; ``num_new``: since ``rates`` were computed, of each kind.
        tokens, calls: expected from drafts, and the time they took in target calls of one row.
        acceptance, rows: running means of the estimate and of the width of chosen layers.
    """

    enough: Floats = field(default_factory=lambda: np.zeros((2, _NUM_BINS)))
    seen: Floats = field(default_factory=lambda: np.zeros((2, _NUM_BINS)))
    rates: Floats = field(default_factory=lambda: np.tile(_FIRST_GUESS, (2, 1)))
    num_learned: int = 0
    num_new: list[int] = field(default_factory=lambda: [0, 0])
    tokens: float = 0.0
    calls: float = 0.0
    acceptance: float = 0.7
    rows: float = 0.0
    num_chosen: int = 0  # layers in the running means
    loop: LoopCost = field(default_factory=LoopCost)
    budget: DraftBudget = field(default_factory=DraftBudget)

    def accepted(self, gaps: Floats, depth: int) -> Floats:
        """Return the estimated probability that a layer after ``depth`` others is accepted."""
        rates: Floats = self.rates[1 if depth else 0].take(_GAP_EDGES.searchsorted(gaps))
        return rates

    def learn(self, gaps: Floats, num_short: int, depth: int) -> None:
        """Count one layer by the gaps of its possible widths, narrowest first.

        num_short: how many of these widths were not enough.
        """
        kind = 1 if depth else 0
        bins = _GAP_EDGES.searchsorted(gaps)
        seen, enough = self.seen[kind], self.enough[kind]
        seen *= _MEMORY
        enough *= _MEMORY
        seen += np.bincount(bins, minlength=_NUM_BINS)
        enough += np.bincount(bins[num_short:], minlength=_NUM_BINS)
        self.num_learned += 1
        self.num_new[kind] += 1

    def learn_rate(self, tokens: float, calls: float) -> None:
        """Count the expected tokens of an iteration, and its time in target calls of one row."""
        self.tokens = _RATE_MEMORY * self.tokens + tokens
        self.calls = _RATE_MEMORY * self.calls + calls

    def choose(self, acceptance: float, width: int) -> None:
        """Count a chosen layer: its estimated acceptance and its width."""
        self.num_chosen += 1
        step = 0.1 if self.num_chosen >= _MANY_CHOSEN else 1.0 / (self.num_chosen + 2)
        self.acceptance += step * (acceptance - self.acceptance)
        self.rows += step * (width - self.rows) if self.rows else float(width)

    def refresh(self) -> None:
        """Compute ``rates`` anew if enough was learned since to matter."""
        least = 1 if self.num_learned <= _MANY else _LATER
        for kind, num_new in enumerate(self.num_new):
            if num_new >= least:
                self.num_new[kind] = 0
                enough, seen = self.enough[kind], self.seen[kind]
                guessed = float(seen @ _FIRST_GUESS) + _LEVEL_WEIGHT
                level = (float(enough.sum()) + _LEVEL_WEIGHT) / guessed
                guess = np.minimum(level * _FIRST_GUESS, 1.0)
                # Weighed, else the best of many noisy rates would be believed.
                sums, weights = enough + _GUESS_WEIGHT * guess, seen + _GUESS_WEIGHT
                self.rates[kind] = never_falling(sums, weights)
