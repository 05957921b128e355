"""Loss of a draft: KL, then total variation, which is one minus the acceptance."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dsbd_distill.teacher import TorchDevice

_LEAST = 1e-6  # probability of the bucket of all other tokens
_TV_BEGINS, _TV_RISES, _MOST_TV = 0.3, 0.3, 0.9
_COVERAGE_WEIGHT = 0.3
_CACHED_LOGITS = 2**19  # numbers of one pass on a CPU, 2 MiB: they stay in its caches


def tv_weight(progress: float) -> float:
    """Return the weight of the total variation at a share of the training."""
    return _MOST_TV * min(max(progress - _TV_BEGINS, 0.0) / _TV_RISES, 1.0)


@dataclass(frozen=True)
class Coverage:
    """A term of the loss for beams: each of the target's best tokens is proposed.

    Beams of width W keep the W best candidates of the target; KL hardly counts the second to W-th.
    The term

        L_W = 1/W sum over the W best i of max(0, log p_i - log q_i)

    counts each equally if q is below p.
    """

    num_beams: int  # W

    def mixed_with(self, distance: Tensor, log_q: Tensor, log_p: Tensor) -> Tensor:
        """Return (1 - c) distance + c L_W by position, (...); log_q and log_p are (..., K)."""
        best = slice(0, self.num_beams)
        missing = (log_p[..., best] - log_q[..., best]).clamp_min(0.0).mean(-1)
        return torch.lerp(distance, missing, _COVERAGE_WEIGHT)


def distillation_loss(
    draft: nn.Module,
    batch: tuple[Tensor, ...],
    device: TorchDevice,
    coverage: Coverage | None = None,
) -> Tensor:
    """Return KL(p || q) mixed with the total variation of p and q, mean over positions.

    p: target, q: draft, over the target's top tokens and one bucket for all others. One minus the
    total variation is the speculative acceptance rate (Leviathan et al. 2023, 3.2), hence the
    second term.

    batch: tokens (B, length); ids and log-probabilities of the target's top tokens after the last
        of them, (B, num_labels, K); which of these count, (B, num_labels); the weight of the total
        variation, ().
    device: of draft and batch.
    """
    tokens, ids, log_p, counted, tv_weight = batch
    with device.autocast():
        out = draft(input_ids=tokens, use_cache=False, logits_to_keep=ids.shape[1])
    log_q = log_probs_of(selected(out.logits, counted).float(), selected(ids, counted))
    return distance(log_q, selected(log_p, counted), tv_weight, coverage).mean()


def selected(values: Tensor, counted: Tensor) -> Tensor:
    """Return the positions that count, (n, ...), of (B, num_labels, ...); a view if all count."""
    return values.flatten(0, 1) if bool(counted.all()) else values[counted]


def distance(
    log_q: Tensor, log_p: Tensor, tv_weight: Tensor, coverage: Coverage | None = None
) -> Tensor:
    """Return KL mixed with the total variation and a coverage, (n,), of log_q, log_p: (n, K)."""
    p, q = log_p.exp(), log_q.exp()
    rest_p = (1 - p.sum(-1)).clamp_min(_LEAST)
    rest_q = (1 - q.sum(-1)).clamp_min(_LEAST)
    kl = (p * (log_p - log_q)).sum(-1) + rest_p * (rest_p.log() - rest_q.log())
    tv = 0.5 * ((p - q).abs().sum(-1) + (rest_p - rest_q).abs())
    mixed = torch.lerp(kl, tv, tv_weight)
    return mixed if coverage is None else coverage.mixed_with(mixed, log_q, log_p)


def log_probs_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probabilities of some tokens, (..., K), of logits (..., V).

    ids: (..., K) int64, distinct within a row.
    """
    found: Tensor = _LogProbs.apply(logits.flatten(0, -2), ids.flatten(0, -2))  # type: ignore[no-untyped-call]
    return found.view(ids.shape)


class _LogProbs(torch.autograd.Function):
    """``log_probs_of`` in two dimensions, a few rows at a time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor) -> Tensor:
        sums = [part.logsumexp(-1, keepdim=True) for part in torch.split(logits, _rows_of(logits))]
        normalizer = torch.cat(sums)
        ctx.save_for_backward(logits, ids, normalizer)
        return logits.gather(-1, ids) - normalizer

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        result = torch.empty_like(ctx.saved_tensors[0])
        arrays: tuple[Tensor, ...] = (result, *ctx.saved_tensors, gradient)
        parts = (torch.split(array, _rows_of(result)) for array in arrays)
        for out, logits, ids, normalizer, of_ids in zip(*parts, strict=True):
            torch.sub(logits, normalizer, out=out).exp_().mul_(-of_ids.sum(-1, keepdim=True))
            out.scatter_add_(-1, ids, of_ids)
        return result, None


def _rows_of(logits: Tensor) -> int:
    """Return how many rows of (n, V) are computed at a time; on a GPU all of them."""
    num_rows, vocab_size = logits.shape
    return max(1, _CACHED_LOGITS // vocab_size) if logits.device.type == "cpu" else num_rows
