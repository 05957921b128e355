"""Distance of a draft from its target's most probable tokens: KL, then total variation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsbd_export.distill.teacher import Device

_LEAST = 1e-6  # probability of the bucket of all other tokens
TV_BEGINS, TV_RISES, MOST_TV = 0.3, 0.3, 0.9


def tv_weight(progress: float) -> float:
    """Return the weight of the total variation at a share of the training.

    It starts at none, because its gradient vanishes where the two distributions are disjoint.
    """
    return MOST_TV * min(max(progress - TV_BEGINS, 0.0) / TV_RISES, 1.0)


def distillation_loss(draft: nn.Module, batch: tuple[Tensor, ...], device: Device) -> Tensor:
    """Return KL(p || q) mixed with the total variation of p and q, mean over positions.

    p: target, q: draft, over the target's top tokens and one bucket for all others. One minus
    the total variation is the speculative acceptance rate (Leviathan et al. 2023, 3.2), hence
    the second term.

    batch: tokens (B, length); ids and log-probabilities of the target's top tokens behind the
        last of them, (B, num_labels, K); the weight of the total variation, ().
    device: where all of it is.
    """
    tokens, ids, log_p, tv_weight = batch
    with device.autocast():
        out = draft(input_ids=tokens, use_cache=False, logits_to_keep=ids.shape[1])
    logits = out.logits.float()
    log_q = logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)
    p, q = log_p.exp(), log_q.exp()
    rest_p = (1 - p.sum(-1)).clamp_min(_LEAST)
    rest_q = (1 - q.sum(-1)).clamp_min(_LEAST)
    kl = (p * (log_p - log_q)).sum(-1) + rest_p * (rest_p.log() - rest_q.log())
    tv = 0.5 * ((p - q).abs().sum(-1) + (rest_p - rest_q).abs())
    return torch.lerp(kl, tv, tv_weight).mean()
