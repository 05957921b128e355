"""Requests with a feature draft share engine calls, prompts and caches too small for them."""

import itertools
from typing import Any

import numpy as np
import pytest

from dsbd_forward.spec import EngineSpec
from dsbd_ort.decoding import DecodingConfig
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.errors import DecodingError
from dsbd_ort.decoding.kv_cache import PREFILL_CHUNK, PrefixCache, PromptFeature
from dsbd_ort.decoding.node_features import align_prefixes
from dsbd_ort.decoding.request import Preempts
from dsbd_ort.decoding.whole_requests import decoded_together
from tests.decoding.feature_tables import TableDraft, TableFeatures, TableTarget, pair_of
from tests.decoding.preempting import request_of
from tests.decoding.tables import (
    all_tokens,
    decoded,
    decoded_next,
    mixed_table,
    outcomes,
    random_table,
    request_on,
)

VOCAB, EOS = 6, 5
TARGET = random_table(1, VOCAB)
OTHER = random_table(2, VOCAB)
GOOD, POOR = mixed_table(TARGET, OTHER, 0.8), mixed_table(TARGET, OTHER, 0.5)
KINDS: list[dict[str, Any]] = [
    {"strategy": "dsbd", "num_beams": 3, "width_policy": "fixed"},
    {"strategy": "dsbd", "num_beams": 2, "width_policy": "fixed", "draft_policy": "throughput"},
    {"strategy": "dsbd", "num_beams": 3, "coupling": "rejection"},
    {"strategy": "dsbd", "num_beams": 2, "memory": "single"},
    {"strategy": "speculative", "draft_length": 5},
    {"strategy": "beam-sample", "num_beams": 3},
    {"strategy": "speculative-beam-search", "num_beams": 3},
    {"strategy": "mjsd", "draft_beams": 2},
    {"strategy": "speculative", "drafter": "model+ngram", "draft_length": 4},
]
LONG = tuple(np.random.default_rng(0).integers(5, size=600).tolist())


def several() -> tuple[TableTarget, TableDraft]:
    return pair_of(VOCAB, TARGET, GOOD, POOR, several=True)


def alone(kind: dict[str, Any], prompt: tuple[int, ...], seed: int, *more: int) -> list[Any]:
    request = request_of(kind, prompt, seed, *more)
    (result,) = decoded_together(BatchedDecoder(*several()), [request], 1)
    return all_tokens(result)


PROMPTS = [(1,), (1, 2, 3), (1, 2, 3, 4), (0, 4), LONG[:300], (1, 2, 3), LONG[:300], LONG]


def test_all_kinds_share_a_forest() -> None:
    """Calls with and without features stand in one forward of the target."""
    cases = [(kind, PROMPTS[i % 8], i) for i, kind in enumerate(2 * KINDS)]
    requests = [request_of(*case, 12, EOS) for case in cases]
    target, draft = several()
    results = decoded_together(BatchedDecoder(target, draft), requests, 9)
    assert [all_tokens(result) for result in results] == [alone(*case, 12, EOS) for case in cases]
    assert 0 < target.num_features < len(target.computed_paths)  # not those of beam-sample


FIXED = {"strategy": "dsbd", "num_beams": 2, "width_policy": "fixed"}


def test_a_request_without_drafts_shares_no_rows_of_the_draft() -> None:
    """They could not be computed again: its rows of the target are, without features."""
    forest = BatchedDecoder(*several())
    forest.join(request_of(FIXED, LONG[:40], 0, 3))
    for _ in range(3):
        forest.iterate()
    plain = {"strategy": "beam-sample", "num_beams": 2}
    member = forest.join(request_of(plain, LONG[:40], 1))
    while forest.num_live > 1:
        forest.iterate()
    for cache in forest.caches.values():
        cache.forget()
    forest.preempt(member)
    forest.resume(member)
    assert all_tokens(outcomes(forest)[member]) == alone(plain, LONG[:40], 1)


