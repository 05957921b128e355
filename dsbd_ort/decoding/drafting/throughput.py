"""Draft policy "throughput" (docs/algorithm.md 3.5): as much as pays, by costs and acceptance.

Only for outputs that do not depend on the draft (gumbel coupling or search, fixed width): it looks
at the noise of a layer before the layer is selected.

A layer of n candidates is accepted if all beams that the target selects are among them. The draft's
scores (log mass plus noise) say how sure that is. A candidate's *deficit* is the score that it
lacks to be among the best ``num_beams``, plus the deficit of its parent: a draft that is always
right selects exactly the candidates without one. A layer takes candidates by increasing deficit,
and the deficit of the best one left out is its *gap*. How often a gap was enough is counted.

With lambda, the tokens per second of the latest drafts, an accepted layer is worth 1 / lambda
seconds (the ratio of two expectations is largest where gain - lambda * cost is, Dinkelbach 1967).
The tokens are the expected ones: observed ones of so few drafts are mostly noise. A layer takes the
n that maximises

    reach * accepted(gap(n)) / lambda - (seconds of n more target rows) + (gain of further layers),

reach being the probability that all layers before it are accepted; the draft ends if nothing is
gained. Of calls that requests share each pays its share, as if all drafted alike.

Whatever is estimated, no layer is drafted unless the budget pays for its narrowest form
(``acceptance.py``). If estimates say that no draft pays, the budget buys tries of one layer, by the
draft's call alone; the target computes no row for them unless the drafted layer is sure enough. The
first prompt of a setting is read by the draft before there is evidence that it pays.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.rows import NO_INTS
from dsbd_ort.decoding.beams import Beams
from dsbd_ort.decoding.drafting.acceptance import SHARE, AcceptanceEstimator
from dsbd_ort.decoding.drafting.cost_curve import LOOK_AHEAD, RequestCosts
from dsbd_ort.decoding.drafting.draft import MOST_FORCED_LAYERS, Iteration, Scores
from dsbd_ort.decoding.drafting.draft_context import expected_speed
from dsbd_ort.decoding.forest import Forest, Nodes
from dsbd_ort.decoding.joint_distribution import STAY, JointDistribution, best_candidates

Floats = NDArray[np.float64]
_LAYERS_AHEAD = np.arange(LOOK_AHEAD + 1)
_FIRST_WITHOUT = 3  # iterations before a setting's first draft: they tell the cost of one without
_FIRST_TOKEN = 0.05  # of the time until the first token: most that a draft may add to it
_FEW_TOKENS = 32  # tokens; in shorter ones an iteration counts for more than the first token
_PROMPT_MARGIN = 2.0  # what drafts are expected to save, over what reading the prompt costs
_FIRST_ANSWER = 256  # most tokens that are expected of a setting's first answer
_LEAST_TRY = 0.16  # iterations that a try is charged at least when the next one is planned
_LONGEST_REST, _LONGEST_HOPELESS_REST = 16, 64  # iterations
_LONGEST_FREE_REST = 7  # if drafts cost no call: what is copied appears without notice
_CHEAP = 0.5  # iterations: if layers cost less, a try that agrees with the target is not charged


@dataclass(slots=True)
class _Layer:
    """A drafted layer, for learning from it."""

    nodes: Nodes  # the beams and draft beams it continues
    best: NDArray[np.int64]
    gaps: Floats  # (num_widths,) float64, by width from ``narrowest`` on
    narrowest: int


@dataclass(slots=True)
class _Cost:
    """Cost of a draft: what its layers may cost, and their rows and calls; times in seconds."""

    stake: float = 0.0  # most that its layers may cost, each at its narrowest
    prompt: float = 0.0  # to read the prompt and source, 0 once they are read
    num_left: int = 1  # iterations that may share the cost of the prompt
    num_rows: int = 0  # of the target call, with the layers that were chosen
    num_needed: int = 0  # without them
    next_call: tuple[int, float] = 0, 0.0  # rows, seconds of the prompt read before
    calls: list[tuple[int, float]] = field(default_factory=list)
    refused: float = 0.0  # cost of a first layer that exceeds the budget


@dataclass(slots=True)
class _Draft:
    """The draft of the current iteration: its limits, its layers and their expected result."""

    cost: _Cost = field(default_factory=_Cost)
    limit: int = 0  # most layers
    may_call: bool = False  # whether the draft model may be called for them
    may_try: bool = False  # the budget may buy a first layer that is not expected to pay
    is_try: bool = False  # it does
    layers: list[_Layer | None] = field(default_factory=list)  # None for a forced one
    num_forced: int = 0
    parent_deficits: Floats | None = None  # (num_beams,) of the last layer; None: all are 0
    reach: float = 1.0  # probability that all layers are accepted
    expected: float = 1.0  # tokens
    worth: float = 0.0  # seconds that further layers gain, their calls included


class ThroughputDraftPolicy:
    """DraftPolicy: drafts as many candidates as are expected to pay.

    host_seconds, target_seconds: return the request's time outside engine calls, in the target's.
    unread: returns how many tokens of prompt and source the draft model has to read.
    context_size: returns the size of the context that the draft model has (``draft_context``).
    may_rest: whether an iteration without a draft predicts the next ones; not with a constraint,
        which forces tokens without notice.
    """

    def __init__(
        self,
        costs: RequestCosts,
        estimator: AcceptanceEstimator,
        scores: Scores,
        forest: Forest,
        *,
        most_layers: int,
        host_seconds: Callable[[], float],
        target_seconds: Callable[[], float],
        unread: Callable[[], tuple[int, int]],
        context_size: Callable[[], int],
        may_rest: bool,
    ) -> None:
        self._costs, self._estimator, self._scores, self._forest = costs, estimator, scores, forest
        self._most_layers, self._may_rest, self._unread = most_layers, may_rest, unread
        self._host_seconds, self._target_seconds = host_seconds, target_seconds
        self._context_size = context_size
        self._budget = estimator.budget(costs.num_sharers)
        self._num_to_rest = self._num_iterations = 0
        self._has_begun = False  # an iteration: not while the policy rests
        self._has_advance = False  # whether an advance was asked for
        self._now = _Draft()
        self._gains_ahead = np.zeros(LOOK_AHEAD + 1)  # seconds, of that many further layers

    def rest(self) -> int:
        num_to_rest = self._num_to_rest
        self._num_to_rest = max(num_to_rest - 1, 0)
        return num_to_rest

    def begin(self, num_pending: int, most_layers: int) -> None:
        self._began = self._host_seconds()
        costs, estimator = self._costs, self._estimator
        self._refresh()
        budget = self._budget = estimator.budget(costs.num_sharers)
        estimator.refresh()
        usual, unread = self._usual, self._unread()
        prompt = costs.reading(*unread)
        if not self._num_iterations:
            if not estimator.calls:
                estimator.learn_rate(1.0, usual / costs.row)
            read = self._target_seconds() / costs.num_sharers
            budget.begin_request(read / usual, prompt / usual)
        is_first = costs.are_learned and not estimator.num_learned
        may_call = not is_first or estimator.loop.num_plain >= _FIRST_WITHOUT
        if not self._num_iterations and most_layers >= _FEW_TOKENS:
            # The first token does not wait for the draft's prompt; an iteration is lost.
            may_call &= prompt <= max(_FIRST_TOKEN * self._target_seconds(), self._usual_call)
        if may_call and not self._has_advance:
            self._ask_for_advance(most_layers + 1)
        num_left = most_layers + 1
        if unread[1]:  # few targets are longer than their source
            num_left = min(num_left, max(unread[1], 2))
        num_rows = min(num_pending, costs.most_rows)
        self._token_seconds = costs.row * estimator.calls / estimator.tokens
        self._gains_ahead[1:] = (estimator.acceptance ** _LAYERS_AHEAD[1:]).cumsum()
        self._gains_ahead *= self._token_seconds
        self._calls_ahead = self._usual_call * _LAYERS_AHEAD
        self._has_begun = True
        self._try_cost = max((self._usual_call + prompt) / usual, _LEAST_TRY)
        may_try = not budget.iterations_until(self._try_cost, is_try=True)
        pays = budget.believes_estimates and self._pays_for(prompt, most_layers + 1)
        # The less there is, the smaller the drafts: else one or two that fail would be all.
        stake = max(0.5 * self._balance, self._balance - 0.6 * usual)
        self._now = _Draft(
            _Cost(stake, prompt, num_left, num_rows, num_needed=num_rows),
            limit=min(self._most_layers, most_layers),
            may_call=may_call and (pays or may_try),
            may_try=may_try,
        )
        self._now.worth = float(self._worth_of_more(1.0, num_rows)) + self._usual_call

    @property
    def _balance(self) -> float:
        return self._budget.balance * self._usual  # seconds

    def _pays_for(self, prompt: float, most_tokens: int) -> bool:
        """Return whether drafts are expected to save twice what reading the prompt costs.

        Decided by the agreement that was measured with the pair, as long as nothing else is known;
        without it drafts are tried.
        """
        costs, estimator = self._costs, self._estimator
        if not prompt or estimator.num_learned or estimator.agreement_of_pair is None:
            return True
        num_tokens = self._expected_tokens(most_tokens)
        speed = expected_speed(costs, estimator, estimator.agreement(self._context_size()))
        return num_tokens * self._usual * (1.0 - 1.0 / speed) >= _PROMPT_MARGIN * prompt

    def _expected_tokens(self, most_tokens: int) -> int:
        return min(most_tokens, round(self._estimator.answer_length) or _FIRST_ANSWER)

    def _ask_for_advance(self, most_tokens: int) -> None:
        """Have the budget advance a share of the request, if drafts are expected to pay."""
        costs, estimator, self._has_advance = self._costs, self._estimator, True
        if costs.has_draft_model and expected_speed(costs, estimator) > 1.0:
            num_tokens = self._expected_tokens(most_tokens)
            read = self._target_seconds() / costs.num_sharers
            self._budget.advance(num_tokens + read / self._usual)

    def _refresh(self) -> None:
        costs, loop = self._costs, self._estimator.loop
        costs.refresh()
        self._layer = loop.layer
        self._usual_call = costs.draft[costs.num_beams] + loop.layer
        self._usual = costs.seconds[costs.num_beams] + loop.iteration

    def takes_all(self, num_candidates: int, num_rows: int) -> bool:
        """See DraftPolicy.takes_all: if the rows cost less than the model's call saves."""
        costs = self._costs
        more = self._seconds_of_rows(num_candidates) - self._seconds_of_rows(costs.num_beams)
        is_cheaper = more < costs.draft[min(num_rows, costs.most_rows)]
        return num_candidates <= costs.most_beams and is_cheaper

    def wants_layer(self, num_rows: int, num_whole: int = 0) -> bool:
        costs, cost = self._costs, self._now.cost
        num_rows = min(num_rows, costs.most_rows)
        call, prompt = costs.draft[num_rows] + self._layer, cost.prompt if num_rows else 0.0
        if not self._estimator.num_learned:  # no evidence yet: the rest is for the first drafts
            prompt = min(prompt, 0.5 * cost.stake)
        if not (self._may_draft(num_rows) and self._can_pay(num_rows, call, prompt)):
            return False
        if not (num_rows or num_whole) and costs.has_draft_model:  # its call is not known yet
            return True
        cost.next_call = num_rows, prompt
        return self._gains(num_rows, num_whole, call) or self._may_lose()

    def _may_draft(self, num_rows: int) -> bool:
        """Return whether one more layer is possible, and allowed if the draft model is called."""
        draft = self._now
        is_first = not draft.cost.calls
        may_call = draft.may_call and (is_first or self._budget.believes_estimates)
        has_room = len(draft.layers) < draft.limit and draft.reach > 0.0
        return has_room and (may_call or not num_rows)

    def _can_pay(self, num_rows: int, call: float, prompt: float) -> bool:
        """Return whether the stake, or the whole balance for a first layer, pays for a layer."""
        draft, cost = self._now, self._now.cost
        needed = self._spent() + call + prompt
        if num_rows and not draft.may_try:
            needed += self._seconds_of_rows(self._costs.num_beams)
        most = cost.stake if draft.layers else max(cost.stake, self._balance)
        if needed > most:
            cost.refused = 0.0 if draft.layers else needed
            return False
        cost.stake = max(cost.stake, needed)
        return True

    def _gains(self, num_rows: int, num_whole: int, call: float) -> bool:
        """Return whether a layer and those after it are expected to gain more than they cost."""
        draft, cost, costs = self._now, self._now.cost, self._costs
        worth = draft.worth - call
        if num_whole:  # the selected beams are among them: an iteration is saved
            cost.stake = self._balance
            saved = costs.seconds[min(num_whole, costs.num_beams)] + self._estimator.loop.iteration
            worth += max(draft.reach * saved - self._seconds_of_rows(num_whole) - call, 0.0)
        # Every iteration left pays alike for the prompt: one for two tokens, if drafting pays.
        return worth > (2.0 * cost.prompt / cost.num_left if num_rows else 0.0)

    def _may_lose(self) -> bool:
        """Return whether a first layer is drafted without expected gain, and note if as a try."""
        draft, has_earned = self._now, self._budget.has_earned
        is_possible = not draft.cost.calls and (draft.may_try or has_earned)
        draft.is_try = is_possible and not has_earned
        return is_possible

    def choose(self, joint: JointDistribution, depth: int) -> NDArray[np.int64]:
        draft, cost, costs = self._now, self._now.cost, self._costs
        cost.calls.append(cost.next_call)
        cost.prompt = 0.0 if cost.next_call[0] else cost.prompt
        best, deficits = self._least_deficits(joint, self._scores(joint, depth))
        num_best = len(best)
        if not num_best:  # every candidate ends its sequence: there is nothing to verify
            draft.reach = 0.0
            return best
        narrowest = min(costs.num_beams, num_best)
        widest = max(narrowest, min(costs.most_beams, num_best))
        gaps = deficits[narrowest : widest + 1]
        if num_best <= widest:  # none is left out of the widest
            gaps = np.append(gaps, np.inf)
        if joint.log_unlisted > -np.inf:  # tokens that the draft does not list
            gap = float(np.logaddexp.reduce(joint.log_masses)) - joint.log_unlisted
            gaps = np.minimum(gaps, max(gap, 0.0))
        draft.layers.append(_Layer(joint.nodes, joint.candidate_ids(best), gaps, narrowest))
        reach = draft.reach * self._estimator.accepted(gaps, len(draft.layers) - 1)
        before = cost.num_rows
        rows = slice(before + narrowest, before + widest + 1)
        more = costs.target[rows] - costs.target[before]
        worth = self._worth_of_more(reach, rows)
        gain = reach * self._token_seconds - more + worth
        # Not by the stake: narrow layers, accepted less often, would keep a small budget small.
        num_possible = max(costs.most_known - rows.start + 1, 0)
        chosen = int(gain[:num_possible].argmax()) if num_possible else 0
        width, new_reach = narrowest + chosen, float(reach[chosen])
        self._estimator.choose(new_reach / draft.reach, width)
        if not num_possible or gain[chosen] <= 0.0:
            draft.reach = 0.0
            return NO_INTS
        draft.is_try = False  # it is expected to pay
        draft.reach, draft.worth = new_reach, float(worth[chosen]) + self._usual_call
        draft.expected += new_reach
        cost.num_rows = min(before + width, costs.most_rows)
        draft.parent_deficits = deficits[:width] if deficits[width - 1] > 0.0 else None
        return best[:width]

    def choose_forced(self, joint: JointDistribution) -> NDArray[np.int64]:
        """See DraftPolicy.choose_forced; if it is not reached, its rows are wasted."""
        draft, cost, most_rows = self._now, self._now.cost, self._costs.most_rows
        num_new = int(np.count_nonzero(joint.tokens != STAY))
        saved = draft.reach * self._costs.seconds[min(num_new, most_rows)]
        is_limit = len(draft.layers) >= draft.limit or draft.num_forced == MOST_FORCED_LAYERS
        if is_limit or saved <= self._seconds_of_rows(num_new):
            return NO_INTS
        draft.num_forced += 1
        draft.expected += draft.reach
        draft.layers.append(None)
        cost.num_needed = min(cost.num_needed + num_new, most_rows)
        cost.num_rows = min(cost.num_rows + num_new, most_rows)
        draft.worth = float(self._worth_of_more(draft.reach, cost.num_rows)) + self._usual_call
        if draft.parent_deficits is not None:
            draft.parent_deficits = draft.parent_deficits[joint.parents]
        return np.arange(len(joint.tokens))

    def observe(self, iteration: Iteration) -> None:
        estimator, draft, cost = self._estimator, self._now, self._now.cost
        num_saved = len(iteration.committed) - 1
        budget, has_begun, self._has_begun = self._budget, self._has_begun, False
        budget.pass_iteration()
        if not has_begun:
            budget.add(num_saved)  # by nodes of an earlier draft
            return
        self._num_iterations += 1
        estimator.loop.learn(len(draft.layers), self._host_seconds() - self._began)
        self._refresh()  # calls cost what they are known to cost now that they have been made
        spent, agrees = self._spent(), self._learn(draft, iteration.committed)
        if len(draft.layers) > draft.num_forced:
            layer = self._usual_call + self._seconds_of_rows(self._costs.num_beams)
            if not (draft.is_try and agrees and layer < _CHEAP * self._usual):
                budget.settle(spent / self._usual, num_saved, is_try=draft.is_try)
        else:
            budget.add(num_saved)
            if self._may_rest:
                self._plan_rest()
        if self._num_iterations > 1 or self._costs.num_beams == 1:  # the first has one row
            prompt = sum([prompt for _, prompt in cost.calls])
            seconds = self._costs.seconds[cost.num_needed] + estimator.loop.iteration + spent
            seconds += 2.0 * prompt / cost.num_left - prompt
            estimator.learn_rate(draft.expected, seconds / self._costs.row)

    def _plan_rest(self) -> None:
        """Rest until the budget pays for a draft, or for part of the wait for a try."""
        budget = self._budget
        if refused := self._now.cost.refused:
            rest = budget.iterations_until(refused / self._usual)
        else:
            wait = budget.iterations_until(self._try_cost, is_try=True)
            rest = int(wait * (1.0 - budget.share / SHARE))
        # While tries have paid, calls may turn out cheaper, by what others learn.
        longest = _LONGEST_REST if budget.share == SHARE else _LONGEST_HOPELESS_REST
        longest = longest if self._costs.has_draft_model else _LONGEST_FREE_REST
        self._num_to_rest = min(rest, longest)

    def _learn(self, draft: _Draft, committed: Sequence[Beams]) -> bool:
        """Count which widths sufficed, layer by layer; return if the first's narrowest did."""
        agrees = False
        for depth, (layer, beams) in enumerate(zip(draft.layers, committed, strict=False)):
            if layer is None:
                continue
            if not len(beams.nodes):  # all that was selected has ended: no width was tested
                break
            rank_by_id = dict(zip(layer.best.tolist(), range(len(layer.best)), strict=True))
            taken = _candidate_ids(self._forest, layer.nodes, beams.nodes).tolist()
            last = max([rank_by_id.get(each, len(layer.best)) for each in taken])
            num_short = min(max(last + 1 - layer.narrowest, 0), len(layer.gaps))
            self._estimator.learn(layer.gaps, num_short, depth)
            agrees |= not (depth or num_short)
            if not depth:
                self._estimator.learn_agreement(self._context_size(), agrees=agrees)
        return agrees

    def _spent(self) -> float:
        """Return the seconds that the draft costs so far, its forced layers aside."""
        costs, cost = self._costs, self._now.cost
        seconds = costs.seconds[cost.num_rows] - costs.seconds[cost.num_needed]
        for num_rows, prompt in cost.calls:
            seconds += costs.draft[num_rows] + self._layer + prompt
        return seconds

    def _seconds_of_rows(self, num_new: int) -> float:
        seconds, before = self._costs.seconds, self._now.cost.num_rows
        return seconds[min(before + num_new, self._costs.most_rows)] - seconds[before]

    def _least_deficits(
        self, joint: JointDistribution, scores: Floats
    ) -> tuple[NDArray[np.int64], Floats]:
        """Return the candidates of least deficit, in order, and their deficits, (num_best,)."""
        num_beams, num_wanted = self._costs.num_beams, self._costs.most_beams + 1
        parents = self._now.parent_deficits
        if parents is None:
            best = best_candidates(scores, num_wanted)
            best_scores = scores[best]
            # Fewer can be selected than beams: a draft that is always right selects them all.
            threshold = best_scores[num_beams - 1] if len(best) >= num_beams else -np.inf
            return best, np.maximum(threshold - best_scores, 0.0)
        inherited = parents[joint.parents]
        certain = scores[inherited == 0.0]
        threshold = -np.inf
        if len(certain) >= num_beams:
            last = len(certain) - num_beams
            certain.partition(last)
            threshold = certain[last]
        if threshold > -np.inf:
            deficits = inherited + np.maximum(threshold - scores, 0.0)
        else:
            deficits = np.where(scores > -np.inf, inherited, np.inf)
        best = best_candidates(-deficits, num_wanted)
        return best, deficits[best]

    def _worth_of_more(self, reach: Floats | float, rows: slice | int) -> Floats:
        """Return the gain of layers after one reached with this probability, (n,) or ().

        They have the usual width and acceptance. As many as pay together: if the engine computes
        rows in blocks, one layer can be expensive and the next one free. rows: before them.
        """
        draft, costs, estimator = self._now, self._costs, self._estimator
        num_ahead = draft.limit - len(draft.layers)
        if num_ahead <= 0:
            none: Floats = np.multiply(reach, 0.0)
            return none
        ahead = slice((num_ahead if num_ahead < LOOK_AHEAD else LOOK_AHEAD) + 1)
        width = max(round(estimator.rows), self._costs.num_beams)
        gains = np.multiply.outer(reach, self._gains_ahead[ahead])
        gains -= costs.rows_ahead(width)[rows, ahead]
        gains -= self._calls_ahead[ahead]
        worth: Floats = np.maximum.reduce(gains, axis=-1)  # of no layer: 0
        return worth


def _candidate_ids(forest: Forest, parents: Nodes, nodes: Nodes) -> NDArray[np.int64]:
    """Return ``JointDistribution.candidate_ids`` of nodes; those among ``parents`` have ended."""
    above, tokens = forest.parents[nodes], forest.tokens[nodes]
    if forest.has_ends:
        is_parent = np.zeros(len(forest), dtype=np.bool_)
        is_parent[parents] = True
        stays = is_parent[nodes]
        above[stays], tokens[stays] = nodes[stays], STAY
    ids: NDArray[np.int64] = (above << 32) + tokens
    return ids
