"""Times in the output, and tokens that may not begin it, as transformers' Whisper has them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as theirs

from dsbd_forward.logits import DenseLogits
from dsbd_ort.decoding import ConfigError, DecodingConfig, DecodingError
from dsbd_ort.decoding.logits_processing.request_processing import RequestProcessing
from dsbd_ort.decoding.table_model import TableModel
from dsbd_ort.decoding.whole_requests import decode
from tests.decoding.path_constraint import PathConstraint, some_tokens
from tests.decoding.tables import random_table
from tests.decoding.top_table import TopTable

pytestmark = pytest.mark.usefixtures("both_loops")

VOCAB, EOS, NO_TIMESTAMPS = 60, 20, 24
FIRST = NO_TIMESTAMPS + 1
OPTIONS: dict[str, Any] = {
    "suppress_tokens": [3, 4, EOS + 1],
    "begin_suppress_tokens": [5, EOS],
    "no_timestamps_token_id": NO_TIMESTAMPS,
    "max_initial_timestamp_index": 10,
}


def transformers_scores(
    prompt: list[int], new: list[int], logits: np.ndarray, options: dict[str, Any]
) -> np.ndarray:
    """The scores that transformers' processors leave, in the order of its Whisper."""
    config = SimpleNamespace(
        no_timestamps_token_id=NO_TIMESTAMPS,
        eos_token_id=EOS,
        bos_token_id=None,
        max_initial_timestamp_index=options.get("max_initial_timestamp_index"),
    )
    processors = [
        theirs.SuppressTokensAtBeginLogitsProcessor(options["begin_suppress_tokens"], len(prompt)),
        theirs.SuppressTokensLogitsProcessor(options["suppress_tokens"]),
        theirs.WhisperTimeStampLogitsProcessor(config, begin_index=len(prompt)),
    ]
    scores = torch.from_numpy(logits)
    for processor in processors:
        scores = processor(torch.tensor([[*prompt, *new]]), scores)
    return scores[0].numpy()


def drawn_paths(number: int) -> list[list[int]]:
    """New tokens as the rules allow them, and as they do not."""
    rng = np.random.default_rng(0)
    paths: list[list[int]] = [[]]
    for index in range(number):
        new: list[int] = [FIRST + int(rng.integers(0, 5))]
        while len(new) < index % 9:
            kind = rng.integers(0, 3)
            latest = max([token for token in new if token >= FIRST], default=FIRST)
            new.append(int(rng.integers(0, EOS) if kind else min(latest + kind, VOCAB - 1)))
        paths.append(new)
    return paths


def check_scores(
    config: DecodingConfig,
    prompt: list[int],
    new: list[int],
    logits: np.ndarray,
    scores: np.ndarray,
) -> None:
    """Compare the distribution after a path with transformers' scores."""
    processing = RequestProcessing(config, None, prompt, VOCAB)
    for node, token in enumerate(new):
        for states in processing.path_states:
            states.add(np.array([node]), np.array([token]))
    nodes = np.array([len(new)])
    found = processing.distributions(DenseLogits(logits), nodes, is_draft=False)[0]
    assert found.tokens.tolist() == np.flatnonzero(np.isfinite(scores)).tolist()
    wanted = scores[found.tokens] - np.logaddexp.reduce(scores[found.tokens])
    np.testing.assert_allclose(found.log_probs, wanted, atol=1e-5)


@pytest.mark.parametrize("scale", [0.3, 3.0])
@pytest.mark.parametrize("index", [10, None])
def test_scores_are_those_of_transformers(scale, index):
    options = {**OPTIONS, "max_initial_timestamp_index": index}
    config = DecodingConfig(strategy="sample", eos_token_id=EOS, **options)
    prompt = [21, FIRST + 3, 22]  # a time in the prompt is none of the output
    num_preferred = 0
    for seed, new in enumerate(drawn_paths(60)):
        rng = np.random.default_rng(seed)
        logits = (scale * rng.normal(size=(1, VOCAB))).astype(np.float32)
        scores = transformers_scores(prompt, new, logits, options)
        num_preferred += not np.isfinite(scores[:FIRST]).any()
        check_scores(config, prompt, new, logits, scores)
    assert 10 < num_preferred < 60  # some because the times together are more probable


NUM_WORDS = 5  # after the times


