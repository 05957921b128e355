"""How often a drafted layer is accepted, learned by its gap, and what drafting was worth so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.drafting.cost_curve import LoopCost, never_falling
from dsbd_ort.decoding.drafting.credit import DraftCredit

Floats = NDArray[np.float64]
_GAP_EDGES = np.array([0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.3, 1.6, 2.0, 2.5, 3.0, 4.0, 6.0])
_GAP_CENTRES = np.concatenate([_GAP_EDGES - 0.5 * np.diff(_GAP_EDGES, prepend=0.0), [8.0]])
_NUM_BINS = len(_GAP_CENTRES)
_FIRST_GUESS = 1.0 - 0.5 * np.exp(-_GAP_CENTRES)  # half without a gap, more the wider the gap
_GUESS_WEIGHT = 2.0  # observations of each gap that the guess counts for, always
_LEVEL_WEIGHT = 3.0  # accepted layers that the first guess counts for, of all gaps together
_MEMORY = 0.985  # weight that a layer's observations keep after another
_LARGEST_WEIGHT = 1e9
_MANY_NOTED = 8  # layers from which on a running mean takes a tenth of the next one
_MANY, _LATER = 32, 4  # layers after which rates are taken anew only after so many more
_GAIN_MEMORY = 0.99  # weight that a draft's gain keeps after another
_LOST = -2.5  # iterations: drafts that have lost so much do not pay, whatever is thought of them
_FORGIVEN = -1.5  # iterations
_MOST_LOST, _MOST_GAINED = -3.5, 4.0  # iterations: so that a few drafts can prove the contrary
_MOST_LOST_AT_ONCE = -0.5  # iterations: a prompt to be read says nothing of the next drafts
FIRST_PROBE, LAST_PROBE = 8, 512  # iterations without a draft after which one layer is tried


@dataclass
class AcceptanceEstimator:
    """How often a gap was enough, and how fast tokens are committed; kept from request to request.

    Of first layers of a draft and of those behind an accepted one, which are harder, apart. What is
    guessed of a gap that was rarely seen is the first guess times the level of all gaps: how often
    layers were accepted over how often that was guessed. So a draft that agrees with little is
    known after a few layers, whatever their gaps were.

    Attributes:
        enough, seen: (2, num_bins) float64. Layers, by gap, that were accepted, and all; the latest
            count ``weights``, the others as much as ``_MEMORY`` leaves of that.
        weights: of a layer of each kind that is learned next.
        rates: (2, num_bins) float64. What follows from them: a wider gap is never worse.
        num_learned: layers so far; ``num_new``: since ``rates`` were taken, of each kind.
        tokens, calls: expected of drafts, and the time they took in target calls of one row, the
            latest counting most; their ratio is lambda, whatever the calls are found to cost.
        acceptance, rows: running means of what chosen layers promised and held.
        num_noted: layers in these means.
        credit: what drafts may still cost in vain.
        num_without, probe_after: iterations without a draft, and after how many to try one where
            the last one failed.
        has_failed: whether it did.
        gained: iterations that drafts have won beyond their cost, the latest counting most.
        loop: what the loop itself costs in requests of these settings.
    """

    enough: Floats = field(default_factory=lambda: np.zeros((2, _NUM_BINS)))
    seen: Floats = field(default_factory=lambda: np.zeros((2, _NUM_BINS)))
    rates: Floats = field(default_factory=lambda: np.tile(_FIRST_GUESS, (2, 1)))
    weights: list[float] = field(default_factory=lambda: [1.0, 1.0])
    num_learned: int = 0
    num_new: list[int] = field(default_factory=lambda: [0, 0])
    tokens: float = 0.0
    calls: float = 0.0
    acceptance: float = 0.7
    rows: float = 0.0
    num_noted: int = 0
    credit: DraftCredit = field(default_factory=DraftCredit)
    num_without: int = 0
    probe_after: int = FIRST_PROBE
    has_failed: bool = True
    gained: float = 0.0
    loop: LoopCost = field(default_factory=LoopCost)

    @property
    def patience(self) -> int:
        """Iterations without a draft after which one layer is tried."""
        return self.probe_after if self.has_failed else FIRST_PROBE

    @property
    def have_lost(self) -> bool:
        """Whether drafts have lost so much that estimates of their gain are not believed."""
        return self.gained < _LOST

    def count_gain(self, gained: float) -> None:
        """Count the iterations that a draft has won, less its cost.

        What was lost so long ago that only the rarest tries were made since is forgiven so far that
        a few more may be made: the texts may be others by now.
        """
        if self.num_without >= LAST_PROBE:
            self.gained = max(self.gained, _FORGIVEN)
        at_once = gained if gained > _MOST_LOST_AT_ONCE else _MOST_LOST_AT_ONCE
        self.gained = min(max(_GAIN_MEMORY * self.gained + at_once, _MOST_LOST), _MOST_GAINED)

    def count_draft(self, *, has_paid: bool, most_patience: int) -> None:
        """Count a draft of one layer or more, by which it is known when to try the next one.

        Twice as late after each try that has not paid, up to ``most_patience``. One that has paid
        is followed by another one soon: the text may have changed.
        """
        was_tried = self.num_without >= self.patience
        if has_paid:
            self.probe_after = max(self.probe_after // 2, FIRST_PROBE)
        elif was_tried:
            self.probe_after = min(2 * self.probe_after, most_patience)
        self.has_failed = not has_paid
        self.num_without = 0

    def accepted(self, gaps: Floats, depth: int) -> Floats:
        """Return the estimated probability that a layer with this gap is accepted.

        depth: drafted layers before it.
        """
        rates: Floats = self.rates[1 if depth else 0].take(_GAP_EDGES.searchsorted(gaps))
        return rates

    def learn(self, gaps: Floats, num_short: int, depth: int) -> None:
        """Count one layer: the gap of every width it might have had, narrowest first.

        num_short: how many of these widths were not enough: the narrowest.
        """
        kind = 1 if depth else 0
        bins = _GAP_EDGES.searchsorted(gaps)
        weight = self.weights[kind] / _MEMORY
        self.seen[kind] += weight * np.bincount(bins, minlength=_NUM_BINS)
        if num_short < len(bins):
            self.enough[kind] += weight * np.bincount(bins[num_short:], minlength=_NUM_BINS)
        if weight > _LARGEST_WEIGHT:
            self.seen[kind] /= weight
            self.enough[kind] /= weight
            weight = 1.0
        self.weights[kind] = weight
        self.num_learned += 1
        self.num_new[kind] += 1

    def note(self, acceptance: float, width: int) -> None:
        """Count what a layer of this width promises to hold."""
        self.num_noted += 1
        step = 0.1 if self.num_noted >= _MANY_NOTED else 1.0 / (self.num_noted + 2)
        self.acceptance += step * (acceptance - self.acceptance)
        self.rows += step * (width - self.rows) if self.rows else float(width)

    def refresh(self) -> None:
        """Bring ``rates`` up to date with what was learned, where that was enough to matter."""
        least = 1 if self.num_learned <= _MANY else _LATER
        for kind, num_new in enumerate(self.num_new):
            if num_new >= least:
                self._take_rates(kind)
                self.num_new[kind] = 0

    def _take_rates(self, kind: int) -> None:
        enough, seen = self.enough[kind] / self.weights[kind], self.seen[kind] / self.weights[kind]
        level = float(enough.sum()) + _LEVEL_WEIGHT
        level /= float(seen @ _FIRST_GUESS) + _LEVEL_WEIGHT
        guess = np.minimum(level * _FIRST_GUESS, 1.0)
        # Else the best of many noisy rates would be believed.
        self.rates[kind] = never_falling(enough + _GUESS_WEIGHT * guess, seen + _GUESS_WEIGHT)
