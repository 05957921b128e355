"""Logits through ONNX Runtime and the cache equal the plain numpy model, whatever the forest."""

import numpy as np
import pytest

from tests.runtime.model_calls import ancestor_mask, logits_of, reference_logits, tiny_engine
from tests.runtime.tiny_graph import TinyModel

TOLERANCE = {"fp32": 2e-5, "fp16": 3e-2}


class Forest:
    """Steps a model over a growing tree and keeps what the reference needs to say the same."""

    def __init__(self, tiny, model):
        self.tiny, self.model = tiny, model
        self.token_ids = []
        self.parents = []

    def grow(self, token_ids, parents, logit_rows):
        """Append rows whose parents are rows of the cache, then compare their logits."""
        first = len(self.token_ids)
        self.token_ids += token_ids
        self.parents += parents
        tokens, positions, mask = self._arrays()
        asked = np.array(logit_rows, np.int64)
        found = logits_of(self.model, tokens[first:], positions[first:], mask[first:], asked)
        wanted = reference_logits(self.tiny, tokens, positions, mask)[first:][logit_rows]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted, atol=TOLERANCE[self.tiny.dtype])
        assert self.model.num_rows == len(self.token_ids)

    def keep(self, rows):
        """Keep rows that hold their ancestors."""
        self.model.keep(np.array(rows, np.int64))
        self.token_ids = [self.token_ids[row] for row in rows]
        self.parents = [
            rows.index(self.parents[row]) if self.parents[row] >= 0 else -1 for row in rows
        ]
        assert self.model.num_rows == len(rows)

    def with_ancestors(self, rows):
        mask = self._arrays()[2]
        return [int(row) for row in np.flatnonzero(mask[rows].any(axis=0))]

    def _arrays(self):
        mask = ancestor_mask(self.parents)
        positions = mask.sum(axis=1).astype(np.int64) - 1
        return np.array(self.token_ids, np.int64), positions, mask


def chain(num_rows, *, first=0, seed=0):
    """Return random tokens and parents, each row's parent the row before."""
    tokens = np.random.default_rng(seed).integers(0, 256, num_rows)
    return tokens.tolist(), [first + row - 1 for row in range(num_rows)]


MODELS = {
    "fp32": TinyModel(),
    "fp16": TinyModel(dtype="fp16"),
    "sliding": TinyModel(sliding_window=5),
    "one head": TinyModel(num_layers=1, num_heads=1, num_kv_heads=1),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("tiny", MODELS.values(), ids=MODELS.keys())
def test_random_forests_give_the_reference_logits(seed, tiny, tmp_path):
    rng = np.random.default_rng(seed)
    with tiny_engine(tiny, tmp_path / "model.onnx") as model:
        forest = Forest(tiny, model)
        forest.grow(*chain(20, seed=seed), logit_rows=[19])
        for _ in range(12):
            first, num_new = len(forest.token_ids), int(rng.integers(1, 30))
            parents = [int(rng.integers(max(0, first - 4), first + row)) for row in range(num_new)]
            logit_rows = rng.permutation(num_new)[: rng.integers(0, num_new + 1)].tolist()
            forest.grow(rng.integers(0, 256, num_new).tolist(), parents, logit_rows)
            leaves = rng.integers(0, len(forest.token_ids), 6).tolist()
            forest.keep(forest.with_ancestors(leaves))


def test_a_long_prompt_in_chunks_gives_the_reference_logits(tmp_path):
    tiny = TinyModel(num_layers=2, sliding_window=300)
    with tiny_engine(tiny, tmp_path / "model.onnx") as model:
        forest = Forest(tiny, model)
        forest.grow(*chain(3), logit_rows=[2])
        forest.grow(*chain(1500, first=3), logit_rows=[1499, 0, 255, 256, 700])
        forest.grow(*chain(2, first=1503), logit_rows=[0, 1])
        forest.grow(*chain(300, first=1505), logit_rows=[])
        forest.grow(*chain(1, first=1805), logit_rows=[0])


def test_logits_are_the_callers_own(tmp_path):
    tiny = TinyModel()
    with tiny_engine(tiny, tmp_path / "model.onnx") as model:
        row = (np.array([1]), np.array([0]), np.ones((1, 1), np.bool_), np.array([0]))
        first = logits_of(model, *row)
        copy = first.copy()
        model.keep(np.array([], np.int64))
        logits_of(model, np.array([2]), *row[1:])
        np.testing.assert_array_equal(first, copy)
        assert first.flags.owndata
