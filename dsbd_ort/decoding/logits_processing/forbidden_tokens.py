"""The likeliest tokens that a constraint forbids after each node: for a trace."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.logits import Logits
from dsbd_ort.decoding.logits_processing.path_states import Nodes

MOST_FORBIDDEN = 3
"""Tokens that are noted for a node."""
_LOOKED_AT = 32  # most probable tokens of a position: a forbidden one beyond them hardly counts

Forbidden = tuple[tuple[int, float], ...]
"""Token ids and their probabilities under the raw target, most probable first."""


class Allows(Protocol):
    """The tokens that a constraint allows after some nodes."""

    def are_allowed(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of these are allowed, (num_rows, n) both."""


class ForbiddenTokens:
    """Notes what a constraint forbids, node by node, until it is taken."""

    def __init__(self) -> None:
        self._noted: dict[int, Forbidden] = {}

    def note(self, logits: Logits, nodes: Nodes, allowed: Allows) -> None:
        """Note the forbidden ones of the likeliest tokens after nodes, of the target."""
        normalizers = logits.log_normalizers
        tokens, scores = logits.most_probable(_LOOKED_AT)
        log_probs = scores - normalizers
        is_forbidden = ~allowed.are_allowed(tokens)
        for row, node in enumerate(nodes.tolist()):
            columns = np.flatnonzero(is_forbidden[row])[:MOST_FORBIDDEN]
            self._noted[node] = tuple(
                zip(
                    tokens[row, columns].tolist(),
                    np.exp(log_probs[row, columns]).tolist(),
                    strict=True,
                )
            )

    def taken(self) -> dict[int, Forbidden]:
        """Return what was noted, by node, and forget it: pruning gives nodes other numbers."""
        noted, self._noted = self._noted, {}
        return noted
