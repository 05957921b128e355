"""Calls of an engine of any head, and whether two of its answers are the same."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsbd_forward.engine import Engine
from dsbd_forward.forward import Forward
from dsbd_forward.logits import DenseLogits
from dsbd_runtime.engine.causal_lm import CausalLM
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.ort.ort_session import OrtSession
from dsbd_runtime.parts.part import Call
from tests.runtime.reference import ancestor_mask
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
    logits = result.logits
    return (logits.values if isinstance(logits, DenseLogits) else logits), result.features


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
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    seen = np.ones((num_new, model.num_rows), np.bool_)
    mask = np.concatenate([seen, ancestor_mask(parents)], axis=1)
    positions = model.num_rows + np.array(depths)
    return logits_of(model, np.arange(num_new) + 3, positions, mask, np.array([num_new - 1, 0]))


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
