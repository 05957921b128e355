"""Recurrent layers over the paths of a forest (docs/algorithm.md 3.11).

A recurrent layer changes a matrix at every token: it decays by exp(g), and the token writes into it
a delta u by a key k. In a forest no matrix is kept: every node is a row, as in attention, of its
key, its delta and the logarithm G of the decay along its path. With A(i) the ancestors of i,

    u_i = rate_i (v_i - sum_{j in A(i)} exp(G_i - G_j) (k_i . k_j) u_j)     the gated delta rule
    u_i = v_i                                                               Mamba2
    o_i = sum_{j in A(i) and i} exp(G_i - G_j) (q_i . k_j) u_j

so that outputs are products over rows under the forest's own mask. The deltas of one call are the
solution of a triangular system, since parents stand before children.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST_NEW_ROWS = 64
"""Of one call: the levels of ``_unit_lower_inverse`` are for so many rows."""

_HIDDEN = -1e4  # its exponential is 0
_EPSILON = 1e-6  # of transformers' norm of queries and keys


@dataclass(frozen=True)
class Recurrence:
    """What a layer with a recurrent state is given for S tokens, in fp32.

    Attributes:
        query, key: (Hk, S, Dk); each of their heads serves as many as the next one.
        value: (H, S, Dv).
        decay: (H, S). The logarithm g of each token's decay, not above 0.
        rate: (H, S) of the delta rule; None: deltas are the values.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    rate: Tensor | None = None


Outputs = Callable[[Recurrence], Tensor]
"""Returns the outputs of a recurrence, (H, S, Dv)."""


@contextlib.contextmanager
def replaced_recurrences(model: nn.Module, outputs: Outputs) -> Iterator[None]:
    """Let the recurrent layers of a model of transformers get what ``outputs`` returns.

    The functions that compute a recurrence have the same names in the modules of all families.
    """
    replacements = {
        "torch_chunk_gated_delta_rule": _delta_rule(outputs),
        "mamba2_chunk_scan": _scan(outputs),
    }
    modules = {sys.modules[type(part).__module__] for part in model.modules()}
    places = [
        (module, name) for module in modules for name in replacements if hasattr(module, name)
    ]
    before = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, replacements[name])
    try:
        yield
    finally:
        for (module, name), function in zip(places, before, strict=True):
            setattr(module, name, function)


def _delta_rule(outputs: Outputs) -> Callable[..., Any]:
    """Return the function of the gated delta rule, with the arguments of transformers'."""

    def replaced(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        use_qk_l2norm_in_kernel: bool = False,
        **_: object,
    ) -> tuple[Tensor, None]:
        if use_qk_l2norm_in_kernel:
            query, key = _normalized(query.float()), _normalized(key.float())
        found = outputs(
            Recurrence(
                _by_head(query) * query.shape[-1] ** -0.5,
                _by_head(key),
                _by_head(value),
                g[0].t().float(),
                beta[0].t().float(),
            )
        )
        return found.transpose(0, 1)[None].to(value.dtype), None

    return replaced


def _scan(outputs: Outputs) -> Callable[..., Any]:
    """Return the function of Mamba2, with the arguments of transformers'."""

    def replaced(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **_: object,
    ) -> Any:
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = F.softplus(dt) if dt_softplus else dt
        dt = torch.clamp(dt, *dt_limit).float()  # (1, S, H)
        states = hidden_states.float()  # (1, S, H, Dv)
        found = (
            outputs(
                Recurrence(
                    _by_head(C),
                    _by_head(B),
                    _by_head(states * dt[..., None]),
                    (dt[0] * A.float()).t(),
                )
            )
            .transpose(0, 1)[None]
            .contiguous()
        )
        if D is not None:
            found = found + states * D[..., None]
        return (found, None) if return_final_states else found

    return replaced


def _normalized(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + _EPSILON)


def _by_head(rows: Tensor) -> Tensor:
    """Return (H, S, D) in fp32 of (1, S, H, D)."""
    return rows[0].transpose(0, 1).float()


