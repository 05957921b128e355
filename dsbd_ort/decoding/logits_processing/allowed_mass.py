"""Probability that processors leave to the tokens after each path: how sure the model was.

A token that processors forbid leaves its probability to nobody: log-probabilities of an output are
those of the model as it is. Divided by what is left they are those among the tokens that could
follow, as transformers' ``average log-probability`` of a transcript.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsbd_ort.decoding.logits_processing.path_states import Nodes, PathTokens


class AllowedMass:
    """Stores the share of the target's distribution that processors leave after each path."""

    def __init__(self) -> None:
        self._by_path: dict[bytes, float] = {}

    def note(self, paths: PathTokens, nodes: Nodes, log_probs: NDArray[np.float64]) -> None:
        """Note the sum of what is left behind nodes.

        log_probs: (num_nodes, n) float64. Of the next tokens, -inf where one is forbidden.
        """
        largest = log_probs.max(axis=1, initial=-np.inf, keepdims=True)
        shift = np.where(np.isfinite(largest), largest, 0.0)
        with np.errstate(divide="ignore"):  # nothing is left: that is an error elsewhere
            masses = np.log(np.exp(log_probs - shift).sum(axis=1)) + shift[:, 0]
        for node, mass in zip(nodes.tolist(), masses.tolist(), strict=True):
            self._by_path[paths.path(node)[paths.num_prompt :].tobytes()] = mass

    def before(self, token_ids: Sequence[int]) -> NDArray[np.float64]:
        """Return the log of what was left at the place of each of an output's new tokens, (n,).

        Zeros for a request without processors, which leave everything.
        """
        if not self._by_path:
            return np.zeros(len(token_ids))
        tokens = np.array(token_ids, dtype=np.int64)
        return np.array([self._by_path[tokens[:n].tobytes()] for n in range(len(tokens))])
