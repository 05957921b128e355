"""Readers of logits: which logits after nodes a request needs, and their distributions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dsbd_forward.logits import Gather, Logits
from dsbd_forward.rows import NO_INTS
from dsbd_forward.spec import EngineSpec
from dsbd_ort.decoding.beyond_top_k import distributions_beyond_top_k
from dsbd_ort.decoding.distribution import Rows, TokenDistributions
from dsbd_ort.decoding.engine_call import Role, Wanted
from dsbd_ort.decoding.forest import Nodes
from dsbd_ort.decoding.joint_distribution import JointDistribution
from dsbd_ort.decoding.logits_processing.allowed_after import AllowedAfter
from dsbd_ort.decoding.logits_processing.request_processing import RequestProcessing
from dsbd_ort.decoding.warp import Warp, looks_beyond


class LogitsNeeds(NamedTuple):
    """The logits that a forward of nodes returns.

    Attributes:
        wanted: see EngineCall.
        allowed: the tokens that may follow.
        gather: of the logits, if these alone are returned; else all are.
        num_pairs: how many are gathered.
    """

    wanted: Wanted
    allowed: AllowedAfter
    gather: Gather | None = None
    num_pairs: int = 0


ALL_LOGITS = LogitsNeeds("all logits", AllowedAfter.after(NO_INTS, None))


class LogitsReader:
    """Makes the distributions after nodes from an engine's logits, without processing these.

    Attributes:
        checks: of joint distributions of beams; raise ConstraintError if no token may follow.
    """

    checks: Sequence[Callable[[JointDistribution], None]] = ()

    def __init__(self, warp: Warp) -> None:
        self._warp = warp

    def needs(self, nodes: Nodes) -> LogitsNeeds:
        """Return the logits that the distributions after ``nodes`` are made from."""
        return ALL_LOGITS

    def distributions(
        self, logits: Logits, nodes: Nodes, needs: LogitsNeeds
    ) -> tuple[TokenDistributions, Rows]:
        """Return the distributions after nodes, and the rows that must be computed once more.

        Raises:
            ModelError: the logits are invalid.
        """
        return self._warp.distributions(logits), NO_INTS


class LogitsBeyondTopK(LogitsReader):
    """The same if tokens may be drawn that a top-k head does not return."""

    def __init__(self, warp: Warp, vocab_size: int) -> None:
        self._warp = warp
        self._vocab_size = vocab_size

    def distributions(
        self, logits: Logits, nodes: Nodes, needs: LogitsNeeds
    ) -> tuple[TokenDistributions, Rows]:
        """See LogitsReader."""
        return distributions_beyond_top_k(self._warp, logits, self._vocab_size)


class ProcessedLogits(LogitsReader):
    """Reads the logits of a request with processors or a constraint."""

    def __init__(self, processing: RequestProcessing, *, is_draft: bool, gathers: bool) -> None:
        """Take the processing of both engines.

        gathers: whether the logits of the allowed tokens suffice, if a constraint lists them.
        """
        self._processing = processing
        self._is_draft = is_draft
        self._gathers = gathers
        self.checks = () if is_draft else (self._check_continues,)

    def needs(self, nodes: Nodes) -> LogitsNeeds:
        """See LogitsReader."""
        allowed = self._processing.allowed_after(nodes)
        if self._gathers and allowed.lists:
            return LogitsNeeds("some logits", allowed, allowed.pairs(), allowed.num_pairs)
        return LogitsNeeds("all logits", allowed)

    def distributions(
        self, logits: Logits, nodes: Nodes, needs: LogitsNeeds
    ) -> tuple[TokenDistributions, Rows]:
        """See LogitsReader."""
        return self._processing.distributions(logits, nodes, needs.allowed, is_draft=self._is_draft)

    def _check_continues(self, joint: JointDistribution) -> None:
        is_stuck = np.bincount(joint.parents, minlength=len(joint.nodes)) == 0
        self._processing.check_continues(joint.nodes[is_stuck], len(joint.tokens))


def logits_reader(
    role: Role,
    spec: EngineSpec,
    warp: Warp,
    processing: RequestProcessing | None,
    *,
    keeps_tops: bool,
) -> LogitsReader:
    """Return the reader of an engine's logits; ``keeps_tops``: all tokens of a row are ranked."""
    if processing is not None:
        is_draft = role == "draft"
        notes_others = keeps_tops or (not is_draft and processing.forbidden is not None)
        gathers = spec.head.gathers_logits and not notes_others
        return ProcessedLogits(processing, is_draft=is_draft, gathers=gathers)
    if looks_beyond(warp, spec):
        return LogitsBeyondTopK(warp, spec.vocab_size)
    return LogitsReader(warp)
