"""Drafters: where the distributions of drafted layers come from (docs/algorithm.md 3.9).

If the output does not depend on the draft, anything that gives a distribution over the next tokens
of a path may draft. Each path is drafted by the first of these that can: the constraint, if it
leaves one token, if nothing can follow the next one, or if the whole layer is worth drafting; the
n-gram drafter; the draft model.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.rows import NO_INTS
from dsbd_ort.decoding.drafting.draft import Iteration, LayerNeeds, Proposer, TakesAll
from dsbd_ort.decoding.drafting.ngram import NGramDrafter
from dsbd_ort.decoding.engine_call import EngineCalls
from dsbd_ort.decoding.forest import Forest, Nodes
from dsbd_ort.decoding.forest_runner import ForestRunner
from dsbd_ort.decoding.joint_distribution import STAY, JointDistribution
from dsbd_ort.decoding.logits_processing.allowed_after import AllowedAfter
from dsbd_ort.decoding.logits_processing.request_processing import RequestProcessing

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class ChainedDrafter:
    """Drafter: for each path the first of constraint, n-gram drafter and model that can."""

    def __init__(
        self,
        forest: Forest,
        processing: RequestProcessing | None,
        ngram: NGramDrafter | None,
        model: ForestRunner | None,
        *,
        proposers: dict[int, Proposer] | None = None,
        proposes_ends: bool = True,
    ) -> None:
        """Take the drafters there are.

        proposers: gets who proposes, without the model, the tokens after a node: for a trace.
        proposes_ends: whether the constraint may draft for paths that end with their next token, as
            if all tokens were equally likely: not if the draft's distributions are read.
        """
        self.forces = processing is not None and processing.constraint is not None
        self._forest, self._processing = forest, processing
        self._ngram, self._model = ngram, model
        self._proposers, self._proposes_ends = proposers, proposes_ends

    def look_up(self, nodes: Nodes, takes_all: TakesAll) -> LayerNeeds | None:
        self._layer = lists = _Layer(len(nodes))
        if self._forest.has_ends:
            ended = self._forest.is_absorbing[nodes].nonzero()[0]
            lists.extend(ended, np.full(len(ended), STAY), np.zeros(len(ended)))
        is_forced, num_whole = False, 0
        if self._processing is not None and self._processing.constraint is not None:
            open_beams = lists.open_beams()
            allowed = self._processing.allowed_after(nodes[open_beams])
            ends_next = self._processing.ends_next(nodes[open_beams], allowed)
            if ends_next.all():
                return None
            is_forced = bool((allowed.num_tokens == 1).all())
            ends_next &= self._proposes_ends
            num_candidates = int(allowed.num_tokens.sum())
            if num_candidates and takes_all(num_candidates, len(open_beams)):
                num_whole = num_candidates
            is_certain = (allowed.num_tokens == 1) | (ends_next & (allowed.num_tokens > 0))
            asked = is_certain | (num_whole > 0)
            self._ask_constraint(lists, nodes[open_beams], allowed, asked.nonzero()[0])
        if self._ngram is not None:
            self._ask_ngram(lists, nodes)
        lists.sort()
        unknown = nodes[~lists.is_known]
        pending = NO_INTS if self._model is None else self._model.pending(unknown)
        return LayerNeeds(pending, is_forced, num_whole)

    def compute(self, pending: Nodes) -> EngineCalls[None]:
        if self._model is not None:
            yield from self._model.compute(pending)

    def joint(self, nodes: Nodes, log_weights: Floats, copies: Ints | None) -> JointDistribution:
        layer = self._layer
        weights = log_weights[layer.parents] + layer.log_probs
        log_copies = 0.0 if copies is None else np.log(copies)[layer.parents]
        largest = max(float(log_weights.max(initial=0.0)), 0.0)  # of a search it has no bound
        unlisted = np.exp(log_weights - largest) * layer.unlisted
        unlisted *= 1 if copies is None else copies
        masses = weights + log_copies
        proposed = JointDistribution(
            nodes, layer.parents, layer.tokens, weights, masses, layer.log_probs, 0
        )
        with np.errstate(divide="ignore"):
            proposed.log_unlisted = largest + float(np.log(unlisted.sum()))
        rest = (~layer.is_known).nonzero()[0]
        if self._model is None or not len(rest):
            return proposed
        more = None if copies is None else copies[rest]
        return proposed.with_beams(rest, self._model.joint(nodes[rest], log_weights[rest], more))

    def observe(self, iteration: Iteration) -> None:
        """Let the n-gram drafter learn the committed tokens."""
        if self._ngram is not None:
            for beams in iteration.committed:
                self._ngram.learn(beams.nodes[self._forest.is_absorbing[beams.nodes] == 0])

    def _ask_constraint(
        self, lists: _Layer, open_nodes: Nodes, allowed: AllowedAfter, asked: Ints
    ) -> None:
        """Propose all that the constraint allows after some of the open nodes."""
        assert self._processing is not None
        if not len(asked):
            return
        open_beams, counts = lists.open_beams(), allowed.num_tokens
        rows, tokens = allowed.part(asked).tokens_by_row(self._processing.vocab_size)
        lists.extend(open_beams[asked[rows]], tokens, -np.log(counts[asked[rows]]))
        if self._proposers is not None:
            self._proposers |= dict.fromkeys(open_nodes[asked].tolist(), "constraint")

    def _ask_ngram(self, lists: _Layer, nodes: Nodes) -> None:
        """Propose what followed before; without a model nothing after paths that are unknown."""
        assert self._ngram is not None
        open_beams = lists.open_beams()
        proposals = self._ngram.proposals(nodes[open_beams])
        paths, tokens, log_probs = proposals.paths, proposals.tokens, proposals.log_probs
        if self._processing is not None and len(tokens):
            log_probs = self._processing.processed(nodes[open_beams], paths, tokens, log_probs)
            is_left = log_probs > -np.inf
            paths, tokens, log_probs = paths[is_left], tokens[is_left], log_probs[is_left]
        if len(tokens):
            lists.extend(open_beams[paths], tokens, log_probs)
            if self._proposers is not None:
                self._proposers |= dict.fromkeys(nodes[open_beams[paths]].tolist(), "ngram")
        if self._model is None:
            lists.is_known[open_beams] = True
        # Of the other beams the model lists what is possible.
        lists.unlisted[open_beams] = np.where(lists.is_known[open_beams], proposals.unlisted, 0.0)


class _Layer:
    """Candidates that are proposed without the model, for some of a layer's beams.

    is_known: (num_beams,) bool. Of which beams.
    parents: (n,) int64. The index of each candidate's beam; increasing once sorted.
    tokens: (n,) int64. STAY for a beam that has ended.
    log_probs: (n,) float64.
    unlisted: (num_beams,) float64. Probability of all other tokens together.
    """

    def __init__(self, num_beams: int) -> None:
        self.is_known = np.zeros(num_beams, dtype=np.bool_)
        self.unlisted = np.zeros(num_beams)
        self.parents = self.tokens = NO_INTS
        self.log_probs = np.zeros(0)

    def open_beams(self) -> Ints:
        return (~self.is_known).nonzero()[0]

    def extend(self, beams: Ints, tokens: Ints, log_probs: Floats) -> None:
        """Add candidates, (n,) each; of a beam all at once."""
        self.parents = np.append(self.parents, beams)
        self.tokens = np.append(self.tokens, tokens)
        self.log_probs = np.append(self.log_probs, log_probs)
        self.is_known[beams] = True

    def sort(self) -> None:
        order = self.parents.argsort(kind="stable")
        self.parents, self.tokens = self.parents[order], self.tokens[order]
        self.log_probs = self.log_probs[order]
