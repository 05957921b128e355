"""Recurrent layers over the paths of a forest (docs/algorithm.md 3.11).

A recurrent layer changes a matrix at every token: it decays by exp(g), and the token writes into it
a delta u by a key k. In a forest the matrix S is kept at *checkpoints* alone, ancestors that many
nodes share. Every node after one is a row, as in attention, of its key, its delta and the logarithm
G of the decay along its path. With c the checkpoint of i, the matrix of zeros if it has none, and
A(i) the ancestors of i after it,

    u_i = rate_i (v_i - exp(G_i - G_c) S_c' k_i - sum_{j in A(i)} exp(G_i - G_j) (k_i . k_j) u_j)
    o_i = exp(G_i - G_c) S_c' q_i + sum_{j in A(i) and i} exp(G_i - G_j) (q_i . k_j) u_j

is the gated delta rule, and with u_i = v_i Mamba2. Outputs are products over rows under the
forest's own mask. The deltas of one call are the solution of a triangular system, since parents
stand before children.
"""

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
    """Inputs of a layer with a recurrent state for S tokens, in fp32."""

    # query, key: (Hk, S, Dk); each of their heads serves as many as the next one
    query: Tensor
    key: Tensor
    value: Tensor  # (H, S, Dv)
    decay: Tensor  # (H, S). The logarithm g of each token's decay, not above 0.
    rate: Tensor | None = None  # (H, S) of the delta rule; None: deltas are the values


Outputs = Callable[[Recurrence], Tensor]
"""Returns the outputs of a recurrence, (H, S, Dv)."""


