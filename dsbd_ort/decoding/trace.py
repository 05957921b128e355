"""Trace of a request: the forest of every iteration and the fate of each node."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from dsbd_ort.decoding.beams import Beams, Hypothesis
from dsbd_ort.decoding.config import DecodingConfig
from dsbd_ort.decoding.drafting.draft import Iteration, Proposer
from dsbd_ort.decoding.forest import NO_NODE
from dsbd_ort.decoding.forest_runner import ForestRunner
from dsbd_ort.decoding.logits_processing.allowed_after import Forbidden, ForbiddenTokens
from dsbd_ort.decoding.rule import LayerBuilder
from dsbd_ort.decoding.stats import StatsRecorder

NodeRole = Literal[
    "root", "ancestor", "accepted", "bonus", "finished", "rejected", "kept", "pruned"
]
"""Role of a node in an iteration:

root: a live beam at its start.
ancestor: above a root; stays until both engines have computed what is below it.
accepted: there before the target chose (drafted now or in an earlier iteration), and selected.
bonus: selected without having been drafted.
finished: ended, and one of the finished hypotheses of a beam search.
rejected: the target chose among its siblings, and not it.
kept: not selected, but a descendant of a beam that goes on, so it stays.
pruned: all others; the target never came to choose about them.
"""


@dataclass(frozen=True, kw_only=True)
class TraceNode:
    """A node of the forest, as an iteration saw it.

    Attributes:
        id: the same in all iterations; 0 is the last token of the prompt.
        parent: id of the node before it, None for node 0.
        token, position: token id; index in the sequence, the prompt included.
        draft_log_prob, target_log_prob: log q~ and log p~ of the token after its parent, -inf
            if it cannot be drawn; None if the engine has not computed the parent.
        log_weight: log w of its path under the target, None if p~ of the path is unknown.
        role: see ``NodeRole``.
        proposer: who drafted it, the latest if several did: "constraint" drafts what it allows if
            that is one token, or few; None if it was never drafted.
        survives: whether it is still there in the next iteration.
        has_ended: whether a sequence ends with it.
        forbidden: the likeliest tokens that the constraint forbids after it, and their raw target
            probabilities; empty if the target has not computed it.
    """

    id: int
    parent: int | None
    token: int
    position: int
    draft_log_prob: float | None
    target_log_prob: float | None
    log_weight: float | None
    role: NodeRole
    proposer: Proposer | None
    survives: bool
    has_ended: bool
    forbidden: Forbidden = ()


@dataclass(frozen=True)
class TraceBeam:
    """A hypothesis after an iteration; ``node`` is None if it ended and left the forest."""

    node: int | None
    hypothesis: Hypothesis


@dataclass(frozen=True, kw_only=True)
class TraceIteration:
    """One iteration of draft, verify, select, prune. Nodes are named by their id.

    Attributes:
        nodes: the forest before it was pruned, parents before children.
        roots: the beams at the start.
        drafted: per drafted layer its distinct nodes in the order drawn. A beam that has ended
            stays itself, layer after layer.
        committed: per committed layer its beams in the order selected, copies repeated.
        beams: alive afterwards.
        draft_rows, target_rows: computed by the engines. The prompt's count in the draft's first
            iteration, and never in the target's.
        draft_s, target_s: seconds in the engines; host_s: all other time. Pruning counts for
            the next iteration.
    """

    nodes: list[TraceNode]
    roots: list[int]
    drafted: list[list[int]]
    committed: list[list[int]]
    beams: list[TraceBeam]
    draft_rows: int
    target_rows: int
    draft_s: float
    target_s: float
    host_s: float


class TraceRecorder(Protocol):
    """Takes what a request does, as it happens."""

    def begin(self, prompt_ids: list[int], config: DecodingConfig) -> None:
        """Take a request that is about to start, its options resolved."""

    def record(self, iteration: TraceIteration) -> None:
        """Take an iteration that has been selected and is about to be pruned."""


@dataclass
class RequestTrace:
    """A TraceRecorder that stores one request, the last that began, as far as it came."""

    prompt_ids: list[int] = field(default_factory=list)
    config: DecodingConfig | None = None
    iterations: list[TraceIteration] = field(default_factory=list)

    def begin(self, prompt_ids: list[int], config: DecodingConfig) -> None:
        """See TraceRecorder.begin; forgets an earlier request."""
        self.prompt_ids, self.config, self.iterations = prompt_ids, config, []

    def record(self, iteration: TraceIteration) -> None:
        self.iterations.append(iteration)


class Tracer:
    """Turns iterations of the loop into ``TraceIteration``s.

    The forest numbers its nodes anew when it is pruned; a trace names them by their path keys.
    """

    def __init__(
        self,
        recorder: TraceRecorder,
        builder: LayerBuilder,
        runners: Sequence[ForestRunner],
        stats: StatsRecorder,
        proposers: dict[int, Proposer],
        forbidden: ForbiddenTokens | None = None,
    ) -> None:
        self._recorder, self._stats = recorder, stats
        self._forest, self._hypotheses = builder.forest, builder.hypotheses
        self._target, self._draft = runners[:1], runners[1:]
        self._proposers, self._forbidden = proposers, forbidden
        self._ids: dict[int, int] = {}  # by path key
        self._nodes: dict[int, TraceNode] = {}  # by id: those that the last iteration left
        self._start_from(Beams.initial())

    def begin(self, prompt_ids: list[int], config: DecodingConfig) -> None:
        """Announce the request, whose prompt is computed except its last token."""
        self._recorder.begin(prompt_ids, config)
        self._counted = self._count()

    def observe(self, iteration: Iteration) -> None:
        nodes = self._trace_nodes(iteration)
        draft_rows, target_rows, draft_s, target_s, clock_s = (
            now - before for now, before in zip(self._count(), self._counted, strict=True)
        )
        committed = [layer.nodes[layer.repeated].tolist() for layer in iteration.committed]
        recorded = TraceIteration(
            nodes=nodes,
            roots=self._roots,
            drafted=[
                [self._id(node) for node in layer.children.tolist()] for layer in iteration.drafted
            ],
            committed=[[self._id(node) for node in layer] for layer in committed],
            beams=self._trace_beams(iteration),
            draft_rows=int(draft_rows),
            target_rows=int(target_rows),
            draft_s=draft_s,
            target_s=target_s,
            host_s=clock_s - draft_s - target_s,
        )
        self._nodes = {node.id: node for node in nodes if node.survives}
        self._start_from(iteration.beams)
        self._recorder.record(recorded)
        self._counted = self._count()  # not the time that this took

    def _start_from(self, beams: Beams) -> None:
        self._roots = [self._id(node) for node in beams.nodes.tolist()]
        self._root_weights = beams.log_weights.tolist()
        self._root_hypotheses = beams.hypotheses.tolist()

    def _id(self, node: int) -> int:
        return self._ids.setdefault(int(self._forest.path_keys[node]), len(self._ids))

    def _trace_nodes(self, iteration: Iteration) -> list[TraceNode]:
        forest = self._forest
        roles, proposed = self._roles(iteration), self._proposed(iteration)
        weights = dict(zip(self._roots, self._root_weights, strict=True))
        noted = self._forbidden.taken() if self._forbidden is not None else {}
        nodes = []
        for number in range(len(forest)):
            parent, token = int(forest.parents[number]), int(forest.tokens[number])
            before = self._nodes.get(self._id(number))
            log_p = _log_prob(self._target, parent, token)
            log_q = _log_prob(self._draft, parent, token)
            forbidden = noted.get(number, before.forbidden if before else ())
            proposer = proposed.get(number, before.proposer if before else None)
            parent_id = None if parent == NO_NODE else self._id(parent)
            if before:  # its parent may be gone
                parent_id = before.parent
                log_p = before.target_log_prob if log_p is None else log_p
                log_q = before.draft_log_prob if log_q is None else log_q
            node_id = self._id(number)
            if node_id not in weights and parent_id in weights and log_p is not None:
                weights[node_id] = weights[parent_id] + log_p
            nodes.append(
                TraceNode(
                    id=node_id,
                    parent=parent_id,
                    token=token,
                    position=int(forest.positions[number]),
                    draft_log_prob=log_q,
                    target_log_prob=log_p,
                    log_weight=weights.get(node_id),
                    role=roles[number],
                    proposer=proposer,
                    survives=bool(iteration.survivors[number]),
                    has_ended=bool(forest.is_absorbing[number]),
                    forbidden=forbidden,
                )
            )
        return nodes

    def _proposed(self, iteration: Iteration) -> dict[int, Proposer]:
        """Return who drafted each node now; an ended beam, which stays itself, was not drafted."""
        by_parent, parents = self._proposers.copy(), self._forest.parents
        self._proposers.clear()  # pruning gives nodes other numbers
        drafted = {node for layer in iteration.drafted for node in layer.children.tolist()}
        return {
            node: by_parent.get(int(parents[node]), "model")
            for node in drafted
            if self._id(node) not in self._roots
        }

    def _roles(self, iteration: Iteration) -> list[NodeRole]:
        forest = self._forest
        roots = {node for node in range(len(forest)) if self._id(node) in self._roots}
        is_below = forest.below(np.array(sorted(roots)))
        drafted = {node for layer in iteration.drafted for node in layer.children.tolist()}
        selected = {node for layer in iteration.committed for node in layer.nodes.tolist()}
        finished = self._finished(iteration)
        judged_parents = roots.union(*(layer.nodes.tolist() for layer in iteration.committed[:-1]))

        def role(node: int) -> NodeRole:
            if node in roots:
                return "root"
            if not is_below[node]:
                return "ancestor"
            if node in selected:
                return "accepted" if node in drafted or self._id(node) in self._nodes else "bonus"
            if (int(forest.parents[node]), int(forest.tokens[node])) in finished:
                return "finished"
            if iteration.survivors[node]:
                return "kept"
            return "rejected" if int(forest.parents[node]) in judged_parents else "pruned"

        return [role(node) for node in range(len(forest))]

    def _finished(self, iteration: Iteration) -> set[tuple[int, int]]:
        """Return parent node and token of the hypotheses that ended and left the beams."""
        number_by_id = {self._id(node): node for node in range(len(self._forest))}
        roots = [number_by_id[root] for root in self._roots]
        node_of = dict(zip(self._root_hypotheses, roots, strict=True))
        for layer in iteration.committed:
            node_of |= dict(zip(layer.hypotheses.tolist(), layer.nodes.tolist(), strict=True))
        parents = self._hypotheses.parents[iteration.hypotheses].tolist()
        tokens = self._hypotheses.tokens[iteration.hypotheses].tolist()
        return {
            (node_of[parent], token)
            for parent, token in zip(parents, tokens, strict=True)
            if parent in node_of
        }

    def _trace_beams(self, iteration: Iteration) -> list[TraceBeam]:
        beams = iteration.beams
        node_of = dict(zip(beams.hypotheses.tolist(), beams.nodes.tolist(), strict=True))
        ended = [entry for entry in iteration.hypotheses.tolist() if entry not in node_of]
        nodes = [*map(self._id, node_of.values()), *([None] * len(ended))]
        return [
            TraceBeam(node, Hypothesis(self._hypotheses, entry))
            for node, entry in zip(nodes, (*node_of, *ended), strict=True)
        ]

    def _count(self) -> tuple[float, ...]:
        """Return rows and seconds of draft and target so far, and the time."""
        target, draft = self._stats.target, self._stats.draft
        return draft.rows, target.rows, draft.engine_s, target.engine_s, self._stats.clock()


def _log_prob(runners: Sequence[ForestRunner], parent: int, token: int) -> float | None:
    """Return the warped log-probability of ``token`` after ``parent``, None if not computed."""
    for runner in runners if parent != NO_NODE else ():
        if (distribution := runner.distributions.after(parent)) is not None:
            place = np.flatnonzero(distribution.tokens == token)
            return float(distribution.log_probs[place[0]]) if len(place) else -np.inf
    return None
