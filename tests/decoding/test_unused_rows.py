"""Rows that nobody sees any more: they do not pile up, and leave the output as it is."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dsbd_forward.spec import MemorySpec
from dsbd_ort.decoding import DecodingConfig, DecodingRequest, TableModel, decode, decode_iterations
from dsbd_ort.decoding.kv_cache import MOST_UNUSED_ROWS, PrefixCache
from tests.decoding.tables import all_tokens, mixed_table, random_table, run

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
    steps = decode_iterations(
        DecodingRequest(prompt_ids=PROMPT, config=config, rng=np.random.default_rng(0)),
        target,
        draft,
    )
    result = None
    most = 0
    while result is None:
        try:
            shortest = min(hypothesis.num_tokens for hypothesis in next(steps).hypotheses)
        except StopIteration as stop:
            result = stop.value
            break
        for model in (target, draft):
            most = max(most, model.num_rows - len(PROMPT) - shortest)
    assert 0 < most <= 2 * MOST_UNUSED_ROWS  # those, a quarter of the used, and the live
    if baseline:
        same_law = {"num_beams": config.num_beams, "max_new_tokens": LENGTH}
        plain = run(DecodingConfig(strategy=baseline, **same_law), TARGET, None, VOCAB, 0, PROMPT)
        assert all_tokens(result) == all_tokens(plain)


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
        results.append(decode(target, draft, PROMPT, config, np.random.default_rng(0)))
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
        rng = np.random.default_rng(seed)
        steps = decode_iterations(
            DecodingRequest(prompt_ids=PROMPT, config=config, rng=rng), *models, prefixes=prefixes
        )
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                sequence = stop.value.sequences[0]
                break
        num_ended += sequence.finish_reason == "eos"
        said = [*PROMPT, *sequence.token_ids]
        for prefix in prefixes:
            num_last = config.draft_length + 2  # of the last iteration, the EOS among them
            assert prefix.tokens == said[: len(prefix.tokens)]
            assert len(prefix.tokens) >= len(said) - num_last
    assert num_ended > 5
