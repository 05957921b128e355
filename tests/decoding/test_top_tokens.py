"""top_logprobs and prompt_logprobs against the tables that the models are made of."""

from typing import Any

import numpy as np
import pytest

from dsbd_ort.decoding import (
    ConfigError,
    DecodeResult,
    DecodingConfig,
    TableModel,
    WithResult,
    decode_iterations,
)
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.top_tokens import SCORED_CHUNK
from dsbd_ort.decoding.whole_requests import decoded_together
from tests.decoding.tables import (
    LogitsOf,
    decoded,
    decoded_next,
    mixed_table,
    random_table,
    request_on,
)
from tests.decoding.top_table import TopTable

VOCAB, EOS = 9, 5
TARGET = random_table(1, VOCAB)
DRAFT = mixed_table(TARGET, random_table(2, VOCAB), 0.7)
PROMPT = (1, 0, 3, 1)
STRATEGIES: list[dict[str, Any]] = [
    {"strategy": "dsbd", "num_beams": 3, "num_return_sequences": 3, "width_policy": "fixed"},
    {"strategy": "dsbd", "num_beams": 3, "draft_beams": 6},
    {"strategy": "dsbd", "num_beams": 3, "coupling": "rejection", "top_k": 4, "temperature": 0.7},
    {"strategy": "dsbd", "num_beams": 2, "memory": "single"},
    {"strategy": "beam-sample", "num_beams": 3, "replacement": True, "top_p": 0.8},
    {"strategy": "speculative", "top_k": 1},
    {"strategy": "sample"},
    {"strategy": "speculative-beam-search", "num_beams": 3, "num_return_sequences": 3},
    {"strategy": "beam-search", "num_beams": 2, "num_return_sequences": 2},
    {"strategy": "greedy"},
    {"strategy": "mjsd"},
    {"strategy": "mjgd"},
]


def log_probs(path: tuple[int, ...]) -> np.ndarray:
    logits = np.asarray(TARGET(path), np.float32).astype(np.float64)
    return logits - np.log(np.exp(logits).sum())


def check_top(found: list, path: tuple[int, ...], number: int, token: int, logprob: float) -> None:
    of_path = log_probs(path)
    best = np.argsort(-of_path, kind="stable")[:number]
    assert [token for token, _ in found] == best.tolist()
    np.testing.assert_allclose([x for _, x in found], of_path[best], atol=2e-6)
    assert dict(found).get(token, logprob) == logprob  # to the last bit, for who compares them


def check(result: DecodeResult, number: int) -> None:
    for sequence in result.sequences:
        assert sequence.top_logprobs is not None
        path = PROMPT
        for token, logprob, top in zip(
            sequence.token_ids, sequence.token_logprobs, sequence.top_logprobs, strict=True
        ):
            check_top(top, path, min(number, VOCAB), token, logprob)
            path = (*path, token)


def model_of(table: LogitsOf, head: int) -> TopTable | TableModel:
    return TopTable(VOCAB, table, head, keeps_full=True) if head else TableModel(VOCAB, table)


@pytest.mark.parametrize("head", [0, 9, 6])
@pytest.mark.parametrize("number", [1, 3, 20])
@pytest.mark.parametrize("options", STRATEGIES, ids=str)
def test_top_tokens_are_the_tables(options: dict[str, Any], number: int, head: int) -> None:
    """``head``: of a top-k head, which reads all logits where it returns fewer tokens."""
    if head and "search" not in options["strategy"] and options["strategy"] != "greedy":
        options = {**options, "top_k": options.get("top_k", head) or head}
    config = DecodingConfig(**options, max_new_tokens=8, eos_token_id=EOS, top_logprobs=number)
    plain = DecodingConfig(**options, max_new_tokens=8, eos_token_id=EOS)
    for seed in range(8):
        target, draft = model_of(TARGET, head), model_of(DRAFT, head)
        result = decoded(request_on(config, PROMPT, seed), target, draft)
        check(result, number)
        without = decoded(request_on(plain, PROMPT, seed), target, draft)
        assert all(sequence.top_logprobs is None for sequence in without.sequences)
        assert [s.token_ids for s in without.sequences] == [s.token_ids for s in result.sequences]
        if isinstance(target, TopTable) and number <= head and "search" not in str(options):
            assert not target.rows_read


