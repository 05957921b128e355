"""How far the logits of an engine are from those of the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Divergence:
    """The distance of R rows; infinite, and no agreement, where the shapes differ.

    Attributes:
        max_abs_error: largest difference of a logit, NaN where a value is.
        mean_kl: mean of KL(wanted || found) over the rows, in nats, NaN where a value is.
        top1_agreement: share of the rows whose largest logit is that of the same token.
    """

    max_abs_error: float
    mean_kl: float
    top1_agreement: float


def divergence(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> Divergence:
    """Return the distance of ``found`` from ``wanted``, both (R, V)."""
    if found.shape != wanted.shape:
        return Divergence(float("inf"), float("inf"), 0.0)
    return Divergence(
        max_abs_error=max(float(np.max(np.abs(a - b))) for a, b in zip(found, wanted, strict=True)),
        mean_kl=float(np.mean([_kl(p, q) for p, q in zip(wanted, found, strict=True)])),
        top1_agreement=float(np.mean(found.argmax(-1) == wanted.argmax(-1))),
    )


def _kl(p_logits: NDArray[np.float32], q_logits: NDArray[np.float32]) -> float:
    """Return KL(p || q) of two rows of logits, (V,), never below 0; row by row to save memory."""
    p, q = _log_probs(p_logits), _log_probs(q_logits)
    return float(np.maximum(np.sum(np.exp(p) * (p - q)), 0.0))


def _log_probs(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - np.max(logits)
    return np.asarray(shifted - np.log(np.sum(np.exp(shifted))))
