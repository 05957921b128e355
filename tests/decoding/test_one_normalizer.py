"""A log-probability is a function of the path: one log-normalizer, whichever way a row is read."""

from typing import Any

import pytest

from dsbd_ort.decoding import (
    DecodingConfig,
    TableModel,
)
from dsbd_ort.decoding.trace import RequestTrace
from tests.decoding.path_constraint import PathConstraint, some_tokens
from tests.decoding.tables import LogitsOf, decoded, mixed_table, random_table, request_on
from tests.decoding.top_table import TopTable

pytestmark = pytest.mark.usefixtures("both_loops")

VOCAB, EOS = 40, 5
PROMPT = (1, 0, 1)
TARGET = random_table(7, VOCAB)
DRAFT = mixed_table(TARGET, random_table(8, VOCAB), 0.7)
PROCESSING: dict[str, dict[str, Any]] = {
    "none": {},
    "penalty": {"repetition_penalty": 1.3},
    "raising": {"logit_bias": {3: 2.0}},
    "lists": {"constraint": PathConstraint(VOCAB, some_tokens(VOCAB, (EOS,)), (EOS,))},
    "masks": {
        "constraint": PathConstraint(VOCAB, some_tokens(VOCAB, (EOS,)), (EOS,), as_bits=True)
    },
}


def model_of(table: LogitsOf, head: str) -> TableModel | TopTable:
    return (
        TableModel(VOCAB, table) if head == "full" else TopTable(VOCAB, table, 8, keeps_full=True)
    )


def numbers_of(head: str, trace: RequestTrace | None = None, **options: Any) -> list[Any]:
    """Every number that a request returns, to the last bit."""
    given = {"max_new_tokens": 7, "eos_token_id": EOS, "num_return_sequences": 1, **options}
    config = DecodingConfig(**given)
    draft = model_of(DRAFT, head) if config.has_draft_model else None
    result = decoded(request_on(config, PROMPT, 3, trace=trace), model_of(TARGET, head), draft)
    return [
        (s.token_ids, s.token_logprobs, s.logprob, s.score, s.top_logprobs)
        for s in result.sequences
    ]


@pytest.mark.parametrize("head", ["full", "top"])
@pytest.mark.parametrize("strategy", ["beam-search", "beam-sample", "dsbd", "greedy"])
@pytest.mark.parametrize("processing", ["none", "lists", "masks", "penalty"])
def test_what_else_is_asked_changes_no_log_probability(
    head: str, strategy: str, processing: str
) -> None:
    """A trace and the most probable tokens need more logits than are read otherwise."""
    options = {**PROCESSING[processing], "strategy": strategy}
    if strategy not in ("beam-search", "greedy"):
        options["top_k"] = 6
    plain = numbers_of(head, **options)
    assert numbers_of(head, trace=RequestTrace(), **options) == plain
    asked = numbers_of(head, top_logprobs=20, prompt_logprobs=True, **options)
    assert [row[:4] for row in asked] == [row[:4] for row in plain]
    for _, logprobs, *_, tops in asked:
        assert [len(top) for top in tops] == [20] * len(logprobs)


@pytest.mark.parametrize("head", ["full", "top"])
def test_a_text_scored_as_a_prompt_has_the_log_probabilities_that_it_was_made_with(
    head: str,
) -> None:
    for options in ({"strategy": "greedy"}, {"strategy": "beam-search", "num_beams": 3}):
        for processing in PROCESSING.values():
            ((tokens, logprobs, *_),) = numbers_of(head, **options, **processing)
            config = DecodingConfig(strategy="greedy", max_new_tokens=1, prompt_logprobs=True)
            scored = decoded(request_on(config, (*PROMPT, *tokens)), model_of(TARGET, head))
            assert scored.prompt_logprobs is not None
            assert scored.prompt_logprobs.token_logprobs[len(PROMPT) :] == logprobs
