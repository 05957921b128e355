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

Estimates may be wrong, so drafts are made on credit. It grows by a small share of the time and by
what drafts win, falls by what they cost, and none may cost more than there is. What a layer would
have brought is learned without it too, where that needs no engine call. A draft model was made for
its target; n-grams are a bet: they begin with little credit, and their calls are no more than twice
as large as those whose costs were seen. So an answer of 64 tokens none of which they guess takes at
most 3 % longer than without a draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.drafting.acceptance import (
    FIRST_PROBE,
    LAST_PROBE,
    AcceptanceEstimator,
)
from dsbd_ort.decoding.drafting.cost_curve import FREE, CostCurve, Costs, EngineCosts
from dsbd_ort.decoding.drafting.draft import MOST_FORCED_LAYERS, Iteration, Scores
from dsbd_ort.decoding.forest import Forest, Nodes
from dsbd_ort.decoding.joint_distribution import STAY, JointDistribution, best_candidates
from dsbd_ort.decoding.kv_cache import PREFILL_CHUNK

Floats = NDArray[np.float64]
_RATE_MEMORY = 0.9
_LOOK_AHEAD = 6
_LAYERS_AHEAD = np.arange(_LOOK_AHEAD + 1)
_REST = 7  # iterations
_SHARE_AT_STAKE = 0.02  # of the time: what drafts may cost in vain, beside what they have won
_FIRST_CREDIT, _MOST_CREDIT = 0.6, 3.0  # iterations without a draft


@dataclass(frozen=True)
class _Layer:
    """A drafted layer as it is needed to learn from it.

    Attributes:
        nodes: the beams and draft beams it continues.
        best: (num_best,) int64. Their ``JointDistribution.candidate_ids``, least deficit first.
        deficits: (num_best,) float64. Theirs.
        gaps: (num_widths,) float64, by width from ``num_beams`` on.
        included: (num_widths,) float64. Largest deficit among the candidates of each width.
    """

    nodes: Nodes
    best: NDArray[np.int64]
    deficits: Floats
    gaps: Floats
    included: Floats