@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_tokens_after_the_last_time_are_those_of_texts(scale):
    """As in transformers, had the same tokens their place among those of texts."""
    order = np.roll(np.arange(VOCAB), NUM_WORDS)  # token by its place in the other vocabulary
    place = np.argsort(order)
    config = DecodingConfig(
        strategy="sample",
        eos_token_id=EOS,
        no_timestamps_token_id=NO_TIMESTAMPS,
        max_initial_timestamp_index=10,
        last_timestamp_token_id=VOCAB - NUM_WORDS - 1,
    )
    moved = SimpleNamespace(
        no_timestamps_token_id=int(place[NO_TIMESTAMPS]),
        eos_token_id=int(place[EOS]),
        bos_token_id=None,
        max_initial_timestamp_index=10,
    )
    rules = theirs.WhisperTimeStampLogitsProcessor(moved, begin_index=2)
    num_words = 0
    for seed, new in enumerate(drawn_paths(60)):
        rng = np.random.default_rng(seed)
        words = rng.integers(VOCAB - NUM_WORDS, VOCAB, len(new))
        new = [w if t < EOS and w % 2 else t for w, t in zip(words.tolist(), new, strict=True)]
        new = [token if token < FIRST else min(token, 40) for token in new] if seed % 2 else new
        logits = (scale * rng.normal(size=(1, VOCAB))).astype(np.float32)
        ids = torch.tensor([place[[21, 22, *new]].tolist()])
        scores = rules(ids, torch.from_numpy(logits[:, order]))[0].numpy()[place]
        check_scores(config, [21, 22], new, logits, scores)
        num_words += bool(np.isfinite(scores[VOCAB - NUM_WORDS :]).any())
    assert num_words > 10


STRATEGIES = [  # (a strategy, the one that drafts and returns the same, options of both)
    ("greedy", "speculative-beam-search", {"num_beams": 1}),
    ("beam-search", "speculative-beam-search", {"num_beams": 4}),
    ("sample", "speculative", {"top_k": 8}),
    ("beam-sample", "dsbd", {"num_beams": 3, "top_k": 8}),
]


def decoded(target: Any, draft: Any, **options: Any) -> list[list[int]]:
    config = DecodingConfig(eos_token_id=EOS, max_new_tokens=12, **{**OPTIONS, **options})
    result = decode(target, draft, [21, 22], config, np.random.default_rng(3))
    return [sequence.token_ids for sequence in result.sequences]


@pytest.mark.parametrize(("plain", "drafted", "options"), STRATEGIES)
def test_drafted_and_with_a_top_k_head_as_plain(plain, drafted, options):
    """A head that returns a few of the tokens: all of a row are read, for their sum."""
    for seed in range(6):
        table, other = random_table(seed, VOCAB), random_table(seed + 100, VOCAB)
        wanted = decoded(TableModel(VOCAB, table), None, strategy=plain, **options)
        assert all(tokens[0] >= FIRST for tokens in wanted)
        few = TopTable(VOCAB, table, 8, keeps_full=True)
        assert decoded(few, None, strategy=plain, **options) == wanted
        drafting = {"strategy": drafted, "draft_length": 3, **options}
        for draft in (TableModel(VOCAB, other), TopTable(VOCAB, other, 8)):
            assert decoded(TableModel(VOCAB, table), draft, **drafting) == wanted


def test_a_head_that_keeps_no_other_logits_is_refused():
    top = TopTable(VOCAB, random_table(0, VOCAB), 8)
    with pytest.raises(ConfigError, match="no_timestamps_token_id may raise tokens"):
        decoded(top, None, strategy="sample", top_k=8)


def test_tokens_that_may_not_begin_come_after_a_forced_first_one():
    """As transformers has it: after the forced token of a prompt of one token."""
    table = random_table(0, VOCAB)
    config = DecodingConfig(
        strategy="sample",
        forced_bos_token_id=7,
        begin_suppress_tokens=list(range(VOCAB - 1)),
        max_new_tokens=3,
    )
    result = decode(TableModel(VOCAB, table), None, [21], config, np.random.default_rng(0))
    assert result.sequences[0].token_ids[:2] == [7, VOCAB - 1]


WRONG = [
    ({"no_timestamps_token_id": VOCAB}, DecodingError, "no_timestamps_token_id has token id 60"),
    ({"begin_suppress_tokens": [VOCAB]}, DecodingError, "begin_suppress_tokens has token id 60"),
    ({"no_timestamps_token_id": None}, ConfigError, "max_initial_timestamp_index is 10, which"),
    ({"no_timestamps_token_id": True}, ConfigError, "expected a whole number"),
]


@pytest.mark.parametrize(("options", "kind", "words"), WRONG)
def test_wrong_values_are_refused(options, kind, words):
    with pytest.raises(kind, match=words):
        decoded(TableModel(VOCAB, random_table(0, VOCAB)), None, strategy="greedy", **options)


def test_a_constraint_with_times_is_refused():
    constraint = PathConstraint(VOCAB, some_tokens(VOCAB, always=(EOS,)), (EOS,))
    with pytest.raises(ConfigError, match="compare the times with all other tokens"):
        DecodingConfig(strategy="sample", constraint=constraint, no_timestamps_token_id=24)
