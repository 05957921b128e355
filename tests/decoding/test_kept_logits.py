"""Requests under a trie: of an engine with a top-k head the logits of the allowed tokens alone."""

from typing import Any

import numpy as np
import pytest

from dsbd_ort.constraints import TokenTrie
from dsbd_ort.decoding import DecodingConfig, TableModel, decode
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.whole_requests import decoded_together
from tests.decoding.path_constraint import PathConstraint, some_tokens
from tests.decoding.tables import check_like_dense, mixed_table, random_table, request_on
from tests.decoding.top_table import TopTable

VOCAB, EOS = 24, 5
PROMPT = (1, 0, 1)
TARGET = random_table(7, VOCAB)
DRAFT = mixed_table(TARGET, random_table(8, VOCAB), 0.7)
_RNG = np.random.default_rng(3)
ITEMS = [
    [token if token != EOS else 6 for token in _RNG.integers(VOCAB, size=size).tolist()]
    for size in _RNG.integers(1, 6, size=300).tolist()
]
TRIES = {end: TokenTrie.from_sequences(ITEMS, end=end) for end in ("leaf", "eos")}
REQUESTS: list[dict[str, Any]] = [
    {"strategy": "dsbd", "num_beams": 5, "num_return_sequences": 5},
    {"strategy": "dsbd", "num_beams": 3, "coupling": "rejection"},
    {"strategy": "dsbd", "num_beams": 2, "replacement": True, "top_p": 0.9, "temperature": 1.4},
    {"strategy": "beam-sample", "num_beams": 4, "top_k": 3},
    {"strategy": "sample", "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"strategy": "beam-search", "num_beams": 8, "num_return_sequences": 8},
    {"strategy": "speculative-beam-search", "num_beams": 8, "num_return_sequences": 8},
    {"strategy": "speculative-beam-search", "num_beams": 4, "drafter": "ngram"},
    {"strategy": "greedy", "logit_bias": {3: 2.0}},
    {"strategy": "mjsd"},
]


def config_of(end: str = "leaf", **options: Any) -> DecodingConfig:
    given = {"max_new_tokens": 8, "eos_token_id": EOS, "constraint": TRIES[end], **options}
    return DecodingConfig(**given)


def topk(num_top: int = 2) -> tuple[TopTable, TopTable]:
    return (
        TopTable(VOCAB, TARGET, num_top, keeps_full=True),
        TopTable(VOCAB, DRAFT, num_top, keeps_full=True),
    )


def dense() -> tuple[TableModel, TableModel]:
    return TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT)


def decoded(models: Any, config: DecodingConfig, seed: int, prompt: Any = PROMPT) -> Any:
    draft = models[1] if config.has_draft_model else None
    return decode(models[0], draft, prompt, config, np.random.default_rng(seed))


@pytest.mark.parametrize("end", ["leaf", "eos"])
@pytest.mark.parametrize("options", REQUESTS, ids=lambda o: "-".join(map(str, o.values())))
def test_same_tokens_as_the_dense_engine(options: dict[str, Any], end: str) -> None:
    for seed in range(4):
        config = config_of(end, **options)
        expected = decoded(dense(), config, seed)
        models = topk()
        found = decoded(models, config, seed)
        check_like_dense(found, expected)
        assert found.stats.target_rows == expected.stats.target_rows
        assert not models[0].rows_read and not models[1].rows_read
        assert models[0].num_tokens_read > 0


def test_the_logits_that_are_read_are_those_that_the_trie_allows() -> None:
    trie = TokenTrie.from_sequences([[1, 2], [1, 3], [4, 9], [4]])
    model, _ = topk()
    decoded((model, None), config_of(strategy="beam-search", num_beams=2, constraint=trie), 0)
    # the two first tokens; then 2 and 3 after 1, and 9 or the end after 4; no row for the leaves
    assert model.num_tokens_read == 2 + 4


def test_a_constraint_of_bits_reads_whole_rows() -> None:
    constraint = PathConstraint(VOCAB, some_tokens(VOCAB, (EOS,)), (EOS,), as_bits=True)
    config = config_of(strategy="dsbd", num_beams=3, constraint=constraint)
    models = topk()
    found = decoded(models, config, 1)
    expected = decoded(dense(), config, 1)
    check_like_dense(found, expected)
    assert models[0].rows_read and not models[0].num_tokens_read


def test_shared_calls_give_each_what_it_would_get_alone() -> None:
    configs = [config_of(**options) for options in REQUESTS if options["strategy"] != "mjsd"]
    whole = DecodingConfig(strategy="dsbd", num_beams=2, max_new_tokens=6, eos_token_id=EOS)
    configs = [config.settled(costs_are_known=False) for config in [*configs, whole, *configs]]
    models = topk()
    prompts = [(seed % VOCAB, *PROMPT * (1 + seed % 3)) for seed in range(len(configs))]
    asked = enumerate(zip(configs, prompts, strict=True))
    requests = [request_on(config, prompt, seed) for seed, (config, prompt) in asked]
    results = decoded_together(BatchedDecoder(*models), requests, most_live=5)
    assert models[0].num_tokens_read > 0
    for seed, (config, result) in enumerate(zip(configs, results, strict=True)):
        assert result.sequences == decoded(topk(), config, seed, prompts[seed]).sequences, config
