"""Drafting policy "throughput" (ALGORITHM.md 3.5): as much as pays, from costs and experience.

Lawful only where the output does not depend on the draft (gumbel coupling or search, fixed
width): it looks at the noise of a layer before the layer is selected.

A layer of n candidates is accepted when all beams that the target selects are among them. The
draft's scores (log mass plus noise) say how sure that is. A candidate's *deficit* is what it lacks
to be among the best ``num_beams``, plus what its parent lacked: a draft that is always right
selects exactly the candidates without one. A layer takes candidates by increasing deficit, and the
deficit of the best one left out is its *gap*. How often a gap was enough is counted as it goes.

With lambda, the tokens committed per second so far, an accepted layer is worth 1 / lambda seconds
(the ratio of two expectations is largest where gain - lambda * cost is, Dinkelbach 1967). So a
layer takes the n that maximises

    reach * accepted(gap(n)) / lambda - (seconds of n more target rows) + (what may follow),

reach being the probability that all layers before it are accepted, and the draft ends where
nothing is gained. Of calls that requests share, each counts its share as if all did alike: the
more there are, the more a row costs beside the call, and the less is drafted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.cost_curve import EngineCosts
from dsbd_ort.decoding.drafting import Scores
from dsbd_ort.decoding.experience import FIRST_PROBE, LAST_PROBE, Experience
from dsbd_ort.decoding.forest import Forest
from dsbd_ort.decoding.gumbel_coupling import best_candidates
from dsbd_ort.decoding.joint_law import STAY, JointLaw

Floats = NDArray[np.float64]
_RATE_MEMORY = 0.9
_HOST_SECONDS = 1e-4  # of the loop itself, a layer
_LOOK_AHEAD = 6


@dataclass(frozen=True)
class _Layer:
    """A drafted layer as it is needed to learn from it.

    Attributes:
        nodes: the beams and draft beams it continues.
        best: (num_best,) int64. Numbers (``JointLaw.candidate_ids``) of those of least deficit.
        deficits: (num_best,) float64. Theirs.
        gaps: (num_widths,) float64, by width from ``num_beams`` on.
        included: (num_widths,) float64. Largest deficit among the candidates of each width.
    """

    nodes: list[int]
    best: NDArray[np.int64]
    deficits: Floats
    gaps: Floats
    included: Floats


class ThroughputDrafting:
    """Drafts what is expected to pay.

    Args:
        costs: of both engines.
        experience: is learned from and added to.
        scores: the rule's ranking.
        num_beams: beams that the rule selects in a layer.
        most_layers, most_beams: upper limits.
        num_sharers: tells how many requests share the engine calls just now.
    """

    def __init__(
        self,
        costs: EngineCosts,
        experience: Experience,
        scores: Scores,
        *,
        num_beams: int,
        most_layers: int,
        most_beams: int,
        num_sharers: Callable[[], int],
    ) -> None:
        self._costs = costs
        self._most_rows = (most_layers + 2) * (most_beams + num_beams)
        self._num_sharers = num_sharers
        self._take_share()
        self._experience = experience
        self._scores = scores
        self._num_beams = num_beams
        self._most_layers = most_layers
        self._most_beams = most_beams
        self._layers: list[_Layer] = []
        self._num_rows = self._limit = 0
        self._reach = self._seconds = self._token_seconds = 0.0
        self._is_probe = False
        self._parent_deficits: Floats | None = None

    def begin(self, num_pending: int, most_layers: int) -> None:
        """See Drafting.begin."""
        self._layers = []
        self._take_share()
        self._experience.refresh()
        # Rows beyond the table cost as much as its last: more are pending only after a restart.
        self._num_rows = min(num_pending, len(self._target_seconds) - 1)
        self._limit = min(self._most_layers, most_layers)
        self._reach = 1.0
        self._parent_deficits = None
        self._seconds = float(self._target_seconds[self._num_rows]) + _HOST_SECONDS
        experience = self._experience
        if not experience.seconds:
            experience.seconds, experience.tokens = self._seconds, 1.0
        self._token_seconds = experience.seconds / experience.tokens
        self._is_probe = experience.num_without >= experience.probe_after

    def wants_layer(self, num_rows: int) -> bool:
        """See Drafting.wants_layer."""
        if len(self._layers) >= self._limit or self._reach == 0.0:
            return False
        call = self._draft_seconds[min(num_rows, len(self._draft_seconds) - 1)]
        worth, reach, usual = 0.0, self._reach, self._usual_rows() + call
        for _ in range(min(self._limit - len(self._layers), _LOOK_AHEAD)):
            reach *= self._experience.acceptance
            worth += max(reach * self._token_seconds - usual, 0.0)
        if worth == 0.0 and not self._is_probe:
            return False
        self._seconds += call
        return True

    def choose(self, law: JointLaw, step: int) -> NDArray[np.int64]:
        """See Drafting.choose."""
        deficits = self._deficits_of(law, step)
        best = best_candidates(-deficits, self._most_beams + 1)
        if not len(best):  # every candidate ends its sequence: there is nothing to verify
            self._reach = 0.0
            return best
        least = min(self._num_beams, len(best))
        widths = np.arange(least, max(least, min(self._most_beams, len(best))) + 1)
        ordered = np.append(deficits[best], np.inf)
        gaps = ordered[widths]
        self._layers.append(
            _Layer(law.nodes, law.candidate_ids(best), deficits[best], gaps, ordered[widths - 1])
        )
        reach = self._reach * self._experience.accepted(gaps, len(self._layers) - 1)
        seconds, last = self._target_seconds, len(self._target_seconds) - 1
        more = seconds[np.minimum(self._num_rows + widths, last)] - seconds[self._num_rows]
        gain = reach * self._token_seconds - more + self._worth_of_more(reach)
        chosen = int(np.argmax(gain))
        self._note(reach[chosen] / self._reach, int(widths[chosen]))
        if gain[chosen] <= 0.0 and not self._is_probe:
            self._reach = 0.0
            return best[:0]
        self._is_probe = False
        self._reach = float(reach[chosen])
        self._num_rows = min(self._num_rows + int(widths[chosen]), last)
        self._seconds += float(more[chosen])
        taken = best[: widths[chosen]]
        self._parent_deficits = deficits[taken]
        return taken

    def observe(self, forest: Forest, committed: list[list[int]]) -> None:
        """See Drafting.observe."""
        experience = self._experience
        for depth, (layer, nodes) in enumerate(zip(self._layers, committed, strict=False)):
            if not nodes:  # all that was selected has ended: no width was put to the test
                break
            taken = _candidate_ids(forest, layer.nodes, nodes)
            is_taken = layer.best == taken[:, None]  # (num_taken, num_best)
            if is_taken.any(axis=1).all():
                needed = layer.deficits[is_taken.argmax(axis=1)].max()
            else:
                needed = np.inf
            experience.learn(layer.gaps, needed <= layer.included, depth)
        experience.tokens = _RATE_MEMORY * experience.tokens + len(committed)
        experience.seconds = _RATE_MEMORY * experience.seconds + self._seconds
        self._count_probes()

    def _take_share(self) -> None:
        """Count with what calls cost this request just now."""
        self._target_seconds, self._draft_seconds = _seconds_of_share(
            self._costs, self._most_rows, self._num_sharers()
        )

    def _deficits_of(self, law: JointLaw, step: int) -> Floats:
        """Return the deficit of every candidate, (num_candidates,) float64; inf: impossible."""
        scores = self._scores(law, step)
        parents = self._parent_deficits
        if parents is None:  # the beams themselves are certain
            parents = np.zeros(len(law.nodes))
        inherited = parents[law.parents]
        is_possible = scores > -np.inf
        certain = scores[is_possible & (inherited == 0.0)]
        deficits = np.full(len(scores), np.inf)
        deficits[is_possible] = inherited[is_possible]
        if len(certain) >= self._num_beams:  # fewer: a draft that is always right selects them all
            last = len(certain) - self._num_beams
            bar = np.partition(certain, last)[last]
            deficits[is_possible] += np.maximum(bar - scores[is_possible], 0.0)
        return deficits

    def _worth_of_more(self, reach: Floats) -> Floats:
        """Return what layers behind one reached so are worth, less their cost, (n,) float64.

        They are of the usual width and acceptance, and count as far as they pay.
        """
        depth = min(self._limit - len(self._layers), _LOOK_AHEAD)
        if depth <= 0:
            return np.zeros_like(reach)
        powers = self._experience.acceptance ** np.arange(1, depth + 1)
        usual = self._usual_rows() + self._draft_seconds[self._num_beams]
        gains = np.multiply.outer(reach * self._token_seconds, powers) - usual
        worth: Floats = np.maximum(gains, 0.0).sum(axis=1)
        return worth

    def _usual_rows(self) -> float:
        """Return the seconds of a layer of the usual width in the target's call."""
        width = round(max(self._experience.rows, self._num_beams))
        last = len(self._target_seconds) - 1
        seconds = self._target_seconds
        return float(seconds[min(self._num_rows + width, last)] - seconds[self._num_rows])

    def _note(self, acceptance: float, width: int) -> None:
        experience = self._experience
        experience.acceptance += 0.1 * (acceptance - experience.acceptance)
        experience.rows = 0.9 * experience.rows + 0.1 * width if experience.rows else float(width)

    def _count_probes(self) -> None:
        """Try one layer after 8 iterations without a draft, then after 16, 32 and 64."""
        experience = self._experience
        if not self._layers:
            experience.num_without += 1
            return
        if experience.num_without >= experience.probe_after:
            experience.probe_after = min(2 * experience.probe_after, LAST_PROBE)
        else:
            experience.probe_after = FIRST_PROBE
        experience.num_without = 0


@lru_cache(maxsize=256)  # the same few come in every iteration of every request
def _seconds_of_share(
    costs: EngineCosts, most_rows: int, num_sharers: int
) -> tuple[Floats, tuple[float, ...]]:
    """Return the seconds of a target call, (most_rows + 1,), and of a drafted layer, by rows."""
    target = costs.target.up_to(most_rows, num_sharers)
    target.flags.writeable = False
    draft = costs.draft.up_to(most_rows, num_sharers) + _HOST_SECONDS
    return target, tuple(draft.tolist())


def _candidate_ids(forest: Forest, parents: list[int], nodes: list[int]) -> NDArray[np.int64]:
    """Return the numbers of ``JointLaw.candidate_ids`` that became ``nodes``, (num_nodes,) int64.

    A node that is itself among the ``parents`` has ended before and stayed.
    """
    beams = set(parents)
    return np.array(
        [
            (node << 32) + STAY + 1
            if node in beams
            else (forest.parents[node] << 32) + forest.tokens[node] + 1
            for node in nodes
        ],
        dtype=np.int64,
    )
