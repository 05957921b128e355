"""Engines with a gather head: the tokens of the dense engine, from the allowed logits alone."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from dsbd_forward.forward import Forward, ForwardResult
from dsbd_forward.logits import GatheredLogits
from dsbd_ort.constraints import TokenTrie
from dsbd_ort.decoding import (
    DecodingConfig,
    DecodingRequest,
    ModelError,
    TableModel,
    decode_iterations,
)
from dsbd_ort.decoding.batched_decoder import BatchedDecoder, decoded_together
from dsbd_ort.decoding.result import result_of
from dsbd_ort.decoding.trace import RequestTrace
from tests.decoding.gather_table import GatherTable
from tests.decoding.path_constraint import PathConstraint, some_tokens
from tests.decoding.preempting import COSTS
from tests.decoding.tables import mixed_table, random_table

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
    {"strategy": "dsbd", "num_beams": 3, "draft_policy": "throughput"},
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


def gathering() -> tuple[GatherTable, GatherTable]:
    return GatherTable(VOCAB, TARGET), GatherTable(VOCAB, DRAFT)


def decoded(
    models: tuple[Any, Any],
    config: DecodingConfig,
    seed: int,
    prompt: tuple[int, ...] = PROMPT,
    **others: Any,
) -> Any:
    draft = models[1] if config.has_draft_model else None
    rng = np.random.default_rng(seed)
    if config.draft_policy == "throughput":
        ticks = itertools.count()  # of a clock that depends on nothing else
        others |= {"costs": copy.deepcopy(COSTS), "clock": lambda: 1e-3 * next(ticks)}
    return result_of(
        decode_iterations(
            DecodingRequest(prompt_ids=prompt, config=config, rng=rng, **others), models[0], draft
        )
    )


@pytest.mark.parametrize("end", ["leaf", "eos"])
@pytest.mark.parametrize("options", REQUESTS, ids=lambda o: "-".join(map(str, o.values())))
def test_same_tokens_as_the_dense_engine(options: dict[str, Any], end: str) -> None:
    for seed in range(4):
        config = config_of(end, **options)
        dense = TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT)
        expected = decoded(dense, config, seed)
        models = gathering()
        found = decoded(models, config, seed)
        assert [s.token_ids for s in found.sequences] == [s.token_ids for s in expected.sequences]
        for gathered, whole in zip(found.sequences, expected.sequences, strict=True):
            # float32 of the log-sum is all that differs
            assert gathered.token_logprobs == pytest.approx(whole.token_logprobs, abs=2e-6)
        assert found.stats.target_rows == expected.stats.target_rows
        assert models[0].num_whole_rows == models[1].num_whole_rows == 0
        assert sum(models[0].num_pairs) > 0


def test_the_pairs_are_what_the_trie_allows() -> None:
    trie = TokenTrie.from_sequences([[1, 2], [1, 3], [4, 9], [4]])
    model = GatherTable(VOCAB, TARGET)
    config = config_of(strategy="beam-search", num_beams=2, constraint=trie)
    decoded((model, None), config, 0)
    # the two first tokens; then 2 and 3 after 1, and 9 or the end after 4; no row for the leaves
    assert model.num_pairs == [2, 4]


WHOLE_ROWS: list[dict[str, Any]] = [
    {"constraint": None},
    {"top_logprobs": 2},
    {"constraint": PathConstraint(VOCAB, some_tokens(VOCAB, (EOS,)), (EOS,), as_bits=True)},
]


@pytest.mark.parametrize("options", WHOLE_ROWS, ids=lambda o: next(iter(o)))
def test_what_needs_other_tokens_reads_whole_rows(options: dict[str, Any]) -> None:
    config = config_of(**{"strategy": "dsbd", "num_beams": 3, "num_return_sequences": 3, **options})
    models = gathering()
    found = decoded(models, config, 1)
    expected = decoded((TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT)), config, 1)
    assert [s.token_ids for s in found.sequences] == [s.token_ids for s in expected.sequences]
    for mine, theirs in zip(found.sequences, expected.sequences, strict=True):
        assert mine.token_logprobs == pytest.approx(theirs.token_logprobs, abs=2e-6)
    assert models[0].num_whole_rows > 0 and not sum(models[0].num_pairs)


def test_a_trace_notes_what_the_trie_forbids() -> None:
    models, trace = gathering(), RequestTrace()
    config = config_of(strategy="beam-search", num_beams=2)
    decoded(models, config, 0, trace=trace)
    assert models[0].num_whole_rows > 0
    assert any(node.forbidden for one in trace.iterations for node in one.nodes)


def test_shared_calls_give_each_what_it_would_get_alone() -> None:
    configs = [config_of(**options) for options in REQUESTS if options["strategy"] != "mjsd"]
    configs = [c for c in configs if c.draft_policy != "throughput"]
    whole = DecodingConfig(strategy="dsbd", num_beams=2, max_new_tokens=6, eos_token_id=EOS)
    configs = [config.settled(costs_are_known=False) for config in [*configs, whole, *configs]]
    models = gathering()
    decoder = BatchedDecoder(*models)
    prompts = [(seed % VOCAB, *PROMPT * (1 + seed % 3)) for seed in range(len(configs))]
    requests = [
        DecodingRequest(prompt_ids=prompt, config=config, rng=np.random.default_rng(seed))
        for seed, (prompt, config) in enumerate(zip(prompts, configs, strict=True))
    ]
    results = decoded_together(decoder, requests, most_live=5)
    assert models[0].num_whole_rows > 0 < sum(models[0].num_pairs)
    for seed, (config, result) in enumerate(zip(configs, results, strict=True)):
        alone = decoded(gathering(), config, seed, prompts[seed])
        assert result.sequences == alone.sequences, config


class Wrong(GatherTable):
    """Returns something else of the right kind."""

    def __init__(self, part: str, change: Any) -> None:
        super().__init__(VOCAB, TARGET)
        self.change = part, change

    def forward(self, forward: Forward) -> ForwardResult:
        result = super().forward(forward)
        part, change = self.change
        found = result.logits
        if not isinstance(found, GatheredLogits) or not len(found.values):
            return result
        return ForwardResult(dataclasses.replace(found, **{part: change(getattr(found, part))}))


WRONG = [
    ("values", lambda a: a[1:], r"call 2 of the target: .* gathered_logits of shape .* per pair"),
    ("logsumexp", lambda a: a[1:], "returned logsumexp of shape"),
    ("values", lambda a: a * np.nan, "returned gathered_logits with NaN or infinity"),
    ("logsumexp", lambda a: a + np.inf, "without a finite largest value"),
]


@pytest.mark.parametrize(("part", "change", "said"), WRONG)
def test_wrong_results_are_refused(part: str, change: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        decoded((Wrong(part, change), None), config_of(strategy="sample"), 0)
