"""Rows kept from one request to the next: the same output with fewer rows."""

import numpy as np
import pytest

from dsbd_forward.forward import Forward
from dsbd_ort.decoding import DecodeResult, DecodingConfig, TableModel
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from tests.decoding.tables import (
    all_tokens,
    decoded_next,
    mixed_table,
    prefix_of,
    random_table,
    request_on,
    run,
)

VOCAB = 6
TARGET = random_table(1, VOCAB)
DRAFT = mixed_table(TARGET, random_table(2, VOCAB), 0.7)
EOS = 5

REQUESTS = [  # (strategy, further options)
    ("dsbd", {"num_beams": 3, "width_policy": "fixed"}),
    ("dsbd", {"num_beams": 4}),
    ("dsbd", {"num_beams": 3, "coupling": "rejection"}),
    ("speculative-beam-search", {"num_beams": 3}),
    ("beam-sample", {"num_beams": 2}),
    ("mjsd", {}),
]


class Conversation:
    """Two table models whose caches live on from request to request."""

    def __init__(self) -> None:
        self.target, self.draft = TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT)
        self.decoder = BatchedDecoder(self.target, self.draft)

    def ask(self, prompt: tuple[int, ...], config: DecodingConfig, seed: int) -> DecodeResult:
        return decoded_next(self.decoder, request_on(config, prompt, seed))


@pytest.mark.parametrize(("strategy", "options"), REQUESTS)
def test_a_request_that_goes_on_from_the_last_gives_the_same_with_fewer_rows(strategy, options):
    config = DecodingConfig(strategy=strategy, max_new_tokens=8, eos_token_id=EOS, **options)
    for seed in range(10):
        talk = Conversation()
        first_prompt = tuple(np.random.default_rng(seed).integers(0, EOS, 30).tolist())
        first = talk.ask(first_prompt, config, seed)
        said = [token for token in first.sequences[0].token_ids if token != EOS]
        prompt = (*first_prompt, *said, 1, 2)
        second = talk.ask(prompt, config, seed + 100)
        alone = run(config, TARGET, DRAFT, VOCAB, seed + 100, prompt)
        assert all_tokens(second) == all_tokens(alone)
        assert second.stats.target_rows <= alone.stats.target_rows - len(first_prompt) + 1


@pytest.mark.parametrize(("strategy", "options"), REQUESTS)
def test_the_noted_tokens_are_those_of_the_rows(strategy, options):
    config = DecodingConfig(strategy=strategy, max_new_tokens=12, eos_token_id=EOS, **options)
    for seed in range(10):
        talk = Conversation()
        said = talk.ask((1, 2, 3, 4), config, seed).sequences[0].token_ids
        path = (1, 2, 3, 4, *said, 0)
        following = request_on(config, path)
        talk.decoder.keep_for(following)
        for role, model in (("target", talk.target), ("draft", talk.draft)):
            prefix = prefix_of(talk.decoder, role, path)
            num_cached = len(prefix.tokens)
            assert num_cached == model.num_rows
            assert num_cached >= 3 or role == "draft"
            before = len(model.computed_paths)
            mask = np.ones((1, num_cached + 1), dtype=np.bool_)
            model.forward(Forward(np.array([0]), np.array([num_cached]), mask, np.array([0])))
            assert model.computed_paths[before] == (*prefix.tokens, 0)


def test_another_prompt_shares_nothing():
    config = DecodingConfig(num_beams=2, max_new_tokens=6)
    talk = Conversation()
    talk.ask((1, 2, 3, 4, 1), config, 0)
    prompt = (2, 2, 3, 4, 1)
    result = talk.ask(prompt, config, 1)
    assert all_tokens(result) == all_tokens(run(config, TARGET, DRAFT, VOCAB, 1, prompt))


def test_a_draft_that_is_not_needed_keeps_the_rows_of_an_earlier_prompt():
    talk, usual = Conversation(), DecodingConfig(num_beams=2, max_new_tokens=6)
    prompt = (1, 2, 3, 4, 0, 2)
    talk.ask(prompt, usual, 0)
    num_draft_rows = len(talk.draft.computed_paths)
    assert len(prefix_of(talk.decoder, "draft", prompt[:5]).tokens) == 5
    last = DecodingConfig(num_beams=2, max_new_tokens=1)  # nothing is drafted for one token
    talk.ask((*prompt, 1, 1), last, 1)
    assert len(talk.draft.computed_paths) == num_draft_rows
    assert len(prefix_of(talk.decoder, "draft", prompt[:5]).tokens) == 5
    assert len(prefix_of(talk.decoder, "target", (*prompt, 1)).tokens) == 7
    again = talk.ask((*prompt, 1, 3), usual, 2)
    alone = run(usual, TARGET, DRAFT, VOCAB, 2, (*prompt, 1, 3))
    assert all_tokens(again) == all_tokens(alone)
    assert again.stats.draft_rows < alone.stats.draft_rows