class ThroughputDraftPolicy:
    """Drafts what is expected to pay.

    Args:
        costs: of both engines.
        estimator: is read and taught.
        scores: the rule's ranking.
        forest: of the request.
        num_beams: beams that the rule selects in a layer.
        most_layers, most_beams: upper limits.
        num_sharers: returns how many requests share the engine calls just now.
        has_draft_model: whether any draft costs an engine call.
        host_seconds: returns the time that the request has spent outside engine calls.
        may_rest: whether an iteration without a draft says something of the next ones: what a
            constraint forces comes unannounced.
    """

    def __init__(
        self,
        costs: Costs,
        estimator: AcceptanceEstimator,
        scores: Scores,
        forest: Forest,
        *,
        num_beams: int,
        most_layers: int,
        most_beams: int,
        num_sharers: Callable[[], int],
        has_draft_model: bool,
        host_seconds: Callable[[], float],
        may_rest: bool,
    ) -> None:
        self._costs = costs
        self._most_rows = (most_layers + 2) * (most_beams + num_beams)
        self._num_sharers = num_sharers
        self._has_draft_model = has_draft_model
        self._host_seconds = host_seconds
        self._may_rest = may_rest
        self._began = self._drafting = 0.0
        self._estimator = estimator
        self._scores = scores
        self._forest = forest
        self._num_beams = num_beams
        self._take_share()
        self._most_layers = most_layers
        self._most_beams = most_beams
        self._is_resting, self._num_to_rest = False, 0
        self._layers: list[_Layer | None] = []  # None: a forced one
        self._num_forced = 0
        self._num_rows = self._num_needed = self._limit = 0
        self._reach = self._seconds = self._token_seconds = self._call = self._prompt = 0.0
        self._usual = self._called = self._credit = 0.0  # seconds; of the draft's layers so far
        self._expected = 1.0
        self._prompt_share = 0.0
        self._is_probe = self._has_probed = False
        self._is_usual = num_beams == 1  # the first iteration has one row, the next ones as many
        self._parent_deficits: Floats | None = None

    def begin(
        self, num_pending: int, most_layers: int, num_unread: int, num_unread_source: int = 0
    ) -> None:
        """See DraftPolicy.begin."""
        self._is_resting = self._num_to_rest > 0
        if self._is_resting:
            self._num_to_rest -= 1
            self._limit = 0
            return
        self._began, self._drafting = self._host_seconds(), 0.0
        self._layers, self._num_forced = [], 0
        self._take_share()
        estimator = self._estimator
        estimator.refresh()
        # Rows beyond the table cost as much as its last: more are pending only after a restart.
        self._num_rows = self._num_needed = min(num_pending, len(self._target_seconds) - 1)
        self._limit = min(self._most_layers, most_layers)
        self._reach = self._expected = 1.0  # an iteration commits one token without a draft
        self._parent_deficits = None
        self._seconds = float(self._target_seconds[self._num_rows]) + estimator.loop.iteration
        if not estimator.calls:
            estimator.calls = self._usual_seconds() / self._call_seconds
            estimator.tokens = 1.0
            estimator.credit = _MOST_CREDIT if self._has_draft_model else _FIRST_CREDIT
        self._token_seconds = self._call_seconds * estimator.calls / estimator.tokens
        self._usual = self._usual_seconds()
        self._called, self._credit = 0.0, self._usual * estimator.credit
        costs = self._costs.now()
        prompt = _seconds_of_prompt(costs.draft, num_unread)
        # Every iteration that is left pays alike: one for two tokens, where drafting is worth it.
        num_left = most_layers + 1
        if num_unread_source and self._has_draft_model:
            prompt += _seconds_of_source(costs.source, num_unread_source)
            # Few targets are longer than their source, whatever they may be.
            num_left = min(num_left, max(num_unread_source, 2))
        self._prompt_share = 2.0 * prompt / num_left
        probe = (prompt + self._draft_seconds[self._num_beams]) / self._seconds
        self._is_probe = estimator.num_without >= estimator.probe_after * max(2.0 * probe, 1.0)

    def takes_all(self, num_candidates: int, num_rows: int) -> bool:
        """See DraftPolicy.takes_all: where the rows cost less than the model's call saves."""
        if num_candidates > self._most_beams:
            return False
        more = self._seconds_of_rows(num_candidates) - self._seconds_of_rows(self._num_beams)
        return more < self._draft_seconds[min(num_rows, len(self._draft_seconds) - 1)]

    def wants_layer(self, num_rows: int, num_whole: int = 0) -> bool:
        """See DraftPolicy.wants_layer."""
        if len(self._layers) >= self._limit or self._reach == 0.0:
            return False
        prompt = self._prompt_share if num_rows else 0.0
        call = self._draft_seconds[min(num_rows, len(self._draft_seconds) - 1)]
        call += self._estimator.loop.layer
        least = self._seconds_of_rows(self._num_beams) if num_rows and not self._is_probe else 0.0
        if self._spent() + call + least > self._credit:
            return False
        worth = self._worth_from_here(call)
        if num_whole:  # what is selected is among them: an iteration is saved
            saved = float(self._target_seconds[min(num_whole, self._num_beams)])
            saved += self._estimator.loop.iteration
            worth += max(self._reach * saved - self._seconds_of_rows(num_whole) - call, 0.0)
        self._call, self._prompt = call, prompt
        if is_wanted := worth > prompt or self._is_probe:
            self._prompt_share -= prompt  # only before the first of its layers
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
        deficits = self._deficits_of(joint, depth)
        best = best_candidates(-deficits, self._most_beams + 1)
        if not len(best):  # every candidate ends its sequence: there is nothing to verify
            self._reach = 0.0
            return best
        least = min(self._num_beams, len(best))
        widths = np.arange(least, max(least, min(self._most_beams, len(best))) + 1)
        ordered = np.empty(len(best) + 1)
        ordered[:-1], ordered[-1] = deficits[best], np.inf
        gaps, included = ordered[widths], ordered[widths - 1]
        if joint.log_unlisted > -np.inf:
            gaps = np.minimum(gaps, _gap_to_unlisted(joint))
        ids = joint.candidate_ids(best)
        self._layers.append(_Layer(joint.nodes, ids, ordered[:-1], gaps, included))
        reach = self._reach * self._estimator.accepted(gaps, len(self._layers) - 1)
        seconds, last = self._target_seconds, len(self._target_seconds) - 1
        more = seconds[np.minimum(self._num_rows + widths, last)] - seconds[self._num_rows]
        usual = self._draft_seconds[self._num_beams] + self._estimator.loop.layer
        gain = reach * self._token_seconds - more
        gain += self._worth_of_more(reach, self._num_rows + widths, usual)
        is_possible = self._spent() + more <= self._credit
        is_possible &= self._num_rows + widths <= self._most_known
        gain[~is_possible] = -np.inf
        chosen = int(gain.argmax())
        self._note(reach[chosen] / self._reach, int(widths[chosen]))
        self._is_probe = False
        if gain[chosen] <= 0.0:
            self._reach = 0.0
            return best[:0]
        self._reach = float(reach[chosen])
        self._expected += self._reach
        self._num_rows = min(self._num_rows + int(widths[chosen]), last)
        self._seconds += float(more[chosen])
        taken = best[: widths[chosen]]
        self._parent_deficits = deficits[taken]
        return taken

    def choose_forced(self, joint: JointDistribution) -> NDArray[np.int64]:
        """See DraftPolicy.choose_forced.

        Reached with probability ``reach``, a call of its own is saved; else its rows are wasted.
        """
        seconds, last = self._target_seconds, len(self._target_seconds) - 1
        num_new = int(np.count_nonzero(joint.tokens != STAY))
        more = self._seconds_of_rows(num_new)
        is_worth_it = self._reach * float(seconds[min(num_new, last)]) > more
        is_limit = len(self._layers) >= self._limit or self._num_forced == MOST_FORCED_LAYERS
        if is_limit or not is_worth_it:
            return np.arange(0)
        self._num_forced += 1
        self._expected += self._reach
        self._layers.append(None)
        self._num_needed = min(self._num_needed + num_new, last)
        self._num_rows = min(self._num_rows + num_new, last)
        self._seconds += more
        if self._parent_deficits is not None:
            self._parent_deficits = self._parent_deficits[joint.parents]
        return np.arange(len(joint.tokens))

    def observe(self, iteration: Iteration) -> None:
        """See DraftPolicy.observe."""
        estimator = self._estimator
        self._settle(len(iteration.committed))
        if self._is_resting:
            estimator.num_without += 1
            return
        for depth, (layer, beams) in enumerate(
            zip(self._layers, iteration.committed, strict=False)
        ):
            if layer is None:
                continue
            if not len(beams.nodes):  # all that was selected has ended: no width was tested
                break
            taken = _candidate_ids(self._forest, layer.nodes, beams.nodes)
            taken.sort()
            place = taken.searchsorted(layer.best)
            found = layer.deficits[taken.take(place, mode="clip") == layer.best]
            needed = found.max() if len(found) == len(taken) else np.inf
            estimator.learn(layer.gaps, needed <= layer.included, depth)
        if self._is_usual:
            estimator.tokens = _RATE_MEMORY * estimator.tokens + self._expected
            calls = self._seconds / self._call_seconds
            estimator.calls = _RATE_MEMORY * estimator.calls + calls
        self._is_usual = True
        rest = self._host_seconds() - self._began - self._drafting
        estimator.loop.learn(len(self._layers), self._drafting, rest)
        self._count_probes()

    def _usual_seconds(self) -> float:
        """Return the seconds of an iteration without a draft."""
        return float(self._target_seconds[self._num_beams]) + self._estimator.loop.iteration

    def _spent(self) -> float:
        """Return the seconds that the draft costs so far, its forced layers aside."""
        seconds = self._target_seconds
        return self._called + float(seconds[self._num_rows] - seconds[self._num_needed])

    def _settle(self, num_committed: int) -> None:
        """Add to the credit what the draft has won: the iterations saved, less its cost."""
        won = num_committed - 1 + _SHARE_AT_STAKE
        if self._layers and not self._is_resting:
            won -= self._called / self._usual
            self._called = 0.0
            self._take_share()  # its rows may have been found dearer than they were thought
            won -= self._spent() / self._usual_seconds()
        self._estimator.credit = min(self._estimator.credit + won, _MOST_CREDIT)

    def _take_share(self) -> None:
        """Count with what calls cost this request just now."""
        costs = self._costs.now()
        if not self._has_draft_model:
            costs = EngineCosts(costs.target, FREE)
        self._call_seconds = costs.target.seconds[0]
        num_sharers = self._num_sharers()
        self._most_known = self._most_rows
        if costs.target.seen is not None and not self._has_draft_model:
            fewest, most = costs.target.seen
            is_base_known = fewest <= num_sharers * self._num_beams
            self._most_known = 2 * most // num_sharers if is_base_known else 0
        self._target_seconds, self._draft_seconds = _seconds_of_share(
            costs, self._most_rows, num_sharers
        )

    def _deficits_of(self, joint: JointDistribution, depth: int) -> Floats:
        """Return the deficit of every candidate, (num_candidates,) float64; inf: impossible."""
        scores = self._scores(joint, depth)
        parents = self._parent_deficits
        inherited: Floats | float = 0.0
        if parents is None:  # the beams themselves are certain
            certain = scores
        else:
            inherited = parents[joint.parents]
            certain = scores[inherited == 0.0]
        threshold = -np.inf
        if len(certain) >= self._num_beams:
            last = len(certain) - self._num_beams
            threshold = np.partition(certain, last)[last]
        if threshold > -np.inf:
            return inherited + np.maximum(threshold - scores, 0.0)
        # Fewer can be selected than beams: a draft that is always right selects them all.
        return np.where(scores > -np.inf, inherited, np.inf)

    def _worth_of_more(
        self, reach: Floats, num_rows: NDArray[np.int64], layer_seconds: float
    ) -> Floats:
        """Return what layers behind one reached so are worth, less their cost, (n,) float64.

        They are of the usual width and acceptance, as many as pay together: where the engine
        computes rows in blocks, one layer can be dear and the next one free.

        reach, num_rows: (n,) probability and target rows before them.
        layer_seconds: a layer's cost, its target rows aside.
        """
        num_layers, width, acceptance = self._usual_layers()
        if not num_layers:
            return np.zeros_like(reach)
        layers = _LAYERS_AHEAD[: num_layers + 1]
        seconds = self._target_seconds.take(np.add.outer(num_rows, width * layers), mode="clip")
        gains = np.multiply.outer(reach * self._token_seconds, acceptance ** layers[1:])
        gains -= seconds[:, 1:] - seconds[:, :-1]
        gains -= layer_seconds
        worth: Floats = np.maximum(gains.cumsum(axis=1).max(axis=1), 0.0)
        return worth

    def _worth_from_here(self, layer_seconds: float) -> float:
        """Return ``_worth_of_more`` behind what is drafted: asked twice a layer, so no arrays."""
        num_layers, width, acceptance = self._usual_layers()
        seconds, last = self._target_seconds.item, len(self._target_seconds) - 1
        gain = worth = 0.0
        accepted, rows = self._reach * self._token_seconds, self._num_rows
        before = seconds(rows)
        for _ in range(num_layers):
            accepted *= acceptance
            rows = min(rows + width, last)
            after = seconds(rows)
            gain += accepted - (after - before) - layer_seconds
            before, worth = after, max(worth, gain)
        return worth

    def _usual_layers(self) -> tuple[int, int, float]:
        """Return how many further layers are thought of, their width and acceptance."""
        num_layers = max(min(self._limit - len(self._layers), _LOOK_AHEAD), 0)
        width = round(max(self._estimator.rows, self._num_beams))
        return num_layers, width, self._estimator.acceptance

    def _seconds_of_rows(self, num_new: int) -> float:
        """Return the seconds that further rows add to the target's call."""
        seconds, last = self._target_seconds, len(self._target_seconds) - 1
        return float(seconds[min(self._num_rows + num_new, last)] - seconds[self._num_rows])

    def _note(self, acceptance: float, width: int) -> None:
        estimator = self._estimator
        estimator.acceptance += 0.1 * (acceptance - estimator.acceptance)
        estimator.rows = 0.9 * estimator.rows + 0.1 * width if estimator.rows else float(width)

    def _count_probes(self) -> None:
        """Try one layer after 8 iterations without a draft, then after 16, 32 and 64.

        The target computes no row for it. Where it costs more than half an iteration, as where the
        draft model has a prompt to read, it is tried the more rarely: so it never takes more than
        one part in 16 of the time, after several without a gain one in 128.
        Where the last tries did not help either, the next seven iterations are not even thought
        about; earlier that would keep from learning what a draft is worth.
        """
        estimator = self._estimator
        if len(self._layers) == self._num_forced:
            estimator.num_without += 1
            if self._may_rest and estimator.probe_after == LAST_PROBE:
                self._num_to_rest = _REST
            return
        if estimator.num_without >= estimator.probe_after:
            estimator.probe_after = min(2 * estimator.probe_after, LAST_PROBE)
            self._has_probed = True
        elif not self._has_probed:  # else it drafts with a prompt that it would not have read
            estimator.probe_after = FIRST_PROBE
        estimator.num_without = 0


