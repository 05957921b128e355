"""Processors and constraints: speculation stays invisible, the law exact, in every strategy."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from dsbd_ort.decoding import DecodingConfig, TableModel
from dsbd_ort.decoding.drafting.cost_curve import CostCurve, EngineCosts
from dsbd_ort.decoding.errors import ConstraintError, DecodingError
from dsbd_ort.decoding.result import DecodeResult
from tests.decoding.exact_laws import (
    ScriptedChance,
    beam_sampling_law,
    chi_square_p_value,
    law_of,
    total_variation,
)
from tests.decoding.path_constraint import PathConstraint, some_tokens
from tests.decoding.path_scorer import PathScorer, scorer_of_path
from tests.decoding.tables import (
    LogitsOf,
    all_tokens,
    decoded,
    final_beams,
    mixed_table,
    random_table,
    request_on,
)
from tests.decoding.top_table import TopTable

pytestmark = pytest.mark.usefixtures("both_loops")

VOCAB, EOS = 11, 4
TARGET = random_table(1, VOCAB)
OTHER = random_table(2, VOCAB)
DRAFTS = {"decent": mixed_table(TARGET, OTHER, 0.7), "hostile": OTHER}
PROMPTS = [
    tuple(np.random.default_rng(seed).integers(0, VOCAB, 1 + seed % 6).tolist())
    for seed in range(6)
]


def one_or_two(path: tuple[int, ...]) -> set[int]:
    """A tight constraint: one token after most paths, two after some, the end after a few."""
    first = (3 * sum(path) + len(path)) % VOCAB
    return (
        {first}
        | ({(first + 5) % VOCAB} if len(path) % 3 == 0 else set())
        | ({EOS} if len(path) > 9 else set())
    )


def less_of_recent(path: np.ndarray, scores: np.ndarray) -> np.ndarray:
    scores[path[-3:]] -= 1.5
    scores[(path[0] + len(path)) % len(scores)] += 0.5
    return scores


@dataclass
class UnboundScorer:
    def bind(self, *_: Any) -> PathScorer:
        return PathScorer(VOCAB)


ALLOWED = some_tokens(VOCAB, always=(EOS,))
PROCESSING: dict[str, dict[str, Any]] = {
    "lists": {"constraint": PathConstraint(VOCAB, ALLOWED, (EOS,))},
    "bits": {"constraint": PathConstraint(VOCAB, ALLOWED, (EOS,), as_bits=True)},
    "ending": {
        "constraint": PathConstraint(
            VOCAB, ALLOWED, (EOS,), ends_after=lambda path: len(path) > 5 and sum(path) % 6 == 0
        )
    },
    "tight": {"constraint": PathConstraint(VOCAB, one_or_two, (EOS,))},
    "repetition": {"repetition_penalty": 1.4},
    "reward": {"repetition_penalty": 0.7},
    "counts": {"presence_penalty": 0.8, "frequency_penalty": 0.4},
    "n-grams": {"no_repeat_ngram_size": 2},
    "n-grams of the prompt": {"encoder_no_repeat_ngram_size": 2},
    "words": {"bad_words_ids": [[3], [1, 2], [5, 6, 7]]},
    "bias": {"logit_bias": {2: 1.5, 7: -3.0}, "suppress_tokens": [8]},
    "length": {"min_new_tokens": 7, "forced_eos_token_id": EOS},
    "function": {"logits_processors": [less_of_recent]},
    "scorer": {"scorers": [PathScorer(VOCAB)]},
    "lowering scorer": {"scorers": [PathScorer(VOCAB, most=0.0, has_highest=True)]},
    "several": {
        "constraint": PathConstraint(VOCAB, ALLOWED, (EOS,), as_bits=True),
        "frequency_penalty": 0.5,
        "no_repeat_ngram_size": 3,
        "repetition_penalty": 1.2,
        "scorers": [PathScorer(VOCAB), PathScorer(VOCAB, most=0.5, has_highest=True)],
    },
}
PAIRS = {  # speculative strategy: (options, the strategy that it equals)
    "dsbd": ({"num_beams": 3, "num_return_sequences": 3}, "beam-sample"),
    "speculative": ({}, "sample"),
    "tree-speculative": ({}, "sample"),
    "speculative-beam-search": ({"num_beams": 3, "num_return_sequences": 3}, "beam-search"),
}
POLICIES: list[dict[str, Any]] = [
    {"draft_policy": "fixed", "draft_length": 3},
    {"draft_policy": "throughput"},
    {"drafter": "ngram", "draft_policy": "fixed", "draft_length": 2},
    {"drafter": "model+ngram", "draft_policy": "throughput"},
]


def config_of(strategy: str, **options: Any) -> DecodingConfig:
    return DecodingConfig(strategy=strategy, max_new_tokens=11, eos_token_id=EOS, **options)


def answer(config: DecodingConfig, models: tuple[Any, Any], seed: int) -> DecodeResult:
    costs = EngineCosts(CostCurve((1, 16), (1e-3, 2e-3)), CostCurve((1, 16), (1e-4, 2e-4)))
    request = request_on(config, PROMPTS[seed], seed, costs=costs)
    return decoded(request, models[0], models[1] if config.row.has_draft else None)


def tables(draft: str) -> tuple[TableModel, TableModel]:
    return TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFTS[draft])


@pytest.mark.parametrize("strategy", PAIRS)
@pytest.mark.parametrize("name", PROCESSING)
def test_speculation_is_invisible(name: str, strategy: str) -> None:
    shape, plain = PAIRS[strategy]
    for seed in range(2):
        expected = answer(config_of(plain, **shape, **PROCESSING[name]), tables("decent"), seed)
        for policy in POLICIES:
            config = config_of(strategy, **shape, **PROCESSING[name], **policy)
            for draft in DRAFTS:
                assert all_tokens(answer(config, tables(draft), seed)) == all_tokens(expected)


@pytest.mark.parametrize("strategy", ["dsbd", "beam-sample", "speculative-beam-search"])
@pytest.mark.parametrize("name", PROCESSING)
def test_a_top_k_head_gives_the_same_whatever_it_leaves_out(name: str, strategy: str) -> None:
    """With 1 to 7 candidates; the other logits stay with the engine until its next forward."""
    shape = {"num_beams": 3, "num_return_sequences": 3}
    shape |= {} if strategy == "speculative-beam-search" else {"top_k": 5}
    config = config_of(strategy, **shape, **PROCESSING[name])
    num_read = 0
    for seed in range(6):
        expected = answer(config, tables("decent"), seed)
        num_top = 5 + seed % 3 if "top_k" in shape else 1 + seed
        models = [
            TopTable(VOCAB, table, num_top, keeps_full=True) for table in (TARGET, DRAFTS["decent"])
        ]
        found = answer(config, models, seed)
        assert [s.token_ids for s in found.sequences] == [s.token_ids for s in expected.sequences]
        num_read += len(models[0].rows_read) + models[0].num_tokens_read
        assert not models[1].rows_read, "a draft needs no full logits"
    assert num_read or name in ("repetition", "counts")


def with_trie(logits: np.ndarray, path: tuple[int, ...]) -> np.ndarray:
    allowed = [(len(path) + sum(path)) % 3, (len(path) + 1) % 3]
    return np.where(np.isin(np.arange(3), allowed), logits, -np.inf)


def with_counts(logits: np.ndarray, path: tuple[int, ...]) -> np.ndarray:
    new = Counter(path[len(LAW_PROMPT) :])
    return logits - np.array([0.9 * (new[v] > 0) + 0.5 * new[v] for v in range(3)])


LAW_PROMPT = (1, 2)
LAWS = {  # name: (options, the same as a change of logits by path, written on its own)
    "trie": (
        {
            "constraint": PathConstraint(
                3, lambda path: {(len(path) + sum(path)) % 3, (len(path) + 1) % 3}
            )
        },
        with_trie,
    ),
    "counts": ({"presence_penalty": 0.9, "frequency_penalty": 0.5}, with_counts),
    "scorer": (
        {"scorers": [PathScorer(3)]},
        lambda logits, path: logits + scorer_of_path(PathScorer(3), path),
    ),
}


@pytest.mark.parametrize("strategy", ["beam-sample", "dsbd"])
@pytest.mark.parametrize("name", LAWS)
def test_final_beam_sets_follow_the_exact_law(name: str, strategy: str) -> None:
    options, change = LAWS[name]
    target = random_table(7, 3, spread=1.0)
    draft = mixed_table(target, random_table(8, 3), 0.5)
    law = beam_sampling_law(changed(target, change), LAW_PROMPT, 2, 3)
    config = DecodingConfig(
        strategy=strategy,
        num_beams=2,
        num_return_sequences=2,
        max_new_tokens=3,
        **{"width_policy": "fixed", "draft_length": 2} if strategy == "dsbd" else {},
        **options,
    )
    models = TableModel(3, target), TableModel(3, draft)
    counts = Counter(
        final_beams(decoded(request_on(config, LAW_PROMPT, seed), *models)) for seed in range(1500)
    )
    assert chi_square_p_value(counts, law, 1500) > 1e-4


def changed(table: LogitsOf, change: Any) -> LogitsOf:
    def logits_of(path: tuple[int, ...]) -> np.ndarray:
        return change(np.asarray(table(path), dtype=np.float32).astype(np.float64), path)

    logits_of.is_processed = True  # type: ignore[attr-defined]
    return logits_of


@pytest.mark.parametrize("strategy", ["beam-sample", "dsbd"])
@pytest.mark.parametrize("name", LAWS)
def test_the_rejection_coupling_is_exact_by_enumeration(name: str, strategy: str) -> None:
    options, change = LAWS[name]
    target = random_table(21, 3, spread=1.0)
    draft = mixed_table(target, random_table(22, 3), 0.5)
    config = DecodingConfig(
        strategy=strategy,
        coupling="rejection",
        num_beams=2,
        num_return_sequences=2,
        max_new_tokens=2,
        **{"width_policy": "fixed", "draft_length": 1} if strategy == "dsbd" else {},
        **options,
    )

    def outcome(chance: ScriptedChance) -> Any:
        request = request_on(config, LAW_PROMPT, random_source=chance)
        return final_beams(decoded(request, TableModel(3, target), TableModel(3, draft)))

    law = beam_sampling_law(changed(target, change), LAW_PROMPT, 2, 2)
    assert total_variation(law_of(outcome), law) < 1e-12


def test_fewer_legal_paths_than_beams_give_fewer_beams() -> None:
    trie = {(): {1, 2}, (1,): {3}, (2,): {3}, (1, 3): set(), (2, 3): set()}
    constraint = PathConstraint(
        VOCAB, lambda path: trie[path[1:]], ends_after=lambda path: len(path) == 3
    )
    for strategy in ("beam-sample", "dsbd", "beam-search", "speculative-beam-search"):
        config = DecodingConfig(
            strategy=strategy,
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=8,
            constraint=constraint,
        )
        result = decoded(request_on(config, (0,)), *tables("hostile"))
        assert {tuple(s.token_ids) for s in result.sequences} == {(1, 3), (2, 3)}
        assert {s.finish_reason for s in result.sequences} == {"stop"}


DEAD_END = (
    r"^the test's constraint neither accepts nor continues the new tokens \[2, 2\]; expected a "
    "token that may follow, or an end-of-sequence id where it accepts: change one of them$"
)
REFUSED: list[tuple[dict[str, Any], type[DecodingError], str]] = [
    (
        {"constraint": PathConstraint(VOCAB, lambda path: {2} if len(path) < 3 else set())},
        ConstraintError,
        DEAD_END,
    ),
    (
        {"constraint": PathConstraint(99, lambda path: {1, 50})},
        ConstraintError,
        "allows token ids from 1 to 50; expected 0 to 10",
    ),
    ({"suppress_tokens": list(range(VOCAB))}, ConstraintError, "leave no token to any beam"),
    ({"logit_bias": {VOCAB: 1.0}}, DecodingError, "logit_bias has token id 11; expected 0 to 10"),
    *(
        (
            {"logits_processors": [function]},
            ConstraintError,
            r"processor <function .*> returned scores of shape",
        )
        for function in (lambda path, s: s[:3], lambda path, s: s * np.nan)
    ),
    (
        {"scorers": [PathScorer(3)]},
        ConstraintError,
        r"the test's scorer returned scores of shape \(1, 3\); expected shape \(1, 11\), finite",
    ),
    (
        {"scorers": [PathScorer(VOCAB, most=np.inf)]},
        ConstraintError,
        r"returned scores of shape \(1, 11\), with NaN or more than 1e30; expected shape \(1, 11\)",
    ),
    (
        {"scorers": [UnboundScorer()]},
        DecodingError,
        r"scorers has UnboundScorer\(\), which requires a tokenizer; bind it",
    ),
]


@pytest.mark.parametrize("strategy", ["beam-search", "speculative-beam-search", "sample", "dsbd"])
def test_the_lowest_float_forbids_a_token(strategy: str) -> None:
    lowest, is_even = np.finfo(np.float64).min, np.arange(VOCAB) % 2 == 0
    found = [
        decoded(
            request_on(
                DecodingConfig(
                    strategy=strategy,
                    max_new_tokens=8,
                    logits_processors=[
                        lambda path, scores, low=low: np.where(is_even, low, scores)
                    ],
                ),
                (0,),
            ),
            *tables("decent"),
        ).sequences[0]
        for low in (lowest, -np.inf)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(("options", "error", "words"), REFUSED)
def test_what_leaves_no_lawful_token_is_named(
    options: dict[str, Any], error: type[DecodingError], words: str
) -> None:
    config = DecodingConfig(strategy="beam-sample", max_new_tokens=8, **options)
    with pytest.raises(error, match=words):
        decoded(request_on(config, (0,)), tables("decent")[0])


@pytest.mark.parametrize("options", [{"forced_eos_token_id": 0}, {"bad_words_ids": [[0], [0, 1]]}])
@pytest.mark.parametrize("num_top", [0, 3])
def test_a_dead_end_at_the_prompt_is_one_with_processors(
    options: dict[str, Any], num_top: int
) -> None:
    """No row lists a token: the table of candidates is empty."""
    constraint = PathConstraint(VOCAB, lambda path: set())
    config = DecodingConfig(
        strategy="sample", top_k=2, max_new_tokens=1, constraint=constraint, **options
    )
    model = TopTable(VOCAB, TARGET, num_top, keeps_full=True) if num_top else tables("decent")[0]
    with pytest.raises(ConstraintError, match="neither accepts nor continues"):
        decoded(request_on(config, (0,)), model)
