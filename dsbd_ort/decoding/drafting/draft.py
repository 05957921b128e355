"""Drafting: the forest grown by the draft model, the policies that decide how much, the record."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.beams import Beams
from dsbd_ort.decoding.engine_call import EngineCalls
from dsbd_ort.decoding.forest import Forest, Nodes
from dsbd_ort.decoding.joint_distribution import JointDistribution


@dataclass(eq=False, slots=True)
class DraftLayer:
    """One drafted layer."""

    drawn: NDArray[np.int64]  # (<= W_S,) int64 candidates of ``distribution`` in the order drawn
    children: Nodes  # (<= W_S,) int64 of the distinct ones, in the order first drawn
    num_new: int  # how many of them the forest did not have
    kept: JointDistribution | None  # ``distribution``, large; None if the rule never reads it

    @property
    def distribution(self) -> JointDistribution:
        """Q_t, the draft's joint distribution, for a rule that ``reads_draft_distributions``."""
        assert self.kept is not None
        return self.kept


@dataclass(eq=False, kw_only=True, slots=True)
class Iteration:
    """The record of one iteration, when its layers are selected and nothing is pruned yet."""

    roots: Beams  # the beams at its start
    drafted: list[DraftLayer]
    committed: list[Beams]
    beams: Beams  # those that go on; the last committed ones, or fewer
    hypotheses: NDArray[np.int64]  # (n,) live ones, one of which begins the best sequence
    survivors: NDArray[np.bool_]  # (num_nodes,) bool. Which nodes pruning will leave
    num_draft_tokens: int  # nodes that the draft added
    num_accepted_tokens: int  # drafted nodes that were committed, of earlier drafts too


Propose = Callable[[JointDistribution, int, int], NDArray[np.int64]]
"""(joint, num_draws, depth) -> the draft's candidates in the order drawn."""

Scores = Callable[[JointDistribution, int], NDArray[np.float64]]
"""(joint, depth) -> (num_candidates,) float64: by these a rule ranks candidates."""


class Observer(Protocol):
    """Receives every iteration before it is pruned."""

    def observe(self, iteration: Iteration) -> None:
        """Learn from an iteration."""


Proposer = Literal["model", "ngram", "constraint"]
"""Who drafted a node."""

TakesAll = Callable[[int, int], bool]
"""(num_candidates, num_rows): see DraftPolicy.takes_all."""

MOST_FORCED_LAYERS = 4
"""Of one draft, in addition to those that its policy chooses: bounds the rows of a request."""


@dataclass(eq=False, slots=True)
class LayerNeeds:
    """A layer that is about to be drafted."""

    pending: Nodes  # (n,) int64. Nodes that the model has to compute for it, parents first
    is_forced: bool = False  # the constraint leaves one token to every path that has not ended
    num_whole: int = 0  # candidates of a layer of all that the constraint allows, else 0


class Drafter(Protocol):
    """Gives the distributions that a layer is drafted from. ``ForestRunner`` is one.

    forces: whether layers may be forced, so that ``look_up`` comes before the policy is asked.
    """

    forces: bool

    def look_up(self, nodes: Nodes, takes_all: TakesAll) -> LayerNeeds | None:
        """Begin a layer below these nodes; None if every path ends with its next token."""

    def compute(self, pending: Nodes) -> EngineCalls[None]:
        """Let the model compute the nodes that the layer needs."""

    def joint(
        self, nodes: Nodes, log_weights: NDArray[np.float64], copies: NDArray[np.int64] | None
    ) -> JointDistribution:
        """Return the draft's joint distribution over the continuations of these nodes."""


class DraftPolicy(Observer, Protocol):
    """Decides, layer by layer, whether to draft and how many candidates (docs/algorithm.md 3.5)."""

    def rest(self) -> int:
        """Return for how many iterations, this one included, no draft is made; count one."""

    def begin(self, num_pending: int, most_layers: int) -> None:
        """Start an iteration: ``num_pending`` target rows in any case, ``most_layers`` usable."""

    def takes_all(self, num_candidates: int, num_rows: int) -> bool:
        """Return whether a layer of all candidates is better than a call of ``num_rows`` rows."""

    def wants_layer(self, num_rows: int, num_whole: int = 0) -> bool:
        """Return whether to draft one more layer, by an engine call of so many rows.

        With 0 rows, whether a draft is worth looking up. ``num_whole``: number of candidates of a
        layer of all that there are, else 0.
        """

    def choose(self, joint: JointDistribution, depth: int) -> NDArray[np.int64]:
        """Return the candidates to add, best first; none ends the draft."""

    def choose_forced(self, joint: JointDistribution) -> NDArray[np.int64]:
        """Return all candidates of a forced layer if these are worth their rows, else none."""


