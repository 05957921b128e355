"""Rows of a cache: each call reads its own; unused rows are dropped; nodes without a row."""

import dataclasses
import gc
import tracemalloc
from functools import partial

import numpy as np
import pytest

from dsbd_forward.forward import Forward
from dsbd_forward.logits import TopLogits
from dsbd_forward.spec import MemorySpec
from dsbd_ort.decoding import DecodingConfig, TableModel, WithResult, decode_iterations
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.cache_view import CacheView
from dsbd_ort.decoding.engine_call import EngineCall, Meter
from dsbd_ort.decoding.forest import NO_NODE, NOT_COMPUTED, Forest
from dsbd_ort.decoding.kv_cache import MOST_UNUSED_ROWS, PrefixCache, SharedKVCache
from tests.decoding.tables import (
    all_tokens,
    decoded,
    decoded_next,
    mixed_table,
    prefix_of,
    random_table,
    request_on,
    run,
)
from tests.decoding.top_table import TopTable

VOCAB = 6
TABLE = random_table(3, VOCAB)


def results_of_calls(num_logit_rows: list[int], *, keeps_full: bool = True) -> list[TopLogits]:
    """Make a call for every view: a chain of so many rows, all with logits, in one forward."""
    cache = SharedKVCache(TopTable(VOCAB, TABLE, 4, keeps_full=keeps_full))
    calls = []
    for token, num_rows in enumerate(num_logit_rows):
        view = CacheView(cache, PrefixCache())
        forward_at = partial(chain, view, token, num_rows)
        calls.append(EngineCall("target", Meter(), num_rows, forward_at))
    return [result.logits for result in cache.forward(calls)]


def chain(view: CacheView, first_token: int, num_rows: int, first_row: int) -> Forward:
    rows = np.arange(num_rows)
    mask = view.append(rows, first_row)  # the slot of each one's parent is its number
    return Forward(rows + first_token, rows, mask, rows)


def test_every_call_reads_its_own_rows() -> None:
    whole = results_of_calls([2, 1, 3])
    parts = results_of_calls([2, 0, 3])
    for part, full in zip(parts, (whole[0].full, None, whole[2].full), strict=True):
        rows = np.arange(len(part.top_ids))[::-1]
        found = part.full.read(rows)
        assert found.shape == (len(rows), VOCAB)
        if full is not None:
            np.testing.assert_array_equal(found, full.read(rows))
            np.testing.assert_array_equal(found.max(axis=1), part.top_logits[rows, 0])
            best = part.full.read_tokens(rows, part.top_ids[rows, 0])
            np.testing.assert_array_equal(best, part.top_logits[rows, 0])


@pytest.mark.parametrize(("kept", "most_unused"), [("attention rows", 164), ("recurrent rows", 64)])
def test_unused_rows_are_dropped_sooner_where_rows_are_folded(kept: str, most_unused: int) -> None:
    """A quarter of those in use may stay, except if a fold waits for them."""
    model = TopTable(VOCAB, TABLE, 4, keeps_full=True)
    memory = MemorySpec(kept=frozenset(["attention rows", kept]))
    model.spec = dataclasses.replace(model.spec, memory=memory)
    cache = SharedKVCache(model)
    view = CacheView(cache, PrefixCache())

    def call(num_rows: int) -> None:
        forward_at = partial(chain, view, 0, num_rows)
        cache.forward([EngineCall("target", Meter(), num_rows, forward_at)])

    call(400)
    for _ in range(300):
        kept_slots = np.arange(1, view.num_slots)
        call(1)
        view.keep(kept_slots)
        assert model.num_rows <= 400 + most_unused + 2
    assert model.num_rows > 400 + most_unused // 2


TARGET = random_table(1, VOCAB)
DRAFT = mixed_table(TARGET, random_table(2, VOCAB), 0.7)
EOS = 5
PROMPT = (1, 2, 3, 4)
LENGTH = 80

REQUESTS = [  # (strategy, further options, what must return the same)
    ("dsbd", {"num_beams": 4, "width_policy": "fixed"}, "beam-sample"),
    ("dsbd", {"num_beams": 2, "draft_beams": (8, 6, 2)}, None),
    ("dsbd", {"num_beams": 3, "coupling": "rejection"}, None),
    ("speculative-beam-search", {"num_beams": 3}, "beam-search"),
    ("speculative", {}, "sample"),
]


@pytest.mark.parametrize(("strategy", "options", "baseline"), REQUESTS)
def test_rows_do_not_pile_up_over_a_long_request(strategy, options, baseline):
    config = DecodingConfig(strategy=strategy, draft_length=3, max_new_tokens=LENGTH, **options)
    target, draft = TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT)
    steps = WithResult(decode_iterations(request_on(config, PROMPT), target, draft))
    most = 0
    for step in steps:
        shortest = min(hypothesis.num_tokens for hypothesis in step.hypotheses)
        for model in (target, draft):
            most = max(most, model.num_rows - len(PROMPT) - shortest)
    assert 0 < most <= 2 * MOST_UNUSED_ROWS  # those, a quarter of the used, and the live
    if baseline:
        same_law = {"num_beams": config.num_beams, "max_new_tokens": LENGTH}
        plain = run(DecodingConfig(strategy=baseline, **same_law), TARGET, None, VOCAB, 0, PROMPT)
        assert all_tokens(steps.result) == all_tokens(plain)


