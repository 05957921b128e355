"""Recurrent layers over the paths of a forest (docs/algorithm.md 3.11).

A recurrent layer changes a matrix at every token: the matrix decays by exp(g), and the token adds
the product of its key k and a delta u. In a forest the matrix S is stored only at *checkpoints*,
ancestors that many nodes share. Every node after a checkpoint is a row, as in attention: its key,
its delta and the logarithm G of the decay along its path. Let c be the checkpoint of node i (S_c is
zero if it has none), and A(i) the ancestors of i after c. Then

    u_i = rate_i (v_i - exp(G_i - G_c) S_c' k_i - sum_{j in A(i)} exp(G_i - G_j) (k_i . k_j) u_j)
    o_i = exp(G_i - G_c) S_c' q_i + sum_{j in A(i) and i} exp(G_i - G_j) (q_i . k_j) u_j

is the gated delta rule; with u_i = v_i it is Mamba2. Outputs are products over rows under the
forest's mask. The deltas of one call solve a triangular system, because parents precede children.
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
"""Maximum number of new rows in a call, which the levels of ``_unit_lower_inverse`` cover."""

_HIDDEN = -1e4  # its exponential is 0
_EPSILON = 1e-6  # epsilon of transformers' norm of queries and keys


@dataclass(frozen=True)
class Recurrence:
    """Inputs of a layer with a recurrent state for S tokens, in fp32."""

    # query, key: (Hk, S, Dk); each of their heads serves H / Hk heads of ``value``
    query: Tensor
    key: Tensor
    value: Tensor  # (H, S, Dv)
    decay: Tensor  # (H, S). The logarithm g of each token's decay, not above 0.
    rate: Tensor | None = None  # (H, S), rate of the delta rule; None: deltas are the values


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
    """Return a replacement for transformers' function of the gated delta rule."""

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
        result = outputs(
            Recurrence(
                _by_head(query) * query.shape[-1] ** -0.5,
                _by_head(key),
                _by_head(value),
                g[0].t().float(),
                beta[0].t().float(),
            )
        )
        return result.transpose(0, 1)[None].to(value.dtype), None

    return replaced


def _scan(outputs: Outputs) -> Callable[..., Any]:
    """Return a replacement for transformers' function of Mamba2."""

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
        result = (
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
            result = result + states * D[..., None]
        return (result, None) if return_final_states else result

    return replaced


def _normalized(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + _EPSILON)


def _by_head(rows: Tensor) -> Tensor:
    """Return rows (1, S, H, D) as (H, S, D) in fp32."""
    return rows[0].transpose(0, 1).float()


@dataclass(frozen=True)
class Checkpoints:
    """Which of B checkpoints each new row continues from; the same for all layers.

    If rows 0 and 2 continue from the first checkpoint and row 1 from the second, ``rows`` is
    [[0, 2], [1, 0]] (the last entry is padding). Flattened to [0, 2, 1, 0], it has rows 0, 1 and 2
    at the places [0, 2, 1].
    """

    rows: Tensor  # (B, L) int64. The new rows after each checkpoint, padded with any row.
    places: Tensor  # (S,) int64. Index of each new row in the flattened ``rows``.

    def read(self, states: Tensor, vectors: Tensor) -> Tensor:
        """Return the products of each new row's N vectors with its checkpoint, (N, H, S, Dv).

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
        """Return the decay at each new row's checkpoint, (H, S, 2), from decays (B, H, 2)."""
        return decays[self.places // self.rows.shape[1]].transpose(0, 1)


class PathRows:
    """Recent rows that nodes see, and the order of the new rows; the same for all layers."""

    def __init__(self, mask: Tensor, write_indices: Tensor, checkpoints: Checkpoints) -> None:
        """Take which rows after its checkpoint each node sees, (S, M) bool, and the first new row.

        write_indices: (1,) int64, the first new row.
        """
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

        One number would have too few digits for the difference of two rows far down a path.

        past: (H, M, 2), of the old rows. begun: (H, S, 2), at the checkpoints. decay: (H, S).
        """
        base = torch.where(self.has_old, past[:, self.last_old], begun)
        high, low = base[..., 0], base[..., 1]
        step = decay @ self.sees_new.t()
        total = high + step
        rounded = total - high
        lost = (high - (total - rounded)) + (step - rounded)
        return torch.stack([total, low + lost], dim=-1)

    def remaining(self, present: Tensor, new: Tensor) -> Tensor:
        """Return the share of each row that remains at each node, (H, S, M); 0 for unseen rows.

        present: (H, M, 2), summed decays of all rows. new: (H, S, 2), those of the new rows.
        """
        passed = _passed(present[:, None], new[:, :, None])
        return torch.where(self.mask, passed, torch.full((), _HIDDEN)).exp()

    def solved(self, rate: Tensor, seen: Tensor, wanted: Tensor, past: Tensor) -> Tensor:
        """Return the deltas of the new rows, (H, S, Dv).

        rate: (H, S). seen: (H, S, M), products of keys times remaining shares. wanted: (H, S, Dv),
        values minus the values that the checkpoints predict. past: (H, M, Dv), deltas of the old
        rows.
        """
        rate = rate[..., None]
        from_old_rows = torch.where(self.sees_old, seen, torch.zeros(())) @ past
        system = rate * seen[:, :, self.columns] * self.is_above
        return _unit_lower_inverse(system, self.levels) @ (rate * (wanted - from_old_rows))


def _passed(before: Tensor, after: Tensor) -> Tensor:
    """Return the logarithm of the decay between rows; both are (..., 2), the sum of two numbers."""
    return (after[..., 0] - before[..., 0]) + (after[..., 1] - before[..., 1])


def _unit_lower_inverse(system: Tensor, levels: list[Tensor]) -> Tensor:
    """Return (I + system)^-1 for strictly lower triangular systems, (H, S, S), block by block."""
    inverse = torch.eye(system.shape[-1]) - system * levels[0]
    for is_between in levels[1:]:
        inverse = inverse - inverse @ (system * is_between) @ inverse
    return inverse


@dataclass(frozen=True)
class PastRows:
    """Rows and states of a recurrent layer before a call."""

    rows: Sequence[Tensor]  # (1, heads, M, width) each: keys, deltas, decays of the recent rows
    # states, decays: (B, H, Dk, Dv) and (B, H, 2), of the checkpoints
    states: Tensor
    decays: Tensor


def path_outputs(
    recurrence: Recurrence,
    rows: PathRows,
    past: PastRows,
    scatter: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the outputs of a layer's new rows, (H, S, Dv), and the layer's rows with the new ones.

    scatter: takes rows of one kind and new rows, (1, heads, S, width); returns all rows.
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
        """Return the products with all keys, times the remaining shares, (H, S, M)."""
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