class FixedDraftPolicy:
    """DraftPolicy: ``draft_length`` layers of ``draft_beams`` candidates, and forced layers."""

    def __init__(self, layer_widths: tuple[int, ...], propose: Propose) -> None:
        self._layer_widths, self._propose = layer_widths, propose
        self._layer = self._num_forced = self._most_layers = 0

    def rest(self) -> int:
        return 0

    def begin(self, num_pending: int, most_layers: int) -> None:
        self._layer, self._num_forced, self._most_layers = 0, 0, most_layers

    def takes_all(self, num_candidates: int, num_rows: int) -> bool:
        return self.wants_layer(num_rows) and num_candidates <= self._layer_widths[self._layer]

    def wants_layer(self, num_rows: int, num_whole: int = 0) -> bool:
        num_layers = self._layer + self._num_forced
        return self._layer < len(self._layer_widths) and num_layers < self._most_layers

    def choose(self, joint: JointDistribution, depth: int) -> NDArray[np.int64]:
        drawn = self._propose(joint, self._layer_widths[self._layer], depth)
        self._layer += 1
        return drawn

    def choose_forced(self, joint: JointDistribution) -> NDArray[np.int64]:
        has_layers_left = self._layer + self._num_forced < self._most_layers
        if self._num_forced == MOST_FORCED_LAYERS or not has_layers_left:
            return np.arange(0)
        self._num_forced += 1
        return np.arange(len(joint.tokens))

    def observe(self, iteration: Iteration) -> None:
        """Learn nothing: the numbers are given."""


def draft_forest(
    forest: Forest,
    drafter: Drafter,
    beams: Beams,
    policy: DraftPolicy,
    depth: int,
    *,
    keeps_distributions: bool,
    repeats: bool,
) -> EngineCalls[list[DraftLayer]]:
    """Add the draft's candidates to the forest: at most one engine call per layer.

    The draft's weights u start at the target's weights of the input beams (the published code
    starts from equal weights and loses acceptance), then u_child = u_parent * q~. The draft ends
    once all draft beams have ended.

    The policy has begun its iteration. depth: of the first layer, counted from the prompt.
    keeps_distributions: whether the layers hold the draft's joint distributions. repeats: whether a
    candidate may be drawn more than once.
    """
    layers: list[DraftLayer] = []
    nodes, log_u, copies = beams.nodes, beams.log_weights, beams.copies
    while not (forest.has_ends and forest.are_absorbing(nodes)):
        if not drafter.forces and not policy.wants_layer(0):
            break
        needs = drafter.look_up(nodes, policy.takes_all)
        if needs is None:
            break
        is_forced = needs.is_forced and not keeps_distributions  # else drawn as they are
        if not is_forced and not policy.wants_layer(len(needs.pending), needs.num_whole):
            break
        yield from drafter.compute(needs.pending)
        joint = drafter.joint(nodes, log_u, copies)
        if not len(joint.tokens):  # none is known, or processors and constraint leave none
            break
        depth_now = depth + len(layers)
        drawn = policy.choose_forced(joint) if is_forced else policy.choose(joint, depth_now)
        if not len(drawn):
            break
        distinct, copies = distinct_in_order(drawn) if repeats else (drawn, None)
        num_added = forest.num_added
        nodes, log_u = forest.descend(joint, distinct), joint.log_weights[distinct]
        num_new, kept = forest.num_added - num_added, joint if keeps_distributions else None
        layers.append(DraftLayer(drawn, nodes, num_new, kept))
        del joint, kept  # before the next one is made: each may be of beams x vocabulary
    return layers


def distinct_in_order(drawn: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct candidates in the order first drawn, and how often each was drawn."""
    values, first, counts = np.unique(drawn, return_index=True, return_counts=True)
    order = np.argsort(first)
    return values[order], counts[order]
