"""Ways to compute a path: what each kind holds fixed, seen on models that depend on it."""

from __future__ import annotations

import numpy as np
import pytest

from dsbd_forward.forward import Forward, ForwardResult
from dsbd_forward.logits import DenseLogits, TopLogits
from dsbd_forward.spec import EngineSpec
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.loading import load_causal_lm
from lab.gpu.kinds_of_ways import FIXED_ROWS, KINDS, count_by_kind
from lab.gpu.report import BITS_COLUMNS
from scripts.path_ways import WayCount
from tests.runtime.fake_device import open_on_fake
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle

AGAIN, ANY, FIXED_ROWS_ONLY, FIXED = names = tuple(kind.name for kind in KINDS)
NUM_WAYS = 15


class PathModel:
    """Logits that are a function of the visible tokens and their positions, and of one thing more.

    shift: returns what is added to a row's logits, by its forward and the cache rows it sees.
    """

    spec = EngineSpec(vocab_size=50)

    def __init__(self, shift):
        self.shift = shift
        self.tokens, self.positions = np.arange(0), np.arange(0)

    @property
    def num_rows(self):
        return len(self.tokens)

    def forward(self, forward: Forward) -> ForwardResult:
        token_ids, positions = forward.token_ids, forward.positions
        self.tokens = np.concatenate([self.tokens, token_ids])
        self.positions = np.concatenate([self.positions, positions])
        found = []
        for row in forward.logit_rows:
            seen = np.flatnonzero(forward.mask[row])
            by_position = np.argsort(self.positions[seen])
            assert self.positions[seen][by_position].tolist() == list(range(positions[row] + 1))
            weights = 1 + np.arange(len(seen))
            value = float(self.tokens[seen][by_position] @ weights) + self.shift(token_ids, seen)
            found.append(np.full(self.spec.vocab_size, value, np.float32))
        return ForwardResult(DenseLogits(np.array(found)))

    def keep(self, rows):
        self.tokens, self.positions = self.tokens[rows], self.positions[rows]


SHIFTS = {  # name: (shift, kinds of which ways must differ)
    "none": (lambda tokens, seen: 0, ()),
    "rows of the call": (lambda tokens, seen: len(tokens), (ANY,)),
    "more rows than fixed": (lambda tokens, seen: float(len(tokens) > FIXED_ROWS), (ANY,)),
    "places": (lambda tokens, seen: float(seen.max() + 1 - len(seen)), (ANY, FIXED_ROWS_ONLY)),
    "neighbours": (lambda tokens, seen: float(tokens.sum()), (ANY, FIXED_ROWS_ONLY, FIXED)),
}


@pytest.mark.parametrize("name", SHIFTS)
def test_a_kind_differs_by_what_it_leaves_free(name):
    shift, differing = SHIFTS[name]
    found = count_by_kind(PathModel(shift), num_ways=NUM_WAYS)
    assert {kind for kind, count in found.items() if count.num_other_ways} == set(differing)
    for count in found.values():
        assert (count.num_ways, count.num_logits) == (NUM_WAYS, NUM_WAYS * 60 * 50)


def test_the_same_calls_differ_on_an_engine_that_does_not_repeat_itself():
    rng = np.random.default_rng(0)
    found = count_by_kind(PathModel(lambda tokens, seen: rng.random() < 0.01), num_ways=NUM_WAYS)
    assert found[AGAIN].num_other_ways > 0


def test_the_table_has_the_kinds():
    assert BITS_COLUMNS[1:] == names


@pytest.mark.parametrize("logits", ["full", "topk:5"])
@pytest.mark.parametrize("is_on_device", [False, True])
def test_engines_with_fixed_rows_and_places(tmp_path, logits, is_on_device):
    """ONNX Runtime on the CPU: calls of one size with rows at their places repeat every bit."""
    write_tiny_bundle(tmp_path / "bundle", target=TinyModel(logits=logits))
    bundle = open_bundle(tmp_path / "bundle")
    if is_on_device:
        model = open_on_fake(bundle, is_poisoned=True).model
    else:
        model = load_causal_lm(bundle, "target", settings=EngineSettings(num_threads=1))
    with model:
        one = np.arange(1)
        found = model.forward(Forward(one, one, np.ones((1, 1), np.bool_), one)).logits
        width = 2 * 5 + 1 if isinstance(found, TopLogits) else model.spec.vocab_size
        found = count_by_kind(model, num_ways=NUM_WAYS)
    nothing = WayCount(NUM_WAYS, 0, NUM_WAYS * 60 * width, 0)
    assert found[AGAIN] == found[FIXED] == nothing
    assert found[ANY].num_other_ways > 0
