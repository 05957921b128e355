"""A resumable training loop: Muon for the matrices, AdamW for the rest, warm-up and decay."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsbd_export.errors import ExportError
from dsbd_runtime.bundle_files.durable_files import put_in_place

Batch = tuple[Tensor, ...]
Point = dict[str, Any]
"""Measurements at one moment: plain numbers by name."""

Loss = Callable[[nn.Module, Batch], Tensor]
_MAX_NORM = 1.0  # maximum norm of the gradient of all parameters
_MOMENTUM = 0.95  # momentum of Muon


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Length of a training: in steps, or else in seconds."""

    steps: int | None = None
    seconds: float = math.inf  # time of all training processes, each up to its last checkpoint

    def progress(self, step: int, seconds: float) -> float:
        """Return the share of the training that is over, 1 or more at its end."""
        return seconds / self.seconds if self.steps is None else step / self.steps


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rates of a training."""

    learning_rate: float = 3e-3  # peak; Muon's update is scaled to the root mean square of AdamW's
    warmup_steps: int = 100
    # last share of the training, in which the rate falls to nearly zero
    decay_fraction: float = 0.5

    def rate(self, step: int, progress: float) -> float:
        """Return the learning rate of ``step``: trapezoidal (warm up, hold, cosine to zero)."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        decayed = (progress - (1 - self.decay_fraction)) / self.decay_fraction
        return self.learning_rate * (
            0.5 + 0.5 * math.cos(math.pi * min(max(decayed, 0.0), 1.0)) + 1e-3
        )


@dataclass
class TrainingState:
    """State of a training."""

    step: int = 0
    seconds: float = 0.0
    progress: float = 0.0  # share of the budget
    # losses of the steps since the last point of ``history``
    losses: list[float] = field(default_factory=list)
    history: list[Point] = field(default_factory=list)


Observer = Callable[[TrainingState], Point | None]
"""Called before the first step and after every step; a returned point is added to the history."""


def optimizers(model: nn.Module, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon over the layers' matrices and AdamW over embeddings, head and norms."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in trained(model).items():
        is_table = "embed" in name or "lm_head" in name
        (others if parameter.ndim != 2 or is_table else matrices).append(parameter)
    return [
        Muon(matrices, lr=learning_rate, weight_decay=0.05),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a training changes, by name."""
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized, so that a matrix moves equally far in each of its directions.

    Jordan et al. 2024; the update is scaled to the root mean square of AdamW's (Liu et al. 2025,
    arXiv 2502.16982). It is torch.optim.Muon without products in bf16, which take 5 to 25 times as
    long on many CPUs.
    """

    def __init__(self, params: Sequence[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros_like(matrix)
                momentum = state["momentum"].lerp_(matrix.grad, 1 - _MOMENTUM)
                update = orthogonalized(matrix.grad.lerp(momentum, _MOMENTUM))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(matrix.shape)))


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return a matrix with the singular vectors of ``matrix``, (m, n), and values of about 1.

    Uses the Newton-Schulz iteration with the coefficients of Jordan et al. Its values are between
    0.7 and 1.2. Computed in bf16 on a GPU.
    """
    result = matrix.bfloat16() if matrix.is_cuda else matrix
    is_tall = matrix.shape[0] > matrix.shape[1]
    if is_tall:
        result = result.T
    result = result / result.norm().clamp_min(1e-7)
    for _ in range(5):
        gram = result @ result.T
        factor = torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315)
        result = torch.addmm(result, factor, result, beta=3.4445)
    return result.T if is_tall else result


class Trainer:
    """Trains a model in place; resumes from the checkpoint file, which is replaced as a whole."""

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        budget: Budget,
        checkpoint: Path,
        *,
        save_every: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._schedule = schedule
        self._budget = budget
        self._checkpoint = checkpoint
        self._save_every = save_every
        self._clock = clock
        self._optimizers = optimizers(model, schedule.learning_rate)
        self.state = TrainingState()
        if checkpoint.exists():
            self._resume()

    def run(
        self,
        batches_at: Callable[[int, float], Sequence[Batch]],
        loss_of: Loss,
        observe: Observer,
    ) -> TrainingState:
        """Train to the end of the budget; ``batches_at`` takes the step and the progress."""
        state = self.state
        began, saved = self._clock() - state.seconds, state.seconds
        if not state.step:
            self._note(observe)
        while state.progress < 1.0:
            for group in itertools.chain(*(each.param_groups for each in self._optimizers)):
                group["lr"] = self._schedule.rate(state.step, state.progress)
            state.losses.append(self._step(batches_at(state.step, state.progress), loss_of))
            state.step += 1
            state.seconds = self._clock() - began
            state.progress = self._budget.progress(state.step, state.seconds)
            self._note(observe)
            if state.progress >= 1.0 or state.seconds - saved >= self._save_every:
                self._save()
                saved = state.seconds
        return state

    def _note(self, observe: Observer) -> None:
        if (point := observe(self.state)) is not None:
            self.state.history.append(point)
            self.state.losses.clear()

    def _step(self, batches: Sequence[Batch], loss_of: Loss) -> float:
        total = 0.0
        for batch in batches:
            loss = loss_of(self._model, batch) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        if not math.isfinite(total):
            raise ExportError(
                f"the loss of step {self.state.step} is {total}; repeat the training with another "
                "seed, or look for weights of the target that are not finite"
            )
        nn.utils.clip_grad_norm_(self._model.parameters(), _MAX_NORM)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return total

    def _resume(self) -> None:
        file = self._checkpoint
        content: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
        with torch.no_grad():
            for name, parameter in trained(self._model).items():
                parameter.copy_(content["model"][name])
        for optimizer, saved in zip(self._optimizers, content["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.state = TrainingState(**content["state"])
        self.state.progress = self._budget.progress(self.state.step, self.state.seconds)

    def _save(self) -> None:
        """Write a checkpoint; after a kill or on a full disk the previous one remains."""
        partial = self._checkpoint.with_suffix(".partial")
        content = {
            "model": {name: each.detach() for name, each in trained(self._model).items()},
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "state": vars(self.state),
        }
        try:
            with partial.open("wb") as file:  # a path would turn a full disk into a RuntimeError
                torch.save(content, file)
            put_in_place(partial, self._checkpoint)
        finally:
            partial.unlink(missing_ok=True)
