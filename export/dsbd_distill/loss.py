"""Loss of a draft: KL, then total variation, which is one minus the acceptance; and its head.

A head multiplies hidden states by its weights, a few rows at a time. Logits over 152,000 tokens
need 1.2 GB for the 2,000 places of a step. So logits of only ``TorchDevice.rows_at_once`` places
are computed at a time, and computed again for the gradient.

A feature draft reads the target's features for committed tokens, and its own features for drafted
tokens. So every position is computed several times (EAGLE-3's training-time test):

    step 0: row t reads the target's feature of the token before it
    step j: row t, after j drafted tokens, reads the draft's feature of row t - 1 in step j - 1

With 4 rows, row 3 of step 2 sees rows 0 and 1 of step 0, row 2 of step 1, and itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dsbd_distill.lesson import NUM_TOP
from dsbd_distill.teacher import Sampling, TorchDevice
from dsbd_export.feature_draft.model import FeatureDraft

_LEAST = 1e-6  # probability of the bucket of all other tokens
_TV_BEGINS, _TV_RISES, _MOST_TV = 0.3, 0.3, 0.9
_COVERAGE_WEIGHT = 0.3
_CACHED_LOGITS = 2**19  # logits of one pass on a CPU, 2 MiB: they stay in the processor's caches


def tv_weight(progress: float) -> float:
    """Return the weight of the total variation at a share of the training."""
    return _MOST_TV * min(max(progress - _TV_BEGINS, 0.0) / _TV_RISES, 1.0)


@dataclass(frozen=True)
class Coverage:
    """A term of the loss for beams: the draft should propose each of the target's best tokens.

    A beam search of width W keeps the W best candidates of the target, but KL gives the second to
    W-th candidate little weight. The term

        L_W = 1/W sum over the W best i of max(0, log p_i - log q_i)

    gives the same weight to each candidate whose q is below p.
    """

    num_beams: int  # W

    def mixed_with(self, distance: Tensor, log_q: Tensor, log_p: Tensor) -> Tensor:
        """Return (1 - c) distance + c L_W per position, (...); log_q and log_p are (..., K)."""
        best = slice(0, self.num_beams)
        missing = (log_p[..., best] - log_q[..., best]).clamp_min(0.0).mean(-1)
        return torch.lerp(distance, missing, _COVERAGE_WEIGHT)


def selected(values: Tensor, counted: Tensor) -> Tensor:
    """Return the values (B, num_labels, ...) that count as (n, ...); a view if all count."""
    return values.flatten(0, 1) if bool(counted.all()) else values[counted]


def distance(
    log_q: Tensor, log_p: Tensor, tv_weight: Tensor, coverage: Coverage | None = None
) -> Tensor:
    """Return KL(p || q) mixed with the total variation, and with the coverage term if any, (n,).

    p: target, q: draft, over the target's top tokens and one bucket for all others. One minus the
    total variation is the speculative acceptance rate (Leviathan et al. 2023, 3.2), hence the
    second term.

    log_q, log_p: (n, K). tv_weight: (), weight of the total variation.
    """
    p, q = log_p.exp(), log_q.exp()
    rest_p = (1 - p.sum(-1)).clamp_min(_LEAST)
    rest_q = (1 - q.sum(-1)).clamp_min(_LEAST)
    kl = (p * (log_p - log_q)).sum(-1) + rest_p * (rest_p.log() - rest_q.log())
    tv = 0.5 * ((p - q).abs().sum(-1) + (rest_p - rest_q).abs())
    mixed = torch.lerp(kl, tv, tv_weight)
    return mixed if coverage is None else coverage.mixed_with(mixed, log_q, log_p)


def log_probs_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Return log-probabilities of ids, (..., K) int64, distinct in a row, for logits (..., V)."""
    args = logits.flatten(0, -2), ids.flatten(0, -2)
    log_probs: Tensor = _LogProbs.apply(*args)  # type: ignore[no-untyped-call]
    return log_probs.view(ids.shape)


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
    num_rows, vocab_size = logits.shape
    return max(1, _CACHED_LOGITS // vocab_size) if logits.device.type == "cpu" else num_rows


_NEVER = (
    -30.0
)  # log-probability of a token that the draft does not propose: exp of it adds nothing to a sum
_LEAST_MASS = 1e-6


@dataclass(frozen=True)
class Best:
    """The most probable tokens of a draft."""

    # ids: (n, K) int64. logits: (n, K) float32, up to a constant. The best first.
    ids: Tensor
    logits: Tensor

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor | None = None) -> Self:
        """Return the best by logits (n, V) of ``tokens``, (V,) int64; None: 0, 1, 2, ..."""
        top = logits.float().topk(min(NUM_TOP, logits.shape[-1]))
        return cls(top.indices if tokens is None else tokens[top.indices], top.values)

    def probs_of(self, ids: Tensor, sampling: Sampling) -> Tensor:
        """Return probabilities of tokens, (n, J), when the draft samples from its best tokens."""
        probs = sampling.probs(self.logits)
        return ((ids[:, :, None] == self.ids[:, None]) * probs[:, None]).sum(-1)