@contextlib.contextmanager
def replaced_recurrences(model: nn.Module, outputs: Outputs) -> Iterator[None]:
    """Replace the recurrences of a model of transformers by ``outputs``."""
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


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints, of B, that the new rows continue from: the same for all layers.

    Two of them with the rows 0 and 2, and 1, are the rows [[0, 2], [1, 0]] at the places [0, 2, 1]
    of these, read one after the other.
    """

    rows: Tensor  # (B, L) int64. The new rows after each, filled up with any others.
    places: Tensor  # (S,) int64. Where each new row stands in ``rows``.

    def read(self, states: Tensor, vectors: Tensor) -> Tensor:
        """Return the products of N vectors of each new row with its checkpoint, (N, H, S, Dv).

        states: (B, H, Dk, Dv). vectors: (N, Hk, S, Dk).
        """
        num_kinds, num_key_heads, _, width = vectors.shape
        num_checkpoints, num_rows = self.rows.shape
        num_heads = states.shape[1]
        of_each = vectors[:, :, self.rows].permute(2, 1, 0, 3, 4)  # (B, Hk, N, L, Dk)
        of_each = of_each.reshape(
            num_checkpoints, num_key_heads, 1, num_kinds * num_rows, width
        ).expand(-1, -1, num_heads // num_key_heads, -1, -1)
        read = of_each.flatten(1, 2) @ states  # (B, H, N L, Dv)
        read = read.reshape(num_checkpoints, num_heads, num_kinds, num_rows, states.shape[-1])
        return read.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, self.places]

    def decays(self, decays: Tensor) -> Tensor:
        """Return the decay at the checkpoint of each new row, (H, S, 2), of (B, H, 2)."""
        return decays[self.places // self.rows.shape[1]].transpose(0, 1)


class PathRows:
    """The recent rows that nodes see, and the order among the new ones: the same for all layers."""

    def __init__(self, mask: Tensor, write_indices: Tensor, checkpoints: Checkpoints) -> None:
        """Take the rows seen after the checkpoints, (S, M) bool, and the first new row, (1,)."""
        self.mask = mask
        self.checkpoints = checkpoints
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

    def summed_decay(self, past: Tensor, begun: Tensor, decay: Tensor) -> Tensor:
        """Return the logarithm of the decay along each path as two numbers, (H, S, 2).

        Two: their sum has the digits that the difference of two rows far down a path needs.
        past: (H, M, 2), of the rows before. begun: (H, S, 2), at the checkpoints. decay: (H, S).
        """
        base = torch.where(self.has_old, past[:, self.last_old], begun)
        high, low = base[..., 0], base[..., 1]
        step = decay @ self.sees_new.t()
        total = high + step
        rounded = total - high
        lost = (high - (total - rounded)) + (step - rounded)
        return torch.stack([total, low + lost], dim=-1)

    def remaining(self, present: Tensor, new: Tensor) -> Tensor:
        """Return how much of each row is left at each node, (H, S, M); 0 of rows unseen.

        present: (H, M, 2), summed decays of all rows. new: (H, S, 2), of the new ones.
        """
        passed = _passed(present[:, None], new[:, :, None])
        return torch.where(self.mask, passed, torch.full((), _HIDDEN)).exp()

    def solved(self, rate: Tensor, seen: Tensor, wanted: Tensor, past: Tensor) -> Tensor:
        """Return the deltas of the new rows, (H, S, Dv).

        rate: (H, S). seen: (H, S, M), products of keys times what remains. wanted: (H, S, Dv),
        values without what checkpoints hold of them. past: (H, M, Dv), deltas of the rows before.
        """
        rate = rate[..., None]
        known = torch.where(self.sees_old, seen, torch.zeros(())) @ past
        system = rate * seen[:, :, self.columns] * self.is_above
        return _unit_lower_inverse(system, self.levels) @ (rate * (wanted - known))


def _passed(before: Tensor, after: Tensor) -> Tensor:
    """Return the logarithm of the decay between rows; both are (..., 2), the sum of two numbers."""
    return (after[..., 0] - before[..., 0]) + (after[..., 1] - before[..., 1])


def _unit_lower_inverse(system: Tensor, levels: list[Tensor]) -> Tensor:
    """Return (I + system)^-1 of strictly lower triangular systems, (H, S, S), by growing blocks."""
    inverse = torch.eye(system.shape[-1]) - system * levels[0]
    for is_between in levels[1:]:
        inverse = inverse - inverse @ (system * is_between) @ inverse
    return inverse


@dataclass(frozen=True)
class PastRows:
    """Rows and states of a recurrent layer before a call."""

    rows: Sequence[Tensor]  # keys, deltas and decays of the recent rows, (1, heads, M, width) each
    # states, decays: (B, H, Dk, Dv) and (B, H, 2), of the checkpoints
    states: Tensor
    decays: Tensor


def path_outputs(
    recurrence: Recurrence,
    rows: PathRows,
    past: PastRows,
    scatter: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the outputs of the new rows of a layer, (H, S, Dv), and its rows with them.

    scatter: returns one of the kinds of rows with new ones, (1, heads, S, width).
    """
    past_keys, past_deltas, past_decays = past.rows
    keys = scatter(past_keys, recurrence.key[None])
    begun = rows.checkpoints.decays(past.decays)
    decay = rows.summed_decay(past_decays[0], begun, recurrence.decay)
    decays = scatter(past_decays, decay[None])
    remaining = rows.remaining(decays[0], decay)
    transposed = keys[0].transpose(1, 2)
    group = recurrence.value.shape[0] // keys.shape[1]

    def seen_by(vectors: Tensor) -> Tensor:
        """Return the products with all keys, times what remains, (H, S, M)."""
        return (vectors @ transposed).repeat_interleave(group, dim=0) * remaining

    is_solved = recurrence.rate is not None
    readers = [recurrence.query, *([recurrence.key] if is_solved else [])]
    read = rows.checkpoints.read(past.states, torch.stack(readers))
    read = read * _passed(begun, decay).exp()[..., None]  # (N, H, S, Dv)
    delta = recurrence.value
    if recurrence.rate is not None:
        seen = seen_by(recurrence.key)
        delta = rows.solved(recurrence.rate, seen, recurrence.value - read[1], past_deltas[0])
    deltas = scatter(past_deltas, delta[None])
    return read[0] + seen_by(recurrence.query) @ deltas[0], (keys, deltas, decays)
