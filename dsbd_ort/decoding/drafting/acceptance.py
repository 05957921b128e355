"""The estimates of draft policy "throughput", and its budget, from request to request.

How often layers are accepted, and what the loop costs, once for each setting. A layer's *gap* (see
``throughput.py``) says how sure it is; the accepted layers of each gap are counted, apart for first
layers and for later ones. The budget bounds what drafts may lose, and buys tries. There is one for
each load: drafts that lose while many requests share the engine calls may pay for a lone one.

It is counted in iterations without a draft: 0.5 is half the time of one. A draft costs its calls,
its rows and the loop's own time, a prompt that the draft model reads included, and earns the
iterations that it has saved. A layer is drafted if the balance pays for its narrowest form; a wider
one that is expected to pay more may overdraw it. Every iteration adds a share of its time, 2 % at
first. The share of a first short answer is there from the start, and the next one is added after
that many iterations: so drafts lose at most 2 %, all requests together, and what the last overdrew.
If estimates say that drafts pay, a request gets 4 % of the time that it is expected to take in
advance, 10 % while drafts have earned: a draft model must read a prompt first, and the first drafts
may fail. The shares of twice that time, or of five times, are then in the balance already.

If estimates say that no draft pays, one layer is tried once the shares since the last draft pay for
it: at 0.16 iterations a try, after 8 iterations. Every try that does not pay halves the share; a
draft that pays quadruples it, up to 2 %. So tries of a draft that is never right become rare: after
8, 16, ... 64 iterations. Once drafts have lost 2 iterations more than they earned, only tries are
made, whatever is estimated. While they are one ahead, a first layer is drafted even if it is not
expected to pay: the estimate is a mean, and the drafted layer tells more than it.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.drafting.cost_curve import never_falling

SHARE = 0.02
_SHORT_ANSWER = 64  # iterations
_MOST = 3.0  # iterations: what was earned long ago is no reason to lose more
_LEAST_SHARE = SHARE / 8
_ADVANCED, _ADVANCED_IF_EARNED = 0.04, 0.1  # of the time that a request is expected to take
_LOST, _EARNED = -2.0, 1.0  # iterations
_MOST_LOST_AT_ONCE = -0.5  # iterations: a prompt to be read says nothing about the next drafts


@dataclass
class DraftBudget:
    """Budget for rejected drafts, in iterations without a draft; kept from request to request."""

    balance: float = SHARE * _SHORT_ANSWER  # negative after a draft that cost more than expected
    most: float = _MOST  # of the balance, the prompt that the draft model reads included
    share: float = SHARE  # added by an iteration
    saved: float = 0.0  # the shares since the last draft
    gained: float = 0.0  # by drafts, beyond their cost, the latest counting most
    num_prepaid: int = _SHORT_ANSWER  # iterations whose share is in the balance already

    @property
    def believes_estimates(self) -> bool:
        """Whether a draft may be made because it is expected to pay; else tries alone are made."""
        return self.gained >= _LOST

    @property
    def has_earned(self) -> bool:
        """Whether the latest drafts have earned so much that one need not be expected to pay."""
        return self.gained >= _EARNED

    def begin_request(self, prompt: float, draft_prompt: float) -> None:
        """Add the share of a prompt, by its cost to the target and to the draft model."""
        self.most = _MOST + draft_prompt
        self.add(self.share * prompt)

    def advance(self, expected: float) -> None:
        """Put a share of a request's expected time into the balance, if estimates are believed.

        The shares of that many iterations are then in the balance already.
        """
        amount = (_ADVANCED_IF_EARNED if self.has_earned else _ADVANCED) * expected
        if amount > self.balance and self.believes_estimates:
            self.balance = amount
            self.num_prepaid = max(self.num_prepaid, math.ceil(amount / self.share))

    def pass_iteration(self) -> None:
        self.saved += self.share
        if self.num_prepaid:
            self.num_prepaid -= 1
        else:
            self.add(self.share)

    def add(self, earned: float) -> None:
        """Add earnings less their cost, which may be negative."""
        balance = self.balance + earned
        if earned > 0.0 and balance > self.most:  # a balance beyond the limit stays
            balance = max(self.balance, self.most)
        self.balance = balance

    def settle(self, cost: float, earned: float, *, is_try: bool) -> None:
        self.add(earned - cost)
        self.gained = 0.99 * self.gained + max(earned - cost, _MOST_LOST_AT_ONCE)
        self.gained = min(max(self.gained, 2.0 * _LOST), _MOST)
        self.saved = 0.0
        if earned > cost:
            self.share = min(4.0 * self.share, SHARE)
        elif is_try or not self.believes_estimates:
            self.share = max(0.5 * self.share, _LEAST_SHARE)

    def iterations_until(self, cost: float, *, is_try: bool = False) -> int:
        """Return after how many iterations their shares pay for a draft of this cost."""
        num_iterations = 0.0
        if cost > self.balance:
            num_iterations = self.num_prepaid + (cost - self.balance) / self.share
        if is_try:
            num_iterations = max(num_iterations, (cost - self.saved) / self.share)
        return math.ceil(num_iterations)


Floats = NDArray[np.float64]
_GAP_EDGES = np.array([0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.3, 1.6, 2.0, 2.5, 3.0, 4.0, 6.0])
_GAP_CENTRES = np.concatenate([_GAP_EDGES - 0.5 * np.diff(_GAP_EDGES, prepend=0.0), [8.0]])
_NUM_BINS = len(_GAP_CENTRES)
_FIRST_GUESS = 1.0 - 0.5 * np.exp(-_GAP_CENTRES)  # half without a gap, more the wider the gap
_GUESS_WEIGHT = 2.0  # observations of each gap that the guess counts for, always
_LEVEL_WEIGHT = 3.0  # accepted layers that the first guess counts for, of all gaps together
_MEASURED_WEIGHT = 8.0  # the same of a measured agreement: other texts agree more or less
_USUAL_GUESS = 0.97  # mean of the first guess over the gaps of a pair that agrees in nine of ten
_MEMORY = 0.985  # weight that a layer's observations keep after another
_MANY_CHOSEN = 8  # layers from which on a running mean takes a tenth of the next one
_MANY, _LATER = 32, 4  # layers after which rates are taken anew only after so many more
WHOLE = 2**31
"""The size of a context that is the whole path, above all sizes; see ``draft_context``."""
AGREEMENT = {64: 0.74, 128: 0.87, 256: 0.97, 512: 0.97, WHOLE: 1.0}
"""How often a draft with a context agrees with its target, over how often with the whole path: of
Qwen2.5-Coder 0.5B and 1.5B after prompts of a thousand tokens, the mean of two tasks, one of which
is put in the last 230 tokens (lab/results/real_pair.md)."""
SIZES = tuple(AGREEMENT)[:-1]
_AGREEMENT_WEIGHT = 100.0  # layers that the table counts for, for each size
_MEMORY_OF_AGREEMENT = 0.999  # weight that the layers of a size keep after another
_RATE_MEMORY = 0.9  # weight that an iteration's rate of tokens keeps after another
_GUESSED_LOOP = 2e-4  # seconds of an iteration
_GUESSED_LAYER = 0.6  # of an iteration
_LEAST_DISTURBANCE = 2e-5  # seconds


@dataclass
class LoopCost:
    """Seconds of the loop itself, outside engine calls; the latest iterations count most."""

    iteration: float = _GUESSED_LOOP  # seconds without a draft
    layer: float = _GUESSED_LAYER * _GUESSED_LOOP  # seconds that a drafted layer adds
    num_plain: int = 0  # iterations without a draft so far
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


def _known_size(size: int) -> int:
    """Return the largest size of the table that is at most this one, the smallest if none is."""
    return max((each for each in AGREEMENT if each <= size), default=SIZES[0])


@dataclass
class Counts:
    """First layers of drafts: how many there were, how many were accepted at their narrowest."""

    seen: float = 0.0
    accepted: float = 0.0


@dataclass(eq=False)
class AcceptanceEstimator:
    """How often a gap was enough, and how fast tokens are committed.

    For a gap that was rarely seen the guess is the first guess times the level of all gaps: how
    often layers were accepted over how often that was guessed. So a bad draft is recognized after a
    few layers, whatever their gaps were. Arrays are (2, num_bins): of first layers, of later ones.
    """

    level: float = 1.0  # before there are layers
    level_weight: float = _LEVEL_WEIGHT
    agreement_of_pair: float | None = None  # what it began with, see ``of_pair``

    enough: Floats = field(default_factory=lambda: np.zeros((2, _NUM_BINS)))  # accepted, by gap
    seen: Floats = field(default_factory=lambda: np.zeros((2, _NUM_BINS)))  # all layers
    # The estimates made from them: a wider gap is never worse.
    rates: Floats = field(default_factory=lambda: np.tile(_FIRST_GUESS, (2, 1)))
    num_learned: int = 0  # layers so far
    num_new: list[int] = field(default_factory=lambda: [0, 0])  # since ``rates`` were computed
    tokens: float = 0.0  # expected from drafts
    calls: float = 0.0  # the time that they took, in target calls of one row
    acceptance: float = 0.7  # running mean of the estimate of chosen layers
    rows: float = 0.0  # of their width
    num_chosen: int = 0  # layers in the running means
    answer_length: float = 0.0  # running mean of the tokens of an answer; 0 before the first
    first_layers: dict[int, Counts] = field(default_factory=dict)  # by size of the draft's context
    loop: LoopCost = field(default_factory=LoopCost)
    budgets: defaultdict[int, DraftBudget] = field(default_factory=lambda: defaultdict(DraftBudget))

    @classmethod
    def of_pair(cls, agreement: float | None) -> Self:
        """Return one that knows how often the draft's best token is the target's; None: unknown."""
        if agreement is None:
            return cls()
        level = min(agreement / _USUAL_GUESS, 1.0)
        return cls(level, _MEASURED_WEIGHT, agreement, num_new=[1, 1], acceptance=agreement)

    def budget(self, num_sharers: int) -> DraftBudget:
        """Return the budget of drafts while 1, 2, 3 to 4, 5 to 8, ... requests share the calls."""
        return self.budgets[(num_sharers - 1).bit_length()]

    def accepted(self, gaps: Floats, depth: int) -> Floats:
        """Return the estimated probability that a layer after ``depth`` others is accepted."""
        rates: Floats = self.rates[1 if depth else 0].take(_GAP_EDGES.searchsorted(gaps))
        return rates

    def learn(self, gaps: Floats, num_short: int, depth: int) -> None:
        """Count a layer by its widths' gaps, narrowest first; ``num_short`` were too narrow."""
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
        self.tokens = _RATE_MEMORY * self.tokens + tokens
        self.calls = _RATE_MEMORY * self.calls + calls

    def choose(self, acceptance: float, width: int) -> None:
        self.num_chosen += 1
        step = 0.1 if self.num_chosen >= _MANY_CHOSEN else 1.0 / (self.num_chosen + 2)
        self.acceptance += step * (acceptance - self.acceptance)
        self.rows += step * (width - self.rows) if self.rows else float(width)

    def agreement(self, size: int) -> float:
        """Return the agreement of drafts with a context of this size over that with all."""
        known_size = _known_size(size)
        guessed = AGREEMENT[known_size]
        usual = sum(AGREEMENT[each] * counts.seen for each, counts in self.first_layers.items())
        counts = self.first_layers.get(known_size)
        if counts is None or not usual:
            return guessed
        level = max(sum(each.accepted for each in self.first_layers.values()) / usual, 1e-3)
        accepted = counts.accepted / level + _AGREEMENT_WEIGHT * guessed
        return min(accepted / (counts.seen + _AGREEMENT_WEIGHT), 1.0)

    def learn_agreement(self, size: int, *, agrees: bool) -> None:
        """Count a first layer, drafted with a context of this size."""
        known_size = _known_size(size)
        counts = self.first_layers.setdefault(known_size, Counts())
        counts.seen = _MEMORY_OF_AGREEMENT * counts.seen + 1.0
        counts.accepted = _MEMORY_OF_AGREEMENT * counts.accepted + agrees

    def learn_length(self, num_tokens: int) -> None:
        """Count an answer that has ended."""
        step = 0.2 if self.answer_length else 1.0
        self.answer_length += step * (num_tokens - self.answer_length)

    def refresh(self) -> None:
        """Compute ``rates`` anew if enough was learned since to matter."""
        least = 1 if self.num_learned <= _MANY else _LATER
        for kind, num_new in enumerate(self.num_new):
            if num_new >= least:
                self.num_new[kind] = 0
                enough, seen = self.enough[kind], self.seen[kind]
                guessed = float(seen @ _FIRST_GUESS) + self.level_weight
                level = (float(enough.sum()) + self.level_weight * self.level) / guessed
                guess = np.minimum(level * _FIRST_GUESS, 1.0)
                # Weighed, else the best of many noisy rates would be believed.
                sums, weights = enough + _GUESS_WEIGHT * guess, seen + _GUESS_WEIGHT
                self.rates[kind] = never_falling(sums, weights)
