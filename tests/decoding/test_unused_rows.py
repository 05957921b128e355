"""Unused rows and distributions do not accumulate, and dropping them leaves the output as it is."""

import dataclasses
import gc
import tracemalloc

import numpy as np
import pytest

from dsbd_forward.spec import MemorySpec
from dsbd_ort.decoding import DecodingConfig, TableModel, WithResult, decode_iterations
from dsbd_ort.decoding.kv_cache import MOST_UNUSED_ROWS, PrefixCache
from tests.decoding.tables import all_tokens, decoded, mixed_table, random_table, request_on, run

VOCAB = 6
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
        prefixes = (PrefixCache(), PrefixCache())
        models = TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT)
        sequence = decoded(request_on(config, PROMPT, seed), *models, prefixes).sequences[0]
        num_ended += sequence.finish_reason == "eos"
        said = [*PROMPT, *sequence.token_ids]
        for prefix in prefixes:
            num_last = config.draft_length + 2  # of the last iteration, the EOS among them
            assert prefix.tokens == said[: len(prefix.tokens)]
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
