"""Look at the loop after each selection and tell a TraceRecorder what happened.

The forest numbers its nodes anew when it is pruned; a trace names them by their path, which the
forest's path keys stand for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsbd_ort.decoding.beams import Beams, Hypothesis
from dsbd_ort.decoding.draft import DraftLayer
from dsbd_ort.decoding.forest import NO_NODE, Forest
from dsbd_ort.decoding.forest_cache import ForestCache
from dsbd_ort.decoding.stats import Recorder
from dsbd_ort.decoding.trace import Role, TraceBeam, TraceIteration, TraceNode, TraceRecorder


@dataclass(frozen=True)
class Observed:
    """What the loop knows once an iteration is selected, before it prunes.

    Attributes:
        layers, committed: drafted and committed layers.
        beams: those that go on.
        hypotheses: ``SelectionRule.live`` of them.
        survivors: nodes that pruning will leave.
    """

    layers: list[DraftLayer]
    committed: list[Beams]
    beams: Beams
    hypotheses: list[Hypothesis]
    survivors: set[int]


class Tracer:
    """Turns what the loop did into ``TraceIteration``s."""

    def __init__(
        self,
        recorder: TraceRecorder,
        forest: Forest,
        target: ForestCache,
        draft: ForestCache | None,
        meters: Recorder,
        beams: Beams,
    ) -> None:
        """Take the parts of a request whose prompt is computed but for its last token, the beam."""
        self._recorder = recorder
        self._forest = forest
        self._target = target
        self._draft = draft
        self._meters = meters
        self._counted = self._count()
        self._ids: dict[int, int] = {}  # by path key
        self._nodes: dict[int, TraceNode] = {}  # by id: those that the last iteration left
        self._start_from(beams)

    def observe(self, seen: Observed) -> None:
        """Tell the recorder about one iteration."""
        nodes = self._trace_nodes(seen)
        rows, seconds = self._rows_and_seconds()
        committed = [np.repeat(layer.nodes, layer.copies).tolist() for layer in seen.committed]
        iteration = TraceIteration(
            nodes=nodes,
            roots=self._roots,
            drafted=[[self._id(node) for node in layer.children] for layer in seen.layers],
            committed=[[self._id(node) for node in layer] for layer in committed],
            beams=self._trace_beams(seen),
            draft_rows=rows[0],
            target_rows=rows[1],
            draft_s=seconds[0],
            target_s=seconds[1],
            host_s=seconds[2],
        )
        self._nodes = {node.id: node for node in nodes if node.survives}
        self._start_from(seen.beams)
        self._recorder.record(iteration)
        self._counted = self._count()  # not the time that this took

    def _start_from(self, beams: Beams) -> None:
        """Note the roots of the next iteration."""
        self._roots = [self._id(node) for node in beams.nodes]
        self._root_weights = beams.log_weights.tolist()
        self._root_hypotheses = beams.hypotheses

    def _id(self, node: int) -> int:
        return self._ids.setdefault(self._forest.path_keys[node], len(self._ids))

    def _trace_nodes(self, seen: Observed) -> list[TraceNode]:
        forest = self._forest
        roles = self._roles(seen)
        weights = dict(zip(self._roots, self._root_weights, strict=True))
        nodes = []
        for number, (parent, token) in enumerate(zip(forest.parents, forest.tokens, strict=True)):
            before = self._nodes.get(self._id(number))
            log_p = _log_prob(self._target, parent, token)
            log_q = _log_prob(self._draft, parent, token)
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
                    position=forest.positions[number],
                    draft_log_prob=log_q,
                    target_log_prob=log_p,
                    log_weight=weights.get(node_id),
                    role=roles[number],
                    survives=number in seen.survivors,
                    has_ended=number in forest.absorbing,
                )
            )
        return nodes

    def _roles(self, seen: Observed) -> list[Role]:
        """Return the role of every node of the forest."""
        forest = self._forest
        roots = {node for node in range(len(forest)) if self._id(node) in self._roots}
        below_roots = {*roots, *forest.descendants(roots)}
        drafted = {node for layer in seen.layers for node in layer.children}
        selected = {node for layer in seen.committed for node in layer.nodes}
        finished = self._finished(seen)
        judged_parents = roots.union(*(layer.nodes for layer in seen.committed[:-1]))

        def role(node: int) -> Role:
            if node in roots:
                return "root"
            if node not in below_roots:
                return "ancestor"
            if node in selected:
                return "accepted" if node in drafted or self._id(node) in self._nodes else "bonus"
            if (forest.parents[node], forest.tokens[node]) in finished:
                return "finished"
            if node in seen.survivors:
                return "kept"
            return "rejected" if forest.parents[node] in judged_parents else "pruned"

        return [role(node) for node in range(len(forest))]

    def _finished(self, seen: Observed) -> set[tuple[int, int]]:
        """Return parent node and token of the hypotheses that ended and left the beams."""
        number_by_id = {self._id(node): node for node in range(len(self._forest))}
        roots = [number_by_id[root] for root in self._roots]
        node_of = dict(zip(self._root_hypotheses, roots, strict=True))
        for layer in seen.committed:
            node_of |= dict(zip(layer.hypotheses, layer.nodes, strict=True))
        return {
            (node_of[hypothesis.parent], hypothesis.token)
            for hypothesis in seen.hypotheses
            if hypothesis.parent in node_of
        }

    def _trace_beams(self, seen: Observed) -> list[TraceBeam]:
        going_on = zip(seen.beams.nodes, seen.beams.hypotheses, strict=True)
        beams = [TraceBeam(self._id(node), hypothesis) for node, hypothesis in going_on]
        others = [h for h in seen.hypotheses if h not in seen.beams.hypotheses]
        return beams + [TraceBeam(None, hypothesis) for hypothesis in others]

    def _rows_and_seconds(self) -> tuple[tuple[int, int], tuple[float, float, float]]:
        """Return rows (draft, target) and seconds (draft, target, host) since the last time."""
        now, before = self._count(), self._counted
        draft_s, target_s = now.draft_s - before.draft_s, now.target_s - before.target_s
        host_s = now.clock_s - before.clock_s - draft_s - target_s
        rows = (now.draft_rows - before.draft_rows, now.target_rows - before.target_rows)
        return rows, (draft_s, target_s, host_s)

    def _count(self) -> _Counts:
        target, draft = self._meters.target, self._meters.draft
        return _Counts(
            draft.rows if draft else 0,
            target.rows,
            draft.seconds if draft else 0.0,
            target.seconds,
            self._meters.clock(),
        )


@dataclass(frozen=True)
class _Counts:
    """What the meters showed at one moment."""

    draft_rows: int
    target_rows: int
    draft_s: float
    target_s: float
    clock_s: float


def _log_prob(cache: ForestCache | None, parent: int, token: int) -> float | None:
    """Return the warped log-probability of ``token`` after ``parent``, None if not computed."""
    if cache is None or not cache.is_computed(parent):
        return None
    law = cache.law(parent)
    assert law is not None  # a node that has ended has no child
    place = np.flatnonzero(law.tokens == token)
    return float(law.log_probs[place[0]]) if len(place) else -np.inf
