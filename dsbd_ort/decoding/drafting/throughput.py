"""Draft policy "throughput" (docs/algorithm.md 3.5): as much as pays, by costs and acceptance.

Lawful only where the output does not depend on the draft (gumbel coupling or search, fixed
width): it looks at the noise of a layer before the layer is selected.

A layer of n candidates is accepted when all beams that the target selects are among them. The
draft's scores (log mass plus noise) say how sure that is. A candidate's *deficit* is what it lacks
to be among the best ``num_beams``, plus what its parent lacked: a draft that is always right
selects exactly the candidates without one. A layer takes candidates by increasing deficit, and the
deficit of the best one left out is its *gap*. How often a gap was enough is counted as it goes.

With lambda, the tokens per second of the latest drafts, an accepted layer is worth 1 / lambda
seconds (the ratio of two expectations is largest where gain - lambda * cost is, Dinkelbach 1967).
The tokens are those that were expected: of so few drafts the counted ones are mostly noise. So a
layer takes the n that maximises

    reach * accepted(gap(n)) / lambda - (seconds of n more target rows) + (what may follow),

reach being the probability that all layers before it are accepted, and the draft ends where
nothing is gained. Of calls that requests share, each counts its share as if all did alike: the more
there are, the more a row costs beside the call, and the less is drafted.

Whatever is estimated, no draft may cost more than the credit (``credit.py``), and while there is
too little for one nothing is thought about. What a layer would have brought is learned without it
too, where that needs no engine call. Where drafts have lost (``AcceptanceEstimator.gained``) no
estimate is believed: one layer is tried now and then, the more rarely the more often that failed.
The very first prompt is read by the draft on trust, as a draft model was made for its target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.rows import NO_INTS
from dsbd_ort.decoding.beams import Beams
from dsbd_ort.decoding.drafting.acceptance import (
    FIRST_PROBE,
    LAST_PROBE,
    AcceptanceEstimator,
)
from dsbd_ort.decoding.drafting.draft import MOST_FORCED_LAYERS, Iteration, Scores
from dsbd_ort.decoding.drafting.request_costs import LOOK_AHEAD, RequestCosts
from dsbd_ort.decoding.forest import Forest, Nodes
from dsbd_ort.decoding.joint_distribution import STAY, JointDistribution, best_candidates

Floats = NDArray[np.float64]
_RATE_MEMORY = 0.9
_LAYERS_AHEAD = np.arange(LOOK_AHEAD + 1)
_LONGEST_REST = 16  # iterations: calls may turn out cheaper, by what others learn
_LONGEST_HOPELESS_REST = 64  # where drafts have lost
_HELD_BACK = 0.6  # iterations of the credit that one draft leaves to others, half of it at most
_LAST_FREE_PROBE = 64  # iterations: the longest wait for a try that costs no engine call
_FIRST_WITHOUT = 3  # iterations before the model's first draft: they say what one without costs


@dataclass(slots=True)
class _Layer:
    """A drafted layer as it is needed to learn from it.

    Attributes:
        nodes: the beams and draft beams it continues.
        best: (num_best,) int64. Their ``JointDistribution.candidate_ids``, least deficit first.
        gaps: (num_widths,) float64, by width from ``narrowest`` on.
    """

    nodes: Nodes
    best: NDArray[np.int64]
    gaps: Floats
    narrowest: int


class ThroughputDraftPolicy:
    """Drafts what is expected to pay.

    Args:
        costs: of the engine calls of the request.
        estimator: is read and taught.
        scores: the rule's ranking.
        forest: of the request.
        num_beams: beams that the rule selects in a layer.
        most_layers, most_beams: upper limits.
        has_draft_model: whether any draft costs an engine call.
        host_seconds: returns the time that the request has spent outside engine calls.
        target_seconds: returns the time of its target calls.
        may_rest: whether an iteration without a draft says something of the next ones: what a
            constraint forces comes unannounced.
    """

    def __init__(
        self,
        costs: RequestCosts,
        estimator: AcceptanceEstimator,
        scores: Scores,
        forest: Forest,
        *,
        num_beams: int,
        most_layers: int,
        most_beams: int,
        has_draft_model: bool,
        host_seconds: Callable[[], float],
        target_seconds: Callable[[], float],
        may_rest: bool,
    ) -> None:
        self._costs = costs
        self._estimator = estimator
        self._scores = scores
        self._forest = forest
        self._num_beams = num_beams
        self._most_layers = most_layers
        self._most_beams = most_beams
        self._has_draft_model = has_draft_model
        self._host_seconds = host_seconds
        self._target_seconds = target_seconds
        self._may_rest = may_rest
        self._has_begun = False
        self._is_resting, self._num_to_rest, self._needed = False, 0, 0.0
        self._began = self._drafting = 0.0
        self._layers: list[_Layer | None] = []  # None: a forced one
        self._num_forced = 0
        self._calls: list[tuple[int, float]] = []  # rows, and seconds of a prompt read before
        self._call_parts = 0, 0.0  # of the layer that is next
        self._num_rows = self._num_needed = self._limit = 0
        self._reach = self._seconds = self._token_seconds = self._call = self._prompt = 0.0
        self._usual = self._called = self._layer = self._credit = self._stake = 0.0  # seconds
        self._expected = 1.0
        self._worth = self._usual_call = 0.0  # of what may follow the last layer, by such calls
        self._unread_prompt = self._prompt_share = self._patience = 0.0
        self._is_probe = self._is_first = False
        self._most_patience = LAST_PROBE if has_draft_model else _LAST_FREE_PROBE
        self._is_usual = num_beams == 1  # the first iteration has one row, the next ones as many
        self._parent_deficits: Floats | None = None  # None: they all lack nothing
        self._powers = np.zeros(LOOK_AHEAD + 1)

    def rest(self) -> int:
        """See DraftPolicy.rest."""
        num_to_rest = self._num_to_rest
        self._is_resting = num_to_rest > 0
        if num_to_rest:
            self._num_to_rest = num_to_rest - 1
        return num_to_rest

    def begin(
        self, num_pending: int, most_layers: int, num_unread: int, num_unread_source: int = 0
    ) -> None:
        """See DraftPolicy.begin."""
        self._began, self._drafting = self._host_seconds(), 0.0
        costs, estimator = self._costs, self._estimator
        costs.refresh()
        estimator.refresh()
        self._usual, self._layer = costs.usual + estimator.loop.iteration, estimator.loop.layer
        prompt = costs.reading(num_unread, num_unread_source)
        self._begin_request(prompt)
        self._layers, self._num_forced = [], 0
        self._num_rows = self._num_needed = min(num_pending, costs.most_rows)
        is_new = costs.are_learned and not estimator.num_learned
        self._is_first = is_new and estimator.num_without < _FIRST_WITHOUT
        self._limit = min(self._most_layers, most_layers)
        self._reach = self._expected = 1.0  # an iteration commits one token without a draft
        self._parent_deficits = None
        self._seconds = costs.seconds[self._num_rows] + estimator.loop.iteration
        self._token_seconds = costs.target_row * estimator.calls / estimator.tokens
        self._powers[1:] = (estimator.acceptance ** _LAYERS_AHEAD[1:]).cumsum()
        self._called, self._needed, self._calls = 0.0, 0.0, []
        self._credit = self._usual * estimator.credit.balance
        # The less there is, the smaller the drafts: else one or two that fail would be all.
        self._stake = max(0.5 * self._credit, self._credit - _HELD_BACK * self._usual)
        self._unread_prompt = prompt
        # Every iteration that is left pays alike: one for two tokens, where drafting is worth it.
        num_left = most_layers + 1
        if num_unread_source and self._has_draft_model:
            # Few targets are longer than their source, whatever they may be.
            num_left = min(num_left, max(num_unread_source, 2))
        self._prompt_share = 2.0 * prompt / num_left
        probe = (prompt + costs.usual_draft) / self._seconds
        self._patience = estimator.patience * max(2.0 * probe, 1.0)
        self._is_probe = estimator.num_without >= self._patience
        if self._has_draft_model and estimator.have_lost and self._may_rest and not self._is_probe:
            self._limit = 0

    def _begin_request(self, prompt: float) -> None:
        """Begin the estimates, and give credit for the prompt, once a request.

        prompt: seconds in which the draft model reads it.
        """
        if self._has_begun:
            return
        self._has_begun = True
        estimator = self._estimator
        if not estimator.calls:
            estimator.calls = self._usual / self._costs.target_row
            estimator.tokens = 1.0
        read = self._target_seconds() / self._costs.num_sharers
        estimator.credit.begin_request(read / self._usual, prompt / self._usual)

    def takes_all(self, num_candidates: int, num_rows: int) -> bool:
        """See DraftPolicy.takes_all: where the rows cost less than the model's call saves."""
        if num_candidates > self._most_beams:
            return False
        more = self._seconds_of_rows(num_candidates) - self._seconds_of_rows(self._num_beams)
        return more < self._costs.draft(num_rows)

    def wants_layer(self, num_rows: int, num_whole: int = 0) -> bool:
        """See DraftPolicy.wants_layer."""
        if len(self._layers) >= self._limit or self._reach == 0.0 or (num_rows and self._is_first):
            return False
        estimator, costs = self._estimator, self._costs
        call = costs.draft(num_rows) + self._layer
        prompt = self._unread_prompt if num_rows else 0.0
        if not estimator.num_learned:  # on trust
            prompt = min(prompt, 0.5 * self._stake)  # the rest is for the first drafts
        least = self._seconds_of_rows(self._num_beams) if num_rows and not self._is_probe else 0.0
        needed = self._spent() + call + prompt + least
        if needed > self._stake:
            if self._layers or needed > self._credit:
                self._needed = 0.0 if self._layers else needed
                return False
            self._stake = needed
        share = self._prompt_share if num_rows else 0.0
        self._call, self._prompt, self._call_parts = call + prompt, share, (num_rows, prompt)
        if not (num_rows or num_whole) and self._has_draft_model:  # its call is not known yet
            return True
        worth = self._worth + self._usual_call - call
        if not self._layers or self._layers[-1] is None:
            worth = float(self._worth_of_more(self._reach, self._num_rows, call))
        if num_whole:  # what is selected is among them: an iteration is saved
            self._stake = self._credit
            saved = costs.seconds[min(num_whole, self._num_beams)]
            saved += estimator.loop.iteration
            worth += max(self._reach * saved - self._seconds_of_rows(num_whole) - call, 0.0)
        if is_wanted := worth > share or self._is_probe:
            if num_rows:  # only before the first of its layers
                self._prompt_share = self._unread_prompt = 0.0
        return is_wanted

    def choose(self, joint: JointDistribution, depth: int) -> NDArray[np.int64]:
        """See DraftPolicy.choose."""
        chosen = self._chosen(joint, depth)
        self._drafting = self._host_seconds() - self._began
        return chosen

    def _chosen(self, joint: JointDistribution, depth: int) -> NDArray[np.int64]:
        """Return the candidates that a layer takes; see ``choose``."""
        self._seconds += self._call + self._prompt
        self._called += self._call
        self._calls.append(self._call_parts)
        best, deficits = self._least_deficits(joint, self._scores(joint, depth))
        num_best = len(best)
        if not num_best:  # every candidate ends its sequence: there is nothing to verify
            self._reach = 0.0
            return best
        narrowest, widest = self._num_beams, self._most_beams
        if num_best < narrowest or num_best < widest:
            narrowest = min(narrowest, num_best)
            widest = max(narrowest, min(widest, num_best))
        gaps = deficits[narrowest : widest + 1]
        if num_best <= widest:  # none is left out of the widest
            gaps = np.append(gaps, np.inf)
        if joint.log_unlisted > -np.inf:
            gaps = np.minimum(gaps, _gap_to_unlisted(joint))
        ids = joint.candidate_ids(best)
        self._layers.append(_Layer(joint.nodes, ids, gaps, narrowest))
        reach = self._reach * self._estimator.accepted(gaps, len(self._layers) - 1)
        costs, before = self._costs, self._num_rows
        rows = slice(before + narrowest, before + widest + 1)
        more = costs.target[rows] - costs.target[before]
        usual = costs.usual_draft + self._layer
        worth = self._worth_of_more(reach, rows, usual)
        gain = reach * self._token_seconds - more + worth
        # A wider layer costs no less: the widths that can be paid are the first ones.
        num_paid = int(more.searchsorted(self._stake - self._spent(), side="right"))
        num_possible = costs.most_known - rows.start + 1
        num_possible = num_paid if num_paid < num_possible else max(num_possible, 0)
        chosen = int(gain[:num_possible].argmax()) if num_possible else 0
        width, new_reach = narrowest + chosen, float(reach[chosen])
        self._estimator.note(new_reach / self._reach, width)
        self._is_probe = False
        if not num_possible or gain[chosen] <= 0.0:
            self._reach = 0.0
            return NO_INTS
        self._reach, self._worth, self._usual_call = new_reach, float(worth[chosen]), usual
        self._expected += new_reach
        num_rows = before + width
        self._num_rows = num_rows if num_rows < costs.most_rows else costs.most_rows
        self._seconds += float(more[chosen])
        self._parent_deficits = deficits[:width] if deficits[width - 1] > 0.0 else None
        return best[:width]

    def choose_forced(self, joint: JointDistribution) -> NDArray[np.int64]:
        """See DraftPolicy.choose_forced.

        Reached with probability ``reach``, a call of its own is saved; else its rows are wasted.
        """
        num_new = int(np.count_nonzero(joint.tokens != STAY))
        more, most_rows = self._seconds_of_rows(num_new), self._costs.most_rows
        is_worth_it = self._reach * self._costs.seconds[min(num_new, most_rows)] > more
        is_limit = len(self._layers) >= self._limit or self._num_forced == MOST_FORCED_LAYERS
        if is_limit or not is_worth_it:
            return NO_INTS
        self._num_forced += 1
        self._expected += self._reach
        self._layers.append(None)
        self._num_needed = min(self._num_needed + num_new, most_rows)
        self._num_rows = min(self._num_rows + num_new, most_rows)
        self._seconds += more
        if self._parent_deficits is not None:
            self._parent_deficits = self._parent_deficits[joint.parents]
        return np.arange(len(joint.tokens))

    def observe(self, iteration: Iteration) -> None:
        """See DraftPolicy.observe."""
        estimator = self._estimator
        estimator.credit.pass_iteration()
        num_won = len(iteration.committed) - 1
        if self._is_resting:
            estimator.num_without += 1
            if num_won:  # by nodes of an earlier draft
                estimator.credit.add(num_won)
            return
        rest = self._host_seconds() - self._began - self._drafting
        estimator.loop.learn(len(self._layers), self._drafting, rest)
        gained = self._settle(num_won)
        self._learn(iteration.committed)
        if self._is_usual:
            estimator.tokens = _RATE_MEMORY * estimator.tokens + self._expected
            calls = self._seconds / self._costs.target_row
            estimator.calls = _RATE_MEMORY * estimator.calls + calls
        self._is_usual = True
        self._count_probes(gained)

    def _settle(self, num_won: int) -> float:
        """Add to the credit what the draft has won: the iterations saved, less its cost.

        Its calls, rows and layers cost what they are thought to now that they have been made.
        """
        won, loop = float(num_won), self._estimator.loop
        if self._layers:
            self._costs.refresh()
            calls = (self._costs.draft(num_rows) + prompt for num_rows, prompt in self._calls)
            self._called = sum(calls) + len(self._calls) * loop.layer
            won -= self._spent() / (self._costs.usual + loop.iteration)
            self._estimator.count_gain(won)
        if won:
            self._estimator.credit.add(won)
        return won

    def _learn(self, committed: Sequence[Beams]) -> None:
        """Count of every layer that was reached which widths would have been enough."""
        for depth, (layer, beams) in enumerate(zip(self._layers, committed, strict=False)):
            if layer is None:
                continue
            num_taken = len(beams.nodes)
            if not num_taken:  # all that was selected has ended: no width was tested
                break
            taken = _candidate_ids(self._forest, layer.nodes, beams.nodes)
            if num_taken == 1:
                found = (layer.best == taken).nonzero()[0]
            else:
                taken.sort()
                place = taken.searchsorted(layer.best)
                found = (taken.take(place, mode="clip") == layer.best).nonzero()[0]
            if len(found) == num_taken:
                num_short = max(int(found[-1]) + 1 - layer.narrowest, 0)
            else:
                num_short = len(layer.gaps)
            self._estimator.learn(layer.gaps, num_short, depth)

    def _spent(self) -> float:
        """Return the seconds that the draft costs so far, its forced layers aside."""
        seconds = self._costs.seconds
        return self._called + (seconds[self._num_rows] - seconds[self._num_needed])

    def _least_deficits(
        self, joint: JointDistribution, scores: Floats
    ) -> tuple[NDArray[np.int64], Floats]:
        """Return the candidates that lack least, least first, and what they lack.

        (num_best,) each, one more than a layer takes at most. Impossible ones are never among them.
        """
        num_beams, num_wanted = self._num_beams, self._most_beams + 1
        parents = self._parent_deficits
        if parents is None:
            best = best_candidates(scores, num_wanted)
            found = scores[best]
            # Fewer can be selected than beams: a draft that is always right selects them all.
            threshold = found[num_beams - 1] if len(best) >= num_beams else -np.inf
            return best, np.maximum(threshold - found, 0.0)
        inherited = parents[joint.parents]
        certain = scores[inherited == 0.0]
        threshold = -np.inf
        if len(certain) >= num_beams:
            last = len(certain) - num_beams
            threshold = np.partition(certain, last)[last]
        if threshold > -np.inf:
            deficits = inherited + np.maximum(threshold - scores, 0.0)
        else:
            deficits = np.where(scores > -np.inf, inherited, np.inf)
        best = best_candidates(-deficits, num_wanted)
        return best, deficits[best]

    def _worth_of_more(
        self, reach: Floats | float, rows: slice | int, layer_seconds: float
    ) -> Floats:
        """Return what layers behind one reached so are worth, less their cost, (n,) or () float64.

        They are of the usual width and acceptance, as many as pay together: where the engine
        computes rows in blocks, one layer can be dear and the next one free.

        reach, rows: (n,) or () probability and target rows before them.
        layer_seconds: a layer's cost, its target rows aside.
        """
        num_ahead = self._limit - len(self._layers)
        if num_ahead <= 0:
            none: Floats = np.multiply(reach, 0.0)
            return none
        ahead = slice((num_ahead if num_ahead < LOOK_AHEAD else LOOK_AHEAD) + 1)
        mean_rows = self._estimator.rows
        width = round(mean_rows) if mean_rows > self._num_beams else self._num_beams
        gains = np.multiply.outer(reach, self._token_seconds * self._powers[ahead])
        gains -= self._costs.rows_ahead(width)[rows, ahead]
        gains -= layer_seconds * _LAYERS_AHEAD[ahead]
        worth: Floats = np.maximum.reduce(gains, axis=-1)  # of no layer: 0
        return worth

    def _seconds_of_rows(self, num_new: int) -> float:
        """Return the seconds that further rows add to the target's call."""
        return self._costs.rows(self._num_rows, num_new)

    def _count_probes(self, gained: float) -> None:
        """Try one layer after 8 iterations without a draft, then after 16, 32, ... and 512.

        The target computes no row for it. Where it costs more than half an iteration, as where the
        draft model has a prompt to read, it is tried the more rarely: so it never takes more than
        one part in 16 of the time, after several without a gain one in 1024.
        Where tries did not help, an eighth of the iterations to the next one are not even thought
        about, nor are any that the credit has too little for.
        """
        estimator = self._estimator
        if len(self._layers) == self._num_forced:
            estimator.num_without += 1
            self._rest()
        else:
            estimator.count_draft(has_paid=gained > 0.0, most_patience=self._most_patience)

    def _rest(self) -> None:
        """Think about no draft for as long as none will be made."""
        if not self._may_rest:
            return
        estimator = self._estimator
        if self._has_draft_model and estimator.have_lost:
            rest = math.ceil(self._patience) - estimator.num_without
            self._num_to_rest = min(max(rest, 0), _LONGEST_HOPELESS_REST)
        elif self._needed:
            rest = estimator.credit.iterations_until(self._needed / self._usual)
            self._num_to_rest = min(rest, _LONGEST_REST)
        elif self._has_draft_model or estimator.patience == self._most_patience:
            # N-grams are not known to be wrong where there were none.
            self._num_to_rest = estimator.patience // FIRST_PROBE - 1


def _gap_to_unlisted(joint: JointDistribution) -> float:
    """Return what stands for the gap to tokens that a draft does not list."""
    return max(float(np.logaddexp.reduce(joint.log_masses)) - joint.log_unlisted, 0.0)


def _candidate_ids(forest: Forest, parents: Nodes, nodes: Nodes) -> NDArray[np.int64]:
    """Return the ``JointDistribution.candidate_ids`` of ``nodes``, (num_nodes,) int64.

    A node that is itself among the ``parents`` has ended before and stayed.
    """
    above, tokens = forest.parents[nodes], forest.tokens[nodes]
    if forest.has_ends:
        is_parent = np.zeros(len(forest), dtype=np.bool_)
        is_parent[parents] = True
        stays = is_parent[nodes]
        above[stays], tokens[stays] = nodes[stays], STAY
    ids: NDArray[np.int64] = (above << 32) + tokens + 1
    return ids