def test_streamed_tops_are_those_of_the_best_sequence() -> None:
    config = DecodingConfig(
        strategy="dsbd", num_beams=3, max_new_tokens=12, eos_token_id=EOS, top_logprobs=2
    )
    num_shown = 0
    for seed in range(6):
        models = TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT)
        steps = WithResult(decode_iterations(request_on(config, PROMPT, seed), *models))
        shown: list[Any] = []
        for output in steps:
            shown += output.agreed_top_logprobs(len(shown)) or []
            assert len(shown) == len(output.agreed_tokens)
        num_shown += len(shown)
        assert shown == steps.result.sequences[0].top_logprobs[: len(shown)]
    assert num_shown > 12


LONG = tuple(np.random.default_rng(3).integers(0, VOCAB, 2 * SCORED_CHUNK + 7).tolist())


def check_prompt(result: DecodeResult, prompt: tuple[int, ...], number: int) -> None:
    scored = result.prompt_logprobs
    assert scored is not None and scored.token_logprobs[0] is None
    assert len(scored.token_logprobs) == len(prompt)
    wanted = [log_probs(prompt[:i])[prompt[i]] for i in range(1, len(prompt))]
    np.testing.assert_allclose(np.array(scored.token_logprobs[1:], float), wanted, atol=2e-6)
    if not number:
        assert scored.top_logprobs is None
        return
    assert scored.top_logprobs is not None and scored.top_logprobs[0] is None
    for i in range(1, len(prompt)):
        top, own = scored.top_logprobs[i], scored.token_logprobs[i]
        assert top is not None and own is not None
        check_top(top, prompt[:i], number, prompt[i], own)


@pytest.mark.parametrize("head", [0, 3])
@pytest.mark.parametrize("number", [0, 4])
@pytest.mark.parametrize("prompt", [LONG, (4,), (4, 2)], ids=len)
def test_a_prompts_log_probabilities_are_the_tables(
    prompt: tuple[int, ...], number: int, head: int
) -> None:
    options: dict[str, Any] = {"top_k": head} if head else {}
    config = DecodingConfig(
        strategy="sample", max_new_tokens=1, prompt_logprobs=True, top_logprobs=number, **options
    )
    found = decoded(request_on(config, prompt), model_of(TARGET, head))
    check_prompt(found, prompt, number)


def test_rows_in_the_cache_are_computed_again_for_their_logits_and_serve_the_next() -> None:
    scored = DecodingConfig(strategy="sample", max_new_tokens=2, prompt_logprobs=True, seed=0)
    plain = DecodingConfig(strategy="sample", max_new_tokens=2, seed=0)
    target = TableModel(VOCAB, TARGET)
    decoder = BatchedDecoder(target, None)

    def rows(config: DecodingConfig) -> int:
        target.computed_paths.clear()
        result = decoded_next(decoder, request_on(config, LONG))
        if config.prompt_logprobs:
            check_prompt(result, LONG, 0)
        return len(target.computed_paths)

    first, again, scoring, last = rows(plain), rows(plain), rows(scored), rows(plain)
    assert first == scoring == len(LONG) + 1 and again == last == 2


@pytest.mark.parametrize("head", [0, 3])
def test_scored_prompts_with_others(head: int) -> None:
    """Full logits of a top-k head are those of one forward, so such calls are made alone."""
    options: dict[str, Any] = {"top_k": 3, "max_new_tokens": 3}
    configs = [
        DecodingConfig(**options, prompt_logprobs=True, top_logprobs=4),
        DecodingConfig(**options),
        DecodingConfig(**options, prompt_logprobs=True),
        DecodingConfig(**options, strategy="sample", top_logprobs=4),
    ]
    forest = BatchedDecoder(model_of(TARGET, head), model_of(DRAFT, head))
    requests = [request_on(config, LONG, 1) for config in configs]
    results = decoded_together(forest, requests, len(requests))
    check_prompt(results[0], LONG, 4)
    assert results[1].prompt_logprobs is None
    check_prompt(results[2], LONG, 0)
    assert all(len(top) == 4 for top in results[3].sequences[0].top_logprobs)


def test_heads_that_cannot_tell_are_refused_before_any_call() -> None:
    target = TopTable(VOCAB, TARGET, 3)
    for options, message in (
        ({"top_logprobs": 4}, "top_logprobs is 4, but the target's engine returns the 3 largest"),
        ({"prompt_logprobs": True}, "prompt_logprobs is True, but the target's engine returns"),
    ):
        config = DecodingConfig(strategy="sample", top_k=3, **options)
        with pytest.raises(ConfigError, match=message):
            decoded(request_on(config, PROMPT), target)
        assert target.num_rows == 0
