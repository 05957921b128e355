"""A log-probability is a function of the path: one log-normalizer, whichever way a row is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dsbd_ort.decoding import (
    DecodeResult,
    DecodingConfig,
    DecodingRequest,
    TableModel,
    decode_iterations,
)
from dsbd_ort.decoding.logits_processing.constraint import AllowedTokens, States
from dsbd_ort.decoding.result import result_of
from dsbd_ort.decoding.trace import RequestTrace
from tests.decoding.path_constraint import PathConstraint, some_tokens
from tests.decoding.tables import mixed_table, random_table
from tests.decoding.top_table import TopTable

VOCAB, EOS = 40, 5
PROMPT = (1, 0, 1)
TARGET = random_table(7, VOCAB)
DRAFT = mixed_table(TARGET, random_table(8, VOCAB), 0.7)
SHAPES = [(1, [1]), (2, [1, 1]), (4, [3, 3, 3, 3]), (3, [2, 4, 1])]
"""draft_length, and the draft_beams of each layer for one beam."""
PROCESSING: dict[str, dict[str, Any]] = {
    "none": {},
    "penalty": {"repetition_penalty": 1.3},
    "raising": {"logit_bias": {3: 2.0}},
    "lists": {"constraint": PathConstraint(VOCAB, some_tokens(VOCAB, (EOS,)), (EOS,))},
    "masks": {
        "constraint": PathConstraint(VOCAB, some_tokens(VOCAB, (EOS,)), (EOS,), as_bits=True)
    },
}
PAIRS = {"beam-search": "speculative-beam-search", "beam-sample": "dsbd", "sample": "speculative"}


class Mixing(PathConstraint):
    """Lists the tokens of few paths at once, and returns masks of more."""

    def allowed(self, states: States) -> AllowedTokens:
        return replace(self, as_bits=len(states) > 3).allowed_by_kind(states)

    def allowed_by_kind(self, states: States) -> AllowedTokens:
        return super().allowed(states)


def outputs_of(result: DecodeResult) -> list[Any]:
    """Everything that a request says in numbers, to the last bit."""
    return [
        (s.token_ids, s.token_logprobs, s.logprob, s.score, s.top_logprobs)
        for s in result.sequences
    ] + [result.prompt_logprobs]


def drafts_of(plain: str, num_beams: int) -> Iterator[dict[str, Any]]:
    """The same request with drafts of several shapes."""
    for length, layers in SHAPES:
        options: dict[str, Any] = {"strategy": PAIRS[plain], "draft_length": length}
        if plain != "sample":
            options |= {"draft_beams": [num_beams * number for number in layers]}
        yield options


def decoded(
    models: tuple[Any, Any], trace: RequestTrace | None = None, **options: Any
) -> list[Any]:
    given = {"max_new_tokens": 7, "eos_token_id": EOS, "num_return_sequences": 1, **options}
    config = DecodingConfig(**given)
    draft = models[1] if config.has_draft_model else None
    rng = np.random.default_rng(3)
    return outputs_of(
        result_of(
            decode_iterations(
                DecodingRequest(prompt_ids=PROMPT, config=config, rng=rng, trace=trace),
                models[0],
                draft,
            )
        )
    )


@pytest.mark.parametrize("num_top", [1, 8, 20])
@pytest.mark.parametrize("processing", PROCESSING)
@pytest.mark.parametrize("plain", PAIRS)
def test_no_draft_of_any_width_is_seen_with_a_top_k_head(
    plain: str, processing: str, num_top: int
) -> None:
    options = {**PROCESSING[processing], "num_beams": 1 if plain == "sample" else 3}
    if plain != "beam-search":
        options["top_k"] = min(6, num_top)

    def models() -> tuple[TopTable, TopTable]:
        return (
            TopTable(VOCAB, TARGET, num_top, keeps_full=True),
            TopTable(VOCAB, DRAFT, max(num_top, 6)),
        )

    expected = decoded(models(), strategy=plain, **options)
    for draft in drafts_of(plain, options["num_beams"]):
        assert decoded(models(), **options, **draft) == expected, draft


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

    def model(table: Any) -> Any:
        if head == "full":
            return TableModel(VOCAB, table)
        return TopTable(VOCAB, table, 8, keeps_full=True)

    def models() -> tuple[Any, Any]:
        return model(TARGET), model(DRAFT)

    plain = decoded(models(), **options)
    assert decoded(models(), trace=RequestTrace(), **options) == plain
    asked = decoded(models(), top_logprobs=20, prompt_logprobs=True, **options)
    assert [row[:4] for row in asked[:-1]] == [row[:4] for row in plain[:-1]]
    for _, logprobs, *_, tops in asked[:-1]:
        assert [len(top) for top in tops] == [20] * len(logprobs)


@pytest.mark.parametrize("head", ["full", "top"])
def test_a_text_scored_as_a_prompt_has_the_log_probabilities_that_it_was_made_with(
    head: str,
) -> None:
    def model() -> Any:
        if head == "full":
            return TableModel(VOCAB, TARGET)
        return TopTable(VOCAB, TARGET, 8, keeps_full=True)

    for options in ({"strategy": "greedy"}, {"strategy": "beam-search", "num_beams": 3}):
        for processing in PROCESSING.values():
            ((tokens, logprobs, *_), _) = decoded((model(), None), **options, **processing)
            config = DecodingConfig(strategy="greedy", max_new_tokens=1, prompt_logprobs=True)
            rng = np.random.default_rng(0)
            prompt = (*PROMPT, *tokens)
            scored = result_of(
                decode_iterations(
                    DecodingRequest(prompt_ids=prompt, config=config, rng=rng), model(), None
                )
            )
            assert scored.prompt_logprobs is not None
            assert scored.prompt_logprobs.token_logprobs[len(PROMPT) :] == logprobs
