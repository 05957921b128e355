"""Calls of a tiny engine of any head, and the same in plain numpy: all rows at once, no cache."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.engine import Engine
from dsbd_forward.forward import Forward, ForwardResult
from dsbd_forward.logits import DenseLogits
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.ort.ort_session import OrtSession
from dsbd_runtime.parts.part import Call
from tests.runtime.tiny_graph import TinyModel, write_engine
from tests.runtime.tiny_tokenizer import VOCAB_SIZE

ONE_THREAD = EngineSettings(num_threads=1)


def logits_of(model: Engine, *arrays: Any, **wanted: Any) -> Any:
    """Make the forward of these fields; return its logits, an array where they are all."""
    return logits_and_features(model, *arrays, **wanted)[0]


def prefix_and_tree() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the fields of two forwards: 11 rows, and five nodes of a tree after them."""
    prefix = (np.arange(11) + 20, np.arange(11), np.tri(11, dtype=np.bool_), np.arange(11))
    parents = [-1, -1, 0, 0, 2]
    mask = np.ones((5, 16), np.bool_)
    mask[:, 11:] = False
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node, 11:] = mask[parent, 11:]
        mask[node, 11 + node] = True
    return prefix, (np.array([5, 6, 7, 8, 9]), np.array([11, 11, 12, 12, 13]), mask, np.arange(5))


def logits_and_features(model: Engine, *arrays: Any, **wanted: Any) -> tuple[Any, Any]:
    """Make the forward of these fields; return what ``logits_of`` does, and its features."""
    result = model.forward(Forward(*arrays, **wanted))
    return logits_in(result), result.features


def logits_in(result: ForwardResult) -> Any:
    return result.logits.values if isinstance(result.logits, DenseLogits) else result.logits


def engine_inputs(
    token_ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    masks: dict[str, NDArray[np.bool_]],
    first_row: int,
    logit_rows: NDArray[np.int64],
) -> Call:
    """Return one engine call of a mask, that of all layers."""
    (mask,) = masks.values()
    return Call(Forward(token_ids, positions, mask, logit_rows), first_row)


def chain(num_rows: int, first: int = 0) -> tuple[NDArray[Any], ...]:
    """Return tokens, positions and mask of rows that follow ``first`` others, in a chain."""
    rows = np.arange(first, first + num_rows)
    return rows * 7 % 250, rows, np.arange(first + num_rows) <= rows[:, None]


def tiny_session(model: TinyModel, path: Path) -> OrtSession:
    """Write a tiny model to a file; return its session, of one thread."""
    write_engine(model, path)
    return OrtSession(path, model.entry(), settings=ONE_THREAD)


def tiny_engine(model: TinyModel, path: Path) -> CausalLM:
    """Write a tiny model to a file; return it opened."""
    return CausalLM(tiny_session(model, path), model.entry())


def append_chain(model: CausalLM, num_new: int, logit_rows: NDArray[np.int64]) -> Any:
    return logits_of(model, *chain(num_new, model.num_rows), logit_rows)


def append_forest(model: CausalLM, parents: list[int]) -> Any:
    """Append nodes below all rows of the cache; ask for the logits of the last and the first."""
    num_new = len(parents)
    asked = np.array([num_new - 1, 0])
    return logits_in(model.forward(forest_forward(model, parents, np.arange(num_new) + 3, asked)))


def forest_forward(
    model: CausalLM, parents: list[int], token_ids: NDArray[np.int64], logit_rows: NDArray[np.int64]
) -> Forward:
    """Return a forward of nodes below all rows of the cache."""
    seen = np.ones((len(parents), model.num_rows), np.bool_)
    mask = np.concatenate([seen, ancestor_mask(parents)], axis=1)
    return Forward(token_ids, mask.sum(axis=1) - 1, mask, logit_rows)


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, np.ndarray):
        np.testing.assert_allclose(found, wanted, atol=2e-5)
        return
    np.testing.assert_array_equal(found.top_ids, wanted.top_ids)
    np.testing.assert_allclose(found.top_logits, wanted.top_logits, atol=2e-5)
    np.testing.assert_allclose(found.logsumexp, wanted.logsumexp, atol=2e-5)
    if wanted.full is None:
        assert found.full is None
        return
    rows = np.arange(len(wanted.top_ids))[::-1]
    np.testing.assert_allclose(found.full.read(rows), wanted.full.read(rows), atol=2e-5)
    tokens = wanted.full.read_tokens(rows, rows % VOCAB_SIZE)
    np.testing.assert_allclose(found.full.read_tokens(rows, rows % VOCAB_SIZE), tokens, atol=2e-5)


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


def opened_in(folder: Path, model: TinyModel) -> CausalLM:
    """Write a tiny model to a new file of a folder; return it opened."""
    return tiny_engine(model, folder / f"{len(list(folder.iterdir()))}.onnx")
