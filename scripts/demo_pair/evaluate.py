"""The figures of the demo pair: held-out loss of both models, speculative acceptance rate."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from demo_pair.distill import sample_continuations


@torch.inference_mode()
def held_out_loss(model: nn.Module, sequences: NDArray[np.int64]) -> float:
    """Return the mean cross entropy in nats per token of (num_sequences, length) int64."""
    losses = []
    for row in torch.from_numpy(sequences).split(8):
        logits = model(input_ids=row, use_cache=False).logits[:, :-1].float()
        losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten()))
    return float(torch.stack(losses).mean())


def warped(logits: Tensor, top_k: int) -> Tensor:
    """Return the distribution after top-k at temperature 1."""
    threshold = logits.topk(top_k).values[..., -1:]
    return logits.masked_fill(logits < threshold, -torch.inf).softmax(-1)


@torch.inference_mode()
def acceptance_rate(
    target: nn.Module, draft: nn.Module, prompts: NDArray[np.int64], new_tokens: int, top_k: int
) -> tuple[float, float]:
    """Return mean and standard error of sum min(p, q) along the target's own samples.

    That sum is the probability that one drafted token is accepted by speculative sampling
    (Leviathan et al. 2023, 3.2), here at temperature 1 with top-k on both models. The standard
    error is over prompts.
    """
    length = prompts.shape[1]
    ids = sample_continuations(target, prompts, length + new_tokens, top_k, seed=1)
    rates = []
    for row in torch.from_numpy(ids).split(8):
        p = warped(target(input_ids=row, use_cache=False).logits[:, length - 1 : -1], top_k)
        q = warped(draft(input_ids=row, use_cache=False).logits[:, length - 1 : -1], top_k)
        rates.append(torch.minimum(p, q).sum(-1).mean(-1))
    by_prompt = torch.cat(rates).double().numpy()
    return float(by_prompt.mean()), float(by_prompt.std(ddof=1) / np.sqrt(len(by_prompt)))
