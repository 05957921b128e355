"""Requests on engines that fold, token for token those of tables of paths."""

import itertools

import numpy as np
import pytest

from dsbd_ort.decoding import DecodingConfig, decode
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from tests.decoding.preempting import Together, request_of, together
from tests.decoding.tables import all_tokens
from tests.state_tables import plain_table, state_engine

VOCAB, TARGET, DRAFT = 7, 1, 2
KINDS = [  # what drafts, and what it equals
    ({"strategy": "dsbd", "num_beams": 3, "width_policy": "fixed"}, "beam-sample"),
    ({"strategy": "speculative"}, "sample"),
    ({"strategy": "speculative-beam-search", "num_beams": 4}, "beam-search"),
]
DRAFTERS = ["model", "ngram", "model+ngram"]


def prompt_of(seed):
    """Of 1 to 300 tokens, some of them in a pattern that n-grams find."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, int(rng.integers(1, 300))).tolist()
    return tokens if seed % 3 else (tokens[:7] * 40)[: len(tokens)]


def check(num_prompts, num_new):
    for seed, (drafted, plain) in itertools.product(range(num_prompts), KINDS):
        prompt, num_beams = prompt_of(seed), drafted.get("num_beams", 1)
        common = {"num_beams": num_beams, "num_return_sequences": num_beams}
        common |= {"max_new_tokens": num_new, "eos_token_id": None}
        plainly = DecodingConfig(strategy=plain, **common)
        drafter = DRAFTERS[seed % 3]
        drafting = DecodingConfig(**{**common, **drafted, "drafter": drafter})
        rng = np.random.default_rng
        wanted = decode(plain_table(TARGET, VOCAB), None, prompt, plainly, rng(seed))
        for config in (plainly, drafting):
            target = state_engine(TARGET, VOCAB)
            has_draft = config is drafting and "model" in drafter
            draft = state_engine(DRAFT, VOCAB) if has_draft else None
            found = decode(target, draft, prompt, config, rng(seed))
            assert all_tokens(found) == all_tokens(wanted), (seed, config)
            assert target._session.memory.folds or len(prompt) + num_new < 100


def test_tokens_are_those_of_a_table_of_paths():
    check(4, 70)


@pytest.mark.long
def test_200_prompts():
    check(200, 150)


@pytest.mark.parametrize("seed", range(3))
def test_together_preempted_and_resumed(seed):
    """Some begin alike, in different lengths; rows are few."""
    kind = {"strategy": "dsbd", "num_beams": 2, "width_policy": "fixed"}
    begin = prompt_of(10)[:200]
    prompts = [begin[:50], begin, [*begin[:150], 1, 2], prompt_of(11)[:90], begin[:120]]
    requests = [request_of(kind, tuple(p), n, 60) for n, p in enumerate(prompts)]
    again = [request_of(kind, tuple(p), n, 60) for n, p in enumerate(prompts)]
    plain = BatchedDecoder(plain_table(TARGET, VOCAB), plain_table(DRAFT, VOCAB))
    folding = BatchedDecoder(state_engine(TARGET, VOCAB), state_engine(DRAFT, VOCAB), max_rows=700)
    wanted = Together(plain, requests).run(itertools.repeat(True)).outcomes
    found = together(folding, again, seed).outcomes
    assert len(wanted) == len(prompts)
    for key, outcome in wanted.items():
        assert all_tokens(found[key]) == all_tokens(outcome)
