"""Joint training of target and draft, each towards the other; the loss in docs/performance.md."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dsbd_distill.teacher import TorchDevice


class Pair(nn.Module):
    """Target and draft as one module, to be trained together."""

    def __init__(self, target: nn.Module, draft: nn.Module) -> None:
        super().__init__()
        self.target = target
        self.draft = draft


def mutual_loss(
    pair: nn.Module, tokens: Tensor, num_corpus: Tensor, agreement: Tensor, device: TorchDevice
) -> Tensor:
    """Return the target's cross entropy plus ``agreement`` times the distance of both models.

    The distance is 0.4 KL(p || q) plus 0.6 times the total variation. Both models follow its
    gradient (deep mutual learning, Zhang et al. 2018). The draft learns the target's distribution.
    Among distributions that explain the corpus almost equally well, the target learns one that the
    draft can follow.

    tokens: (B, length) int64. The rows before ``num_corpus`` are from the corpus; the others are
    samples of the target, which teach only agreement.
    """
    with device.autocast():
        target_logits = pair.target(input_ids=tokens, use_cache=False).logits
        draft_logits = pair.draft(input_ids=tokens, use_cache=False).logits
    log_p = target_logits.float().log_softmax(-1)
    log_q = draft_logits.float().log_softmax(-1)
    nll = -log_p[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1).mean(-1)  # (B,)
    is_corpus = (torch.arange(len(tokens)) < num_corpus).float()
    cross_entropy = (nll * is_corpus).sum() / num_corpus
    p = log_p.exp()
    kl = (p * (log_p - log_q)).sum(-1).mean()
    tv = 0.5 * (p - log_q.exp()).abs().sum(-1).mean()
    return cross_entropy + agreement * (0.4 * kl + 0.6 * tv)


@torch.inference_mode()
def held_out_loss(model: nn.Module, sequences: NDArray[np.int64]) -> float:
    """Return the mean cross entropy in nats per token of (num_sequences, length) int64."""
    losses = []
    for row in torch.split(torch.from_numpy(sequences), 8):
        logits = model(input_ids=row, use_cache=False).logits[:, :-1].float()
        losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten()))
    return float(torch.stack(losses).mean())