class PathRows:
    """The rows that nodes see, and the order among the new ones: the same for all layers."""

    def __init__(self, mask: Tensor, write_indices: Tensor) -> None:
        """mask: (1, 1, S, C) bool, of the forest. write_indices: (1,), first of the new rows."""
        self.mask = mask[0, 0]
        num_new, num_rows = self.mask.shape
        new, rows = torch.arange(num_new), torch.arange(num_rows)
        self.columns = write_indices + new  # (S,)
        self.sees_new = self.mask[:, self.columns].float()  # (S, S), itself included
        self.is_above = self.sees_new * (new[:, None] != new).float()
        is_old = rows < write_indices
        self.sees_old = self.mask & is_old
        last = torch.where(self.sees_old, rows, -1).amax(1)
        self.has_old, self.last_old = (last >= 0)[:, None], last.clamp(min=0)
        self.levels = [
            (
                (new[:, None] >> level + 1 == new >> level + 1)
                & (new[:, None] >> level > new >> level)
            ).float()
            for level in range(MOST_NEW_ROWS.bit_length() - 1)
        ]

    def summed_decay(self, past: Tensor, decay: Tensor) -> Tensor:
        """Return the logarithm of the decay along each path as two numbers, (H, S, 2).

        Two: their sum has the digits that the difference of two rows far down a path needs.
        past: (H, C, 2), of the rows before. decay: (H, S), of the new ones.
        """
        base = torch.where(self.has_old, past[:, self.last_old], torch.zeros(()))
        high, low = base[..., 0], base[..., 1]
        step = decay @ self.sees_new.t()
        total = high + step
        rounded = total - high
        lost = (high - (total - rounded)) + (step - rounded)
        return torch.stack([total, low + lost], dim=-1)

    def remaining(self, present: Tensor, new: Tensor) -> Tensor:
        """Return how much of each row is left at each node, (H, S, C); 0 of rows unseen.

        present: (H, C, 2), summed decays of all rows. new: (H, S, 2), of the new ones.
        """
        passed = (new[:, :, None, 0] - present[:, None, :, 0]) + (
            new[:, :, None, 1] - present[:, None, :, 1]
        )
        return torch.where(self.mask, passed, torch.full((), _HIDDEN)).exp()

    def solved(self, rate: Tensor, seen: Tensor, value: Tensor, past: Tensor) -> Tensor:
        """Return the deltas of the new rows, (H, S, Dv).

        rate: (H, S). seen: (H, S, C), products of keys times what remains. value: (H, S, Dv). past:
        (H, C, Dv), deltas of the rows before.
        """
        rate = rate[..., None]
        known = torch.where(self.sees_old, seen, torch.zeros(())) @ past
        system = rate * seen[:, :, self.columns] * self.is_above
        return _unit_lower_inverse(system, self.levels) @ (rate * (value - known))


def _unit_lower_inverse(system: Tensor, levels: list[Tensor]) -> Tensor:
    """Return (I + system)^-1 of strictly lower triangular systems, (H, S, S).

    By blocks of twice the size at each level: [[A, 0], [B, C]] has the inverse
    [[A', 0], [-C' B A', C']]. No power of the system is ever formed, which may overflow.
    """
    inverse = torch.eye(system.shape[-1]) - system * levels[0]
    for is_between in levels[1:]:
        inverse = inverse - inverse @ (system * is_between) @ inverse
    return inverse


def path_outputs(
    recurrence: Recurrence,
    rows: PathRows,
    past: Sequence[Tensor],
    scatter: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the outputs of the new rows of a layer, (H, S, Dv), and its cache with them.

    past: keys, deltas and decays of the cache, (1, heads, C, width) each.
    scatter: returns one of them with new rows, (1, heads, S, width).
    """
    past_keys, past_deltas, past_decays = past
    keys = scatter(past_keys, recurrence.key[None])
    decay = rows.summed_decay(past_decays[0], recurrence.decay)
    decays = scatter(past_decays, decay[None])
    remaining = rows.remaining(decays[0], decay)
    transposed = keys[0].transpose(1, 2)
    group = recurrence.value.shape[0] // keys.shape[1]

    def seen_by(vectors: Tensor) -> Tensor:
        """Return the products with all keys, times what remains, (H, S, C)."""
        return (vectors @ transposed).repeat_interleave(group, dim=0) * remaining

    delta = recurrence.value
    if recurrence.rate is not None:
        seen = seen_by(recurrence.key)
        delta = rows.solved(recurrence.rate, seen, recurrence.value, past_deltas[0])
    deltas = scatter(past_deltas, delta[None])
    return seen_by(recurrence.query) @ deltas[0], (keys, deltas, decays)
