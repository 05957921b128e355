"""Readers of logits: which logits after nodes a request needs, and their distributions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dsbd_forward.logits import Logits
from dsbd_forward.spec import EngineSpec
from dsbd_ort.decoding.beyond_top_k import distributions_beyond_top_k
from dsbd_ort.decoding.distribution import TokenDistributions
from dsbd_ort.decoding.engine_call import Role
from dsbd_ort.decoding.forest import Nodes
from dsbd_ort.decoding.joint_distribution import JointDistribution
from dsbd_ort.decoding.logits_processing.request_processing import RequestProcessing
from dsbd_ort.decoding.warp import Warp, looks_beyond


class LogitsReader:
    """Makes the distributions after nodes from an engine's logits, without processing these.

    Attributes:
        checks: of joint distributions of beams; raise ConstraintError if no token may follow.
    """

    checks: Sequence[Callable[[JointDistribution], None]] = ()

    def __init__(self, warp: Warp) -> None:
        self._warp = warp

    def distributions(self, logits: Logits, nodes: Nodes) -> TokenDistributions:
        """Return the distributions after nodes.

        Raises:
            ModelError: the logits are invalid.
        """
        return self._warp.distributions(logits)


class LogitsBeyondTopK(LogitsReader):
    """The same if tokens may be drawn that a top-k head does not return."""

    def __init__(self, warp: Warp, vocab_size: int) -> None:
        self._warp = warp
        self._vocab_size = vocab_size

    def distributions(self, logits: Logits, nodes: Nodes) -> TokenDistributions:
        """See LogitsReader."""
        return distributions_beyond_top_k(self._warp, logits, self._vocab_size)


class ProcessedLogits(LogitsReader):
    """Reads the logits of a request with processors or a constraint."""

    def __init__(self, processing: RequestProcessing, *, is_draft: bool) -> None:
        """Take the processing of both engines."""
        self._processing = processing
        self._is_draft = is_draft
        self.checks = () if is_draft else (self._check_continues,)

    def distributions(self, logits: Logits, nodes: Nodes) -> TokenDistributions:
        """See LogitsReader."""
        return self._processing.distributions(logits, nodes, is_draft=self._is_draft)

    def _check_continues(self, joint: JointDistribution) -> None:
        is_stuck = np.bincount(joint.parents, minlength=len(joint.nodes)) == 0
        self._processing.check_continues(joint.nodes[is_stuck], len(joint.tokens))


def logits_reader(
    role: Role, spec: EngineSpec, warp: Warp, processing: RequestProcessing | None
) -> LogitsReader:
    """Return the reader of an engine's logits."""
    if processing is not None:
        return ProcessedLogits(processing, is_draft=role == "draft")
    if looks_beyond(warp, spec):
        return LogitsBeyondTopK(warp, spec.vocab_size)
    return LogitsReader(warp)
