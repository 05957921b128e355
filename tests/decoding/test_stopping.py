"""A path that ends by its stop state is absorbing, just as one that ends with an EOS token."""

import numpy as np
import pytest

from dsbd_ort.decoding import DecodingConfig, DecodingError, TableModel, decode
from tests.decoding.tables import all_tokens, ends_with, mixed_table, random_table

pytestmark = pytest.mark.usefixtures("both_loops")

VOCAB = 5
TARGET = random_table(1, VOCAB)
DRAFT = mixed_table(TARGET, random_table(2, VOCAB), 0.6)


def decoded(seed, stop=None, prompt=(1, 0, 1), **options):
    config = DecodingConfig(**{"max_new_tokens": 12, **options})
    draft = TableModel(VOCAB, DRAFT) if config.row.has_draft else None
    rng = np.random.default_rng(seed)
    return decode(TableModel(VOCAB, TARGET), draft, prompt, config, rng, stop=stop)


EVERY_STRATEGY = [
    {"strategy": "sample"},
    {"strategy": "speculative"},
    {"strategy": "tree-speculative"},
    {"strategy": "beam-sample", "num_return_sequences": 4},
    {"strategy": "beam-sample", "replacement": True},
    {"strategy": "dsbd"},
    {"strategy": "dsbd", "width_policy": "fixed", "num_return_sequences": 4},
    {"strategy": "dsbd", "coupling": "rejection", "num_return_sequences": 2},
    {"strategy": "dsbd", "memory": "single"},
    {"strategy": "dsbd", "draft_policy": "throughput"},
    {"strategy": "beam-search", "num_return_sequences": 4},
    {"strategy": "beam-search", "early_stopping": True},
    {"strategy": "greedy"},
    {"strategy": "mjsd"},
    {"strategy": "mjgd"},
]


@pytest.mark.parametrize("options", EVERY_STRATEGY, ids=str)
def test_a_stop_that_is_one_token_is_an_end_of_sequence_token(options):
    num_stopped = 0
    for seed in range(8):
        prompt = (1, 0, seed % VOCAB)
        by_token = decoded(seed, prompt=prompt, eos_token_id=4, **options)
        by_stop = decoded(seed, prompt=prompt, stop=ends_with((4,)), **options)
        assert all_tokens(by_stop) == all_tokens(by_token)
        renamed = {"eos": "stop", "length": "length"}
        reasons = [sequence.finish_reason for sequence in by_stop.sequences]
        assert reasons == [renamed[sequence.finish_reason] for sequence in by_token.sequences]
        num_stopped += "stop" in reasons
    assert num_stopped > 0


def test_a_single_beam_is_the_unstopped_one_up_to_its_stop():
    wanted = (2, 4)
    for seed in range(30):
        options = {"strategy": "sample", "max_new_tokens": 30}
        (whole,) = decoded(seed, **options).sequences
        (stopped,) = decoded(seed, ends_with(wanted), **options).sequences
        tokens = whole.token_ids
        ends = [i for i in range(2, len(tokens) + 1) if tuple(tokens[i - 2 : i]) == wanted]
        assert stopped.token_ids == (tokens[: ends[0]] if ends else tokens)
        assert stopped.finish_reason == ("stop" if ends else "length")


def test_a_token_that_ends_is_named_before_a_text_that_does():
    found = decoded(1, ends_with((4,)), strategy="sample", eos_token_id=4, max_new_tokens=60)
    assert found.sequences[0].finish_reason == "eos"


def test_stop_strings_without_their_text_are_refused():
    with pytest.raises(DecodingError, match=r"stop_strings is \('x',\).*use Pipeline"):
        decoded(0, strategy="sample", stop_strings="x")
