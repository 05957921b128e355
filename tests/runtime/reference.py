"""The tiny model in plain numpy: all rows at once, no cache."""

import numpy as np
from numpy.typing import NDArray

from tests.runtime.tiny_graph import TinyModel


def reference_logits(
    model: TinyModel,
    token_ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    mask: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Return the logits (N, vocab_size) of N rows of which row n sees the rows of mask[n]."""
    head = model.weights()["head"].astype(np.float64)
    return reference_rows(model, token_ids, positions, mask)[-1] @ head


def reference_rows(
    model: TinyModel,
    token_ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    mask: NDArray[np.bool_],
    added: NDArray[np.float64] | float = 0.0,
) -> list[NDArray[np.float64]]:
    """Return the rows (N, width) that enter each layer, and those that leave the last.

    added: (N, width) to the embeddings.
    """
    w = {name: weight.astype(np.float64) for name, weight in model.weights().items()}
    x = w["tokens"][token_ids] + w["positions"][positions] + added  # (N, width)
    rows = [x]
    for layer in range(model.num_layers):
        sees = mask
        if model.is_sliding(layer):
            assert model.sliding_window is not None
            sees = mask & (positions[:, None] - positions[None] < model.sliding_window)
        query, key, value = (
            np.moveaxis((x @ w[f"{part}.{layer}"]).reshape(len(x), -1, model.head_dim), 0, 1)
            for part in ("query", "key", "value")
        )  # (heads, N, head_dim)
        group = model.num_heads // model.num_kv_heads
        key, value = np.repeat(key, group, axis=0), np.repeat(value, group, axis=0)
        scores = query @ np.swapaxes(key, 1, 2) / np.sqrt(model.head_dim)  # (heads, N, N)
        scores = np.where(sees, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        seen = np.moveaxis(weights @ value, 0, 1).reshape(len(x), -1)  # (N, width)
        x = x + seen @ w[f"out.{layer}"]
        rows.append(x)
    return rows


def ancestor_mask(parents: list[int]) -> NDArray[np.bool_]:
    """Return (N, N) bool: row n sees itself and its ancestors; -1 is "no parent".

    The parents [-1, 0, 0, 2] (a root, two children, one grandchild) give
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]].
    """
    mask = np.eye(len(parents), dtype=np.bool_)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] |= mask[parent]
    return mask
