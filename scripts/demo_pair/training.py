"""A resumable training loop: Muon for the matrices, AdamW for the rest, warm-up and decay."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Length and pace of a training run.

    Attributes:
        num_steps: optimizer steps in all; the learning rate has decayed to nearly zero at the last.
        learning_rate: peak; Muon's update is scaled to the root mean square of AdamW's.
        warmup_steps: linear ramp at the start.
        decay_fraction: last share of the steps, over which the rate falls.
    """

    num_steps: int
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    decay_fraction: float = 0.5

    def rate(self, step: int) -> float:
        """Return the learning rate of ``step``: trapezoidal (warm up, hold, cosine to zero)."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        decay_steps = self.num_steps * self.decay_fraction
        progress = (step - (self.num_steps - decay_steps)) / decay_steps
        return self.learning_rate * (
            0.5 + 0.5 * math.cos(math.pi * min(max(progress, 0.0), 1.0)) + 1e-3
        )


def optimizers(model: nn.Module, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon over the layers' matrices and AdamW over embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(
            matrices, lr=learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(
    model: nn.Module,
    schedule: Schedule,
    batch_at: Callable[[int], Batch],
    loss_of: Callable[[nn.Module, Batch], Tensor],
    checkpoint: Path,
) -> None:
    """Train ``model`` in place; resume from ``checkpoint`` if it exists.

    ``batch_at(step)`` must depend on the step alone, so that a resumed run sees the same data.
    """
    optims = optimizers(model, schedule.learning_rate)
    start = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for optim, saved in zip(optims, state["optimizers"], strict=True):
            optim.load_state_dict(saved)
        start = state["step"]
    step_loss = torch.compile(loss_of, dynamic=False)
    began, losses = time.monotonic(), []
    for step in range(start, schedule.num_steps):
        for optim in optims:
            for group in optim.param_groups:
                group["lr"] = schedule.rate(step)
        loss = step_loss(model, batch_at(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optim in optims:
            optim.step()
            optim.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % 20 == 0:
            record = {"step": step + 1, "loss": sum(losses) / len(losses)}
            record["seconds_per_step"] = (time.monotonic() - began) / len(losses)
            print(json.dumps(record), flush=True)
            began, losses = time.monotonic(), []
        if (step + 1) % 100 == 0 or step + 1 == schedule.num_steps:
            _save(checkpoint, model, optims, step + 1)


def _save(
    checkpoint: Path, model: nn.Module, optims: list[torch.optim.Optimizer], step: int
) -> None:
    partial = checkpoint.with_suffix(".partial")
    torch.save(
        {
            "model": model.state_dict(),
            "optimizers": [o.state_dict() for o in optims],
            "step": step,
        },
        partial,
    )
    os.replace(partial, checkpoint)