class Growing(TableModel):
    """A table whose cache grows in steps of 64 rows; remembers how often it was larger than used.

    Attributes:
        capacity: rows that it has room for now.
    """

    capacity = 64

    def __init__(self, *table):
        super().__init__(*table)
        memory = MemorySpec(grows_in_steps=True)
        self.spec = dataclasses.replace(self.spec, memory=memory)

    @property
    def num_free_rows(self):
        return self.capacity - self.num_rows

    def forward(self, forward):
        result = super().forward(forward)
        self.capacity = max(self.capacity, -(-self.num_rows // 64) * 64)
        return result


@pytest.mark.parametrize(  # beams of a search part early: their own rows take a step more
    ("strategy", "options", "baseline"),
    [request for request in REQUESTS if request[2] != "beam-search"],
)
def test_unused_rows_are_dropped_before_the_cache_grows(strategy, options, baseline):
    config = DecodingConfig(strategy=strategy, draft_length=3, max_new_tokens=LENGTH, **options)
    results = []
    for kind in (Growing, TableModel):
        target, draft = kind(VOCAB, TARGET), kind(VOCAB, DRAFT)
        results.append(decoded(request_on(config, PROMPT), target, draft))
        if kind is Growing:
            # prompt and answer take 84 rows: what is needed in addition fits into two steps
            assert max(target.capacity, draft.capacity) <= 128
    assert all_tokens(results[0]) == all_tokens(results[1])


def test_once_all_beams_have_ended_the_rows_of_the_answer_are_still_known():
    config = DecodingConfig(strategy="speculative", draft_length=2, eos_token_id=EOS)
    num_ended = 0
    for seed in range(10):
        decoder = BatchedDecoder(TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT))
        sequence = decoded_next(decoder, request_on(config, PROMPT, seed)).sequences[0]
        num_ended += sequence.finish_reason == "eos"
        said = [*PROMPT, *sequence.token_ids]
        for role in decoder.caches:
            prefix = prefix_of(decoder, role, said)
            num_last = config.draft_length + 2  # of the last iteration, the EOS among them
            assert len(prefix.tokens) >= len(said) - num_last
    assert num_ended > 5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_drafted_nodes_hold_their_logits_once(temperature: float) -> None:
    """At most half of a float64 array per node."""
    vocab_size, num_nodes = 4096, 128
    config = DecodingConfig(
        num_beams=2,
        width_policy="fixed",
        draft_length=4,
        draft_beams=num_nodes // 4,
        max_new_tokens=12,
        temperature=temperature,
    )
    logits = np.random.default_rng(0).normal(size=vocab_size).astype(np.float32)
    models = [TableModel(vocab_size, lambda path: logits) for _ in range(2)]
    steps = decode_iterations(request_on(config, (1,)), *models)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(3):
            next(steps)
        gc.collect()
        held, peak = (bytes_ - before for bytes_ in tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
    of_a_node = 4 * vocab_size
    assert held < 2 * num_nodes * of_a_node  # pruning leaves two drafts at most
    assert peak < 6 * num_nodes * of_a_node  # three of them are the table's own


def random_forest(rng: np.random.Generator, num_nodes: int, trunk: int) -> Forest:
    """Return a forest that begins with a chain, after which any node may go on."""
    forest = Forest(0, 0, 0, (), [])
    forest._reserve(num_nodes)
    forest._num_nodes = num_nodes
    parents = [i - 1 if i < trunk else int(rng.integers(0, i)) for i in range(num_nodes)]
    parents[0] = NO_NODE
    forest.parents[:num_nodes] = parents
    return forest


def pending_by_walking(parents: np.ndarray, slots: np.ndarray, nodes: np.ndarray) -> list[int]:
    found = set()
    for node in nodes.tolist():
        while node != NO_NODE and slots[node] < 0:
            found.add(node)
            node = int(parents[node])
    return sorted(found)


@pytest.mark.parametrize("seed", range(60))
def test_pending_nodes_are_those_of_a_walk_over_the_parents(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_nodes = int(rng.integers(1, 60))
    trunk = int(rng.integers(1, num_nodes + 1))
    forest = random_forest(rng, num_nodes, trunk)
    assert forest.trunk_length >= trunk
    chain = [NO_NODE, *range(num_nodes - 1)][: forest.trunk_length]
    assert forest.parents[: forest.trunk_length].tolist() == chain
    slots = forest.slots[0]
    slots[:num_nodes] = np.where(rng.random(num_nodes) < rng.random(), 1, NOT_COMPUTED)
    if seed % 2:  # of a draft that rests: computed up to some node, nothing below
        slots[:num_nodes] = np.where(np.arange(num_nodes) < rng.integers(0, 5), 1, NOT_COMPUTED)
    nodes = rng.choice(num_nodes, size=int(rng.integers(1, num_nodes + 1)), replace=False)
    expected = pending_by_walking(forest.parents, slots, nodes)
    found = forest.pending(nodes, slots).tolist()
    assert sorted(found) == expected
