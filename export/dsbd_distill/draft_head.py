"""Head of a draft, a product with its weights: logits of some tokens, a few rows at a time.

Logits over 152,000 tokens need 1.2 GB for the 2,000 places of a step: ``TorchDevice.rows_at_once``
places are computed at a time, and again for the gradient.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsbd_distill.acceptance import Best
from dsbd_distill.loss import log_probs_of
from dsbd_distill.teacher import TorchDevice

_NEVER = -30.0  # log-probability of a token that is not proposed: it adds nothing to a sum
_LEAST_MASS = 1e-6


class DraftHead:
    """The tokens that a draft proposes, (n,) int64 ascending or None: all; its logits for them."""

    def __init__(
        self, vocab_size: int, proposed: NDArray[np.int64] | None, device: TorchDevice
    ) -> None:
        self._device = device
        self._proposed = None if proposed is None else torch.from_numpy(proposed).to(device.name)
        places = torch.arange(vocab_size, device=device.name)
        if self._proposed is not None:
            places = torch.full_like(places, -1)
            places[self._proposed] = torch.arange(len(self._proposed), device=device.name)
        self._places = places

    def log_probs(self, hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        """Return log-probabilities of tokens, (n, K); ``_NEVER`` for those that are not proposed.

        hidden: (n, H). weight: (V, H), or (Vd, H) for the proposed tokens. ids: (n, K) int64.
        """
        places = self._places[ids]
        rows = self._of_proposed(weight, axis=0)
        found = head_log_probs(hidden, rows, places.clamp_min(0), self._device)
        return torch.where(places >= 0, found, _NEVER)

    def log_probs_of_logits(self, logits: Tensor, ids: Tensor) -> Tensor:
        """As ``log_probs``, for logits over the vocabulary, (n, V)."""
        places = self._places[ids]
        found = log_probs_of(self._of_proposed(logits, axis=-1), places.clamp_min(0))
        return torch.where(places >= 0, found, _NEVER)

    def best(self, hidden: Tensor, weight: Tensor) -> Best:
        """Return the most probable of the proposed tokens; arguments as for ``log_probs``."""
        return Best.of(hidden @ self._of_proposed(weight, axis=0).T, self._proposed)

    def best_of_logits(self, logits: Tensor) -> Best:
        """As ``best``, for logits over the vocabulary, (n, V)."""
        return Best.of(self._of_proposed(logits, axis=-1), self._proposed)

    def proposable(self, ids: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target's distribution p / m over the proposed tokens, and their sum m, (n,).

        ids, log_p: (n, K), of the target's top tokens. The result has ``_NEVER`` for the others.
        """
        is_proposed = self._places[ids] >= 0
        mass = 1 - (log_p.exp() * ~is_proposed).sum(-1)
        mass = mass.clamp_min(_LEAST_MASS)
        return torch.where(is_proposed, log_p - mass.log()[:, None], _NEVER), mass

    def _of_proposed(self, values: Tensor, axis: int) -> Tensor:
        if self._proposed is None or values.shape[axis] == len(self._proposed):
            return values
        return values.index_select(axis, self._proposed)


def head_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, device: TorchDevice) -> Tensor:
    """Return the log-probabilities of some tokens, (n, K) float32, under softmax(hidden weight^T).

    hidden: (n, H). weight: (V, H). ids: (n, K) int64.
    """
    found: Tensor = _HeadLogProbs.apply(hidden, weight, ids, device)  # type: ignore[no-untyped-call]
    return found


class _HeadLogProbs(torch.autograd.Function):
    """``head_log_probs``, with logits for some places at a time."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, device: TorchDevice
    ) -> Tensor:
        at_once, factor = device.rows_at_once(1, len(weight)), _factor(weight, device)
        found, normalizers = [], []
        for rows, row_ids in _split(at_once, hidden, ids):
            logits = (rows.to(factor.dtype) @ factor.T).float()
            normalizers.append(logits.logsumexp(-1, keepdim=True))
            found.append(logits.gather(-1, row_ids) - normalizers[-1])
        ctx.save_for_backward(hidden, weight, ids, torch.cat(normalizers))
        ctx.device = device
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, ids, normalizers = ctx.saved_tensors
        at_once, factor = ctx.device.rows_at_once(1, len(weight)), _factor(weight, ctx.device)
        of_hidden, of_weight = [], torch.zeros_like(weight)
        for rows, row_ids, normalizer, of_ids in _split(
            at_once, hidden, ids, normalizers, gradient
        ):
            rows = rows.to(factor.dtype)
            slopes = (rows @ factor.T).float().sub_(normalizer).exp_()
            slopes.mul_(-of_ids.sum(-1, keepdim=True)).scatter_add_(-1, row_ids, of_ids)
            narrow = slopes.to(factor.dtype)
            of_hidden.append((narrow @ factor).to(hidden.dtype))
            of_weight += narrow.T @ rows
        return torch.cat(of_hidden), of_weight, None, None


def _factor(weight: Tensor, device: TorchDevice) -> Tensor:
    return weight.bfloat16() if device.uses_bf16 else weight


def _split(at_once: int, *arrays: Tensor) -> Any:
    return zip(*(torch.split(array, at_once) for array in arrays), strict=True)