def test_prefixes_are_reused_and_the_draft_finds_its_features() -> None:
    """One conversation: a prompt, the same again, its text and more, another end."""
    target, draft = several()
    decoder = BatchedDecoder(target, draft)
    config = DecodingConfig(max_new_tokens=12, draft_length=3, num_beams=2, eos_token_id=EOS)
    first = LONG[:280]
    answer = alone_tokens(config, first)
    for prompt, most_rows in (
        (first, 1000),
        (first, 0),  # the rows of the prompt are there, and the feature of its last
        ((*first, *answer, 1, 2), 2 + len(answer)),
        ((*LONG[:200], 3, 3, 3), 4),  # one row again for its feature, two of the prompt
    ):
        before = len(target.computed_paths)
        result = decoded_next(decoder, request_on(config, prompt))
        assert result.sequences[0].token_ids == alone_tokens(config, prompt)
        rows = [path for path in target.computed_paths[before:] if len(path) < len(prompt)]
        assert len(rows) <= most_rows


def at_every_call() -> Preempts:
    """Preempt before each call, but not before its rows are computed again."""
    flags = itertools.cycle((True, False, False))
    return lambda _: next(flags)


def test_a_request_without_drafts_that_is_preempted_leaves_the_rows_of_the_draft() -> None:
    """It cannot compute them again: they come from features, which it does not have."""
    decoder = BatchedDecoder(*several())
    drafted = DecodingConfig(max_new_tokens=4, draft_length=2, num_beams=2)
    plain = DecodingConfig(strategy="beam-sample", max_new_tokens=4, num_beams=2)
    for config, preempts in ((drafted, None), (plain, at_every_call()), (drafted, None)):
        result = decoded_next(decoder, request_on(config, (1, 2, 3), preempts=preempts))
        assert result.sequences[0].token_ids == alone_tokens(config, (1, 2, 3))


def alone_tokens(config: DecodingConfig, prompt: tuple[int, ...]) -> list[int]:
    return decoded(request_on(config, prompt), *several()).sequences[0].token_ids


ALIGNED = [  # rows of target and draft, tokens before the kept feature; rows left of the target
    (0, 0, None, 0),
    (7, 5, None, 4),
    (7, 7, None, 6),
    (7, 7, 7, 7),
    (7, 7, 5, 6),
    (5, 7, None, 5),
    (7, 0, None, 0),
]


@pytest.mark.parametrize(("num_target", "num_draft", "kept", "num_left"), ALIGNED)
def test_the_target_reuses_what_leaves_the_draft_its_features(
    num_target: int, num_draft: int, kept: int | None, num_left: int
) -> None:
    feature = kept and PromptFeature(kept, TableFeatures("target", [(1,)]))
    target = PrefixCache(list(range(num_target)), np.arange(num_target), feature or None)
    align_prefixes(target, PrefixCache(list(range(num_draft)), np.arange(num_draft)))
    assert (len(target.tokens), len(target.rows)) == (num_left, num_left)
    assert (target.feature is None) == (kept is None or kept > num_left)


def test_long_prompts_are_read_by_both_engines_chunk_by_chunk() -> None:
    """No more of the prompt's features than one chunk is ever held."""
    target, draft = several()
    forest = BatchedDecoder(target, draft)
    member = forest.join(request_of(FIXED, LONG, 0))
    for num_chunks in (1, 2):
        forest.iterate()
        assert len(target.computed_paths) == num_chunks * PREFILL_CHUNK
        assert len(draft.computed_paths) == (num_chunks - 1) * PREFILL_CHUNK
    assert member.views["draft"].own_features is not None


def test_a_target_without_features_is_refused() -> None:
    _, draft = several()
    plain = pair_of(VOCAB, TARGET, GOOD, POOR)[0]
    plain.spec = EngineSpec(vocab_size=VOCAB)
    with pytest.raises(DecodingError, match="but the target returns none; use the target of the"):
        BatchedDecoder(plain, draft).join(request_of(FIXED, (1, 2), 0))
