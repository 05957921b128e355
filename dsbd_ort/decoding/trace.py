"""What a request's trace tells: every iteration's forest, and what became of each node."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from dsbd_ort.decoding.beams import Hypothesis
from dsbd_ort.decoding.config import DecodingConfig

Role = Literal["root", "ancestor", "accepted", "bonus", "finished", "rejected", "kept", "pruned"]
"""What a node was in an iteration:

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
            where it cannot be drawn; None where the engine has not computed the parent.
        log_weight: log w of its path under the target, None where p~ of the path is not known.
        role: see ``Role``.
        survives: whether it is still there in the next iteration.
        has_ended: whether a sequence ends with it.
    """

    id: int
    parent: int | None
    token: int
    position: int
    draft_log_prob: float | None
    target_log_prob: float | None
    log_weight: float | None
    role: Role
    survives: bool
    has_ended: bool


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
        beams: what is alive afterwards.
        draft_rows, target_rows: rows that the engines computed.
        draft_s, target_s: seconds inside engine calls; host_s: all other time. The pruning that
            ends an iteration counts as time of the next one.
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
    """Is told what a request does, while it does it."""

    def begin(self, prompt_ids: list[int], config: DecodingConfig) -> None:
        """Take a request that is about to start, its options resolved."""

    def record(self, iteration: TraceIteration) -> None:
        """Take an iteration that has been selected and is about to be pruned."""


@dataclass
class RequestTrace:
    """A TraceRecorder that remembers one request, the last that began.

    Attributes:
        prompt_ids: of the prompt.
        config: the request's options, None before it began.
        iterations: in order; those so far, if the request was given up.
    """

    prompt_ids: list[int] = field(default_factory=list)
    config: DecodingConfig | None = None
    iterations: list[TraceIteration] = field(default_factory=list)

    def begin(self, prompt_ids: list[int], config: DecodingConfig) -> None:
        """See TraceRecorder.begin; forgets an earlier request."""
        self.prompt_ids, self.config, self.iterations = prompt_ids, config, []

    def record(self, iteration: TraceIteration) -> None:
        """See TraceRecorder.record."""
        self.iterations.append(iteration)