class DraftHead:
    """Logits of a draft for the tokens that it proposes, (n,) int64 ascending, or None: all."""

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
        """Return log-probabilities of tokens, (n, K); ``_NEVER`` for tokens that are not proposed.

        hidden: (n, H). weight: (V, H), or (Vd, H) for the proposed tokens. ids: (n, K) int64.
        """
        places = self._places[ids]
        rows = self._of_proposed(weight, axis=0)
        args = hidden, rows, places.clamp_min(0), self._device
        log_probs: Tensor = _HeadLogProbs.apply(*args)  # type: ignore[no-untyped-call]
        return torch.where(places >= 0, log_probs, _NEVER)

    def log_probs_of_logits(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the same as ``log_probs``, from logits over the vocabulary, (n, V)."""
        places = self._places[ids]
        log_probs = log_probs_of(self._of_proposed(logits, axis=-1), places.clamp_min(0))
        return torch.where(places >= 0, log_probs, _NEVER)

    def best(self, hidden: Tensor, weight: Tensor) -> Best:
        """Return the most probable of the proposed tokens; arguments as for ``log_probs``."""
        return Best.of(hidden @ self._of_proposed(weight, axis=0).T, self._proposed)

    def best_of_logits(self, logits: Tensor) -> Best:
        """Return the same as ``best``, from logits over the vocabulary, (n, V)."""
        return Best.of(self._of_proposed(logits, axis=-1), self._proposed)

    def proposable(self, ids: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target's distribution p / m over the proposed tokens, and their sum m, (n,).

        ids, log_p: (n, K), the target's top tokens. Tokens that are not proposed get ``_NEVER``.
        """
        is_proposed = self._places[ids] >= 0
        mass = 1 - (log_p.exp() * ~is_proposed).sum(-1)
        mass = mass.clamp_min(_LEAST_MASS)
        return torch.where(is_proposed, log_p - mass.log()[:, None], _NEVER), mass

    def _of_proposed(self, values: Tensor, axis: int) -> Tensor:
        if self._proposed is None or values.shape[axis] == len(self._proposed):
            return values
        return values.index_select(axis, self._proposed)


class _HeadLogProbs(torch.autograd.Function):
    """Log-probabilities of tokens, (n, K) float32, under softmax(hidden weight^T), in parts.

    hidden: (n, H). weight: (V, H). ids: (n, K) int64. Logits exist for some places at a time.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, device: TorchDevice
    ) -> Tensor:
        at_once, factor = device.rows_at_once(1, len(weight)), _factor(weight, device)
        log_probs, normalizers = [], []
        for rows, row_ids in _split(at_once, hidden, ids):
            logits = (rows.to(factor.dtype) @ factor.T).float()
            normalizers.append(logits.logsumexp(-1, keepdim=True))
            log_probs.append(logits.gather(-1, row_ids) - normalizers[-1])
        ctx.save_for_backward(hidden, weight, ids, torch.cat(normalizers))
        ctx.device = device
        return torch.cat(log_probs)

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


NUM_STEPS = 4  # steps of a rollout in the training, and for the acceptance in progress lines
_MOST_ROWS = 512  # in one sequence; longer sequences have only step 0, to bound attention
_DECAY = 0.8  # weight of a step relative to the previous one, as in EAGLE-3
_JUDGED = 2  # after step 0 the loss reads every second row: the head needs most of a step's time


class RolloutCache:
    """Keys and values of all steps so far, one after the other."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def update(self, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Add a step, (B, Hkv, T, D) each; return all steps, (B, Hkv, (step + 1) * T, D) each."""
        self._keys.append(key)
        self._values.append(value)
        return torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2)


def visible(num_rows: int, step: int, device: str) -> Tensor:
    """Return which rows of steps 0 to ``step`` its rows see, (1, 1, T, (step + 1) * T) bool."""
    last_given = torch.arange(num_rows, device=device)[:, None] - step
    row = torch.arange(num_rows, device=device)
    parts = [row <= last_given, *(row == last_given + earlier for earlier in range(1, step + 1))]
    return torch.cat(parts, dim=1)[None, None]


def rollout(
    draft: FeatureDraft, tokens: Tensor, features: Tensor, num_steps: int
) -> Iterator[Tensor]:
    """Yield the head's input in each step, (B, T, H); rows below the step's number are meaningless.

    tokens: (B, T + 1); the first has no row. features: (B, T, width), the target's feature of the
    token before each row.
    """
    num_rows = features.shape[1]
    positions = torch.arange(1, num_rows + 1, device=tokens.device)[None]
    read, cache = draft.projected(features), RolloutCache()
    for step in range(num_steps):
        mask = visible(num_rows, step, tokens.device.type)
        normed, feature = draft(tokens[:, 1:], positions, read, mask, cache)
        yield normed
        read = F.pad(feature, (0, 0, 1, 0))[:, :-1]


def rollout_loss(
    draft: FeatureDraft,
    batch: tuple[Tensor, ...],
    head: DraftHead,
    device: TorchDevice,
    coverage: Coverage | None = None,
) -> Tensor:
    """Return the distance from the target's distributions, mean over the steps of a rollout.

    A place is weighted by the total probability of the proposed tokens; see ``DraftHead``.

    batch: as for ``DraftKind.loss``, with one more item before the last: the target's features of
        all tokens except the last, (B, length - 1, width).
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

    tokens: (B, length). counted: (B, num_new) bool, for the last tokens. features: (B, length - 1,
    width).
    """
    num_new = counted.shape[1]
    for normed in rollout(draft, tokens, features, min(NUM_STEPS, features.shape[1] - num_new + 1)):
        yield selected(normed[:, -num_new:], counted)
