"""Comparisons of a GPU with the CPU: bits by kind of way, distributions, gaps of near-ties."""

import numpy as np
import pytest

from dsbd_forward.forward import Forward, ForwardResult
from dsbd_forward.logits import DenseLogits, TopLogits
from dsbd_forward.spec import EngineSpec
from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.decoding.distribution import TokenDistribution
from dsbd_ort.decoding.warp import Warp
from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.engine.settings import EngineSettings
from dsbd_runtime.loading import load_causal_lm
from lab.gpu.kinds_of_ways import FIXED_ROWS, KINDS, count_by_kind
from lab.gpu.near_ties import distributions_along, gap_of, total_variation, trace_of, variations
from lab.gpu.parity import compare
from lab.gpu.report import BITS_COLUMNS
from scripts.path_ways import Way, WayCount, count_differing
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


class OneThreadDiffers:
    """An engine whose ways with one thread, but the plain one, have other bits in two places."""

    vocab_size = 7

    def __init__(self):
        self.ways = []

    def logits(self, token_ids, way, rng):
        found = np.repeat(token_ids[:, None], self.vocab_size, axis=1).astype(np.float32)
        if self.ways and way.threads == 1:
            found[-1, :2] = np.nextafter(found[-1, :2], np.float32(np.inf))
        self.ways.append(way)
        return found


def test_ways_and_logits_are_counted():
    engine = OneThreadDiffers()
    found = count_differing(engine, num_tokens=20, num_ways=10, seed=3)
    plain, *ways = engine.ways
    assert plain == Way.plain(20)
    num_other = sum(way.threads == 1 for way in ways)
    assert 0 < num_other < 10
    assert found == WayCount(10, num_other, 10 * 20 * 7, 2 * num_other)
    assert found + WayCount(1, 0, 5, 0) == WayCount(11, num_other, 1405, 2 * num_other)


PROMPT = [104, 105, 33]
EVERYTHING = Warp(temperature=1.0, top_k=0, top_p=1.0)


def distribution(probs_by_token):
    log_probs = np.log(list(probs_by_token.values()))
    return TokenDistribution(np.array(list(probs_by_token)), log_probs, log_probs)


DISTANCES = [  # distribution, other, total variation
    ({1: 0.5, 2: 0.5}, {1: 0.5, 2: 0.5}, 0.0),
    ({1: 0.75, 2: 0.25}, {2: 0.5, 1: 0.5}, 0.25),
    ({1: 1.0}, {2: 1.0}, 1.0),
    ({1: 0.5, 2: 0.25}, {1: 0.5, 2: 0.125}, 0.125),  # the rest has 0.25 and 0.375
]


def test_total_variation():
    for one, other, distance in DISTANCES:
        assert total_variation(distribution(one), distribution(other)) == pytest.approx(distance)


def test_distributions_do_not_depend_on_the_sizes_of_the_calls(tiny_bundle):
    with load_causal_lm(tiny_bundle, "target") as model:
        path = list(range(40, 60))
        in_calls = distributions_along(model, path, EVERYTHING)
        in_one = distributions_along(model, path, EVERYTHING, sizes=(20,))
    assert len(in_calls) == 20
    assert variations(in_calls, in_one).max() < 1e-6


def config(width, strategy="beam-sample"):
    return DecodingConfig(
        strategy=strategy, num_beams=width, num_return_sequences=width, top_k=0, max_new_tokens=5
    )


def test_the_gap_of_the_next_best_candidate_is_what_its_draw_missed_by(tiny_bundle):
    with load_causal_lm(tiny_bundle, "target") as model:
        narrow, wide = (trace_of(model, PROMPT, config(width), 7) for width in (1, 2))
        kept, missed = sorted(wide.layers[0], key=lambda beam: beam not in narrow.layers[0])
        assert narrow.best[:1] == kept
        missed_by = gap_of(model, PROMPT, config(1), 7, narrow, missed * 5)
        third = next((t,) for t in range(256) if (t,) not in wide.layers[0])
        third_by = gap_of(model, PROMPT, config(1), 7, narrow, third * 5)
    assert 0 < missed_by < third_by


def test_a_final_beam_that_is_not_the_best_differs_by_rank_alone(tiny_bundle):
    with load_causal_lm(tiny_bundle, "target") as model:
        trace = trace_of(model, PROMPT, config(3), 7)
        second = sorted(trace.scores, key=trace.scores.__getitem__)[-2]
        gap = gap_of(model, PROMPT, config(3), 7, trace, second)
    assert gap == trace.scores[trace.best] - trace.scores[second] > 0


def test_a_candidate_beyond_top_k_is_infinitely_far(tiny_bundle):
    few = DecodingConfig(strategy="beam-sample", num_beams=1, top_k=2, max_new_tokens=3)
    with load_causal_lm(tiny_bundle, "target") as model:
        trace = trace_of(model, PROMPT, few, 7)
        known = distributions_along(model, PROMPT, Warp(1.0, 2, 1.0))[-1].tokens
        other = next(token for token in range(256) if token not in known)
        assert gap_of(model, PROMPT, few, 7, trace, (other,) * 3) == np.inf


def test_a_provider_that_is_the_reference_agrees_with_it(tiny_bundle):
    parity = compare(tiny_bundle, "cpu", ["def f(x):"], 6)
    assert (parity.num_identical, parity.num_compared, parity.gaps) == (6, 6, [])
    assert parity.max_variation == 0 and parity.is_within_limits
    assert parity.num_distributions == len("def f(x):") + 6