def _gap_to_unlisted(joint: JointDistribution) -> float:
    """Return what stands for the gap to tokens that a draft does not list: the ratio of masses."""
    return max(float(np.logaddexp.reduce(joint.log_masses)) - joint.log_unlisted, 0.0)


@lru_cache(maxsize=256)  # the same few come in every iteration of every request
def _seconds_of_share(
    costs: EngineCosts, most_rows: int, num_sharers: int
) -> tuple[Floats, tuple[float, ...]]:
    """Return the seconds of a target call, (most_rows + 1,), and of a drafted layer, by rows."""
    target = costs.target.up_to(most_rows, num_sharers)
    target.flags.writeable = False
    draft = costs.draft.up_to(most_rows, num_sharers)
    return target, tuple(draft.tolist())


@lru_cache(maxsize=256)
def _seconds_of_prompt(draft: CostCurve, num_rows: int) -> float:
    """Return the seconds in which the draft model reads so many rows of a prompt."""
    seconds = draft.up_to(PREFILL_CHUNK)
    num_whole, rest = divmod(num_rows, PREFILL_CHUNK)
    return num_whole * float(seconds[-1]) + float(seconds[rest])


@lru_cache(maxsize=256)
def _seconds_of_source(source: CostCurve, num_tokens: int) -> float:
    """Return the seconds in which the draft model reads a source."""
    return float(source.up_to(num_tokens)[-1])


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
