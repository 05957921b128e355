"""Rollout of a feature draft while it is trained: its own features in place of the target's.

A draft has the target's features for committed tokens, and its own for drafted ones. So every
position is computed several times (EAGLE-3's training-time test):

    step 0: row t reads the target's feature of the token before it
    step j: row t reads the own feature of row t - 1 in step j - 1

Row t of step j follows j drafted tokens. With 4 rows, row 3 of step 2 sees rows 0 and 1 of step 0,
row 2 of step 1, and itself.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dsbd_distill.loss import Coverage, DraftHead, distance, selected
from dsbd_distill.teacher import TorchDevice
from dsbd_export.feature_draft.model import FeatureDraft

NUM_STEPS = 4  # of the training, and of the acceptance in progress lines
_MOST_ROWS = 512  # in one sequence; longer ones have only step 0, to bound attention
_DECAY = 0.8  # weight of a step relative to the previous one, as in EAGLE-3
_JUDGED = 2  # after step 0 every second row is judged: the head takes most of a step


class RolloutCache:
    """Keys and values of all steps so far, one after the other."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def update(self, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Add a step, (B, Hkv, T, D) each; return all of them, (B, Hkv, (step + 1) * T, D)."""
        self._keys.append(key)
        self._values.append(value)
        return torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2)


def visible(num_rows: int, step: int, device: str) -> Tensor:
    """Return which rows of steps 0 to ``step`` its rows see, (1, 1, T, (step + 1) * T) bool."""
    own = torch.arange(num_rows, device=device)[:, None] - step
    row = torch.arange(num_rows, device=device)
    parts = [row <= own, *(row == own + earlier for earlier in range(1, step + 1))]
    return torch.cat(parts, dim=1)[None, None]


def rollout(
    draft: FeatureDraft, tokens: Tensor, features: Tensor, num_steps: int
) -> Iterator[Tensor]:
    """Yield the head's input in each step, (B, T, H); rows below the step's number are meaningless.

    tokens: (B, T + 1); the first has no row. features: (B, T, width) of the target, for the token
    before each row.
    """
    num_rows = features.shape[1]
    positions = torch.arange(1, num_rows + 1, device=tokens.device)[None]
    read, cache = draft.projected(features), RolloutCache()
    for step in range(num_steps):
        mask = visible(num_rows, step, tokens.device.type)
        normed, own = draft(tokens[:, 1:], positions, read, mask, cache)
        yield normed
        read = F.pad(own, (0, 0, 1, 0))[:, :-1]


def rollout_loss(
    draft: FeatureDraft,
    batch: tuple[Tensor, ...],
    head: DraftHead,
    device: TorchDevice,
    coverage: Coverage | None = None,
) -> Tensor:
    """Return the distance from the target's distributions, mean over the steps of a rollout.

    A place is weighted by the total probability of the proposed tokens; see ``DraftHead``.

    batch: as for ``distillation_loss``, and before the last item the target's features of all
        tokens except the last, (B, length - 1, width).
    """
    tokens, ids, log_p, counted, features, tv_weight = batch
    num_rows = tokens.shape[1] - 1
    num_steps = NUM_STEPS if num_rows <= _MOST_ROWS else 1
    total, weights = torch.zeros((), device=tokens.device), 0.0
    with device.autocast():
        steps = [*rollout(draft, tokens, features, min(num_steps, num_rows))]
    for step, normed in enumerate(steps):
        num_judged = min(ids.shape[1], num_rows - step)  # the last rows, which have a label
        judged = slice(-num_judged, None, _JUDGED if step else 1)
        where = counted[:, judged]
        if not where.any():
            continue
        of_place = selected(ids[:, judged], where)
        proposable, mass = head.proposable(of_place, selected(log_p[:, judged], where))
        read = selected(normed[:, judged], where)
        log_q = head.log_probs(read, draft.lm_head.weight, of_place)
        of_step = mass * distance(log_q, proposable, tv_weight, coverage)
        total = total + _DECAY**step * of_step.mean()
        weights += _DECAY**step
    return total / weights


def rollout_reads(
    draft: FeatureDraft, tokens: Tensor, counted: Tensor, features: Tensor
) -> Iterator[Tensor]:
    """Yield the head's input after the tokens that count, (n, H), in each step.

    tokens: (B, length). counted: (B, num_new) bool. Which of the last tokens count. features:
    (B, length - 1, width) of the target.
    """
    num_new = counted.shape[1]
    for normed in rollout(draft, tokens, features, min(NUM_STEPS, features.shape[1] - num_new + 1)):
        yield selected(normed[:, -num_new:], counted)
