"""The draft's context: it reads the end of a prompt, begins again, and changes no output."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from dsbd_ort.decoding import DecodeResult, DecodingConfig, TableModel
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.drafting.acceptance import SIZES, WHOLE, AcceptanceEstimator
from dsbd_ort.decoding.drafting.cost_curve import CostCurve, EngineCosts, RequestCosts
from dsbd_ort.decoding.drafting.draft_context import DraftContext, start_of
from tests.decoding.tables import (
    LogitsOf,
    all_tokens,
    decoded,
    decoded_next,
    mixed_table,
    outcomes,
    prefix_of,
    random_table,
    request_on,
)
from tests.decoding.test_late_prompt import LateCosts

VOCAB = 12


def of_last(table: LogitsOf) -> LogitsOf:
    """A model that looks at the last three tokens alone, however much it reads."""
    return lambda path: table(path[-3:])


TARGET = random_table(1, VOCAB)
NEAR = of_last(random_table(2, VOCAB))
LOCAL_TARGET = mixed_table(NEAR, random_table(3, VOCAB), 0.9)
PROMPT = tuple(np.random.default_rng(4).integers(VOCAB, size=100).tolist())
COSTS = EngineCosts(CostCurve((1, 8), (1e-2, 1.05e-2)), CostCurve((1, 8), (1e-4, 2e-4)))
KINDS: list[dict[str, Any]] = [
    {"strategy": "speculative"},
    {"strategy": "dsbd", "num_beams": 2},
    {"strategy": "dsbd", "num_beams": 4, "draft_beams": 6},
    {"strategy": "dsbd", "num_beams": 3, "coupling": "rejection"},
    {"strategy": "speculative-beam-search", "num_beams": 4},
    {"strategy": "mjsd"},
]


def answer(
    kind: dict[str, Any], draft: TableModel | None, context: int | str, **more: Any
) -> DecodeResult:
    shape = {"max_new_tokens": 60, "eos_token_id": None, "draft_length": 3}
    config = DecodingConfig(**{**shape, **kind, "draft_context": context})  # type: ignore[arg-type]
    target = more.pop("target", None) or TableModel(VOCAB, LOCAL_TARGET)
    return decoded(request_on(config, PROMPT, 5, **more), target, draft)


@pytest.mark.parametrize("begin_token", [None, PROMPT[0]])
@pytest.mark.parametrize(("size", "start"), [(16, 80), (99, 0), ("all", 0), ("auto", 0)])
def test_the_draft_reads_the_end_of_the_prompt(
    size: int | str, start: int, begin_token: int | None
) -> None:
    draft = TableModel(VOCAB, NEAR)
    result = answer({"num_beams": 2, "max_new_tokens": 8}, draft, size, begin_token=begin_token)
    begin = () if begin_token is None or not start else (begin_token,)
    read = (*begin, *PROMPT[start:])
    assert draft.computed_paths[: len(read) - 1] == [read[:end] for end in range(1, len(read))]
    assert all(path[: len(read)] == read for path in draft.computed_paths[len(read) - 1 :])
    assert result.stats.draft_rows == len(draft.computed_paths)


@pytest.mark.parametrize("preempts", [False, True])
@pytest.mark.parametrize("begin_token", [None, PROMPT[0]])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_path_that_outgrows_the_draft_begins_again(
    kind: dict[str, Any], begin_token: int | None, preempts: bool
) -> None:
    """With a draft that looks at few tokens all is as with a context without end."""
    whole = answer(kind, TableModel(VOCAB, NEAR), "all")
    number = itertools.count(1)
    more: dict[str, Any] = {"begin_token": begin_token}
    if preempts:
        more["preempts"] = lambda call: next(number) % 7 == 0
    for size, limit in ((10, None), ("all", 24), ("auto", 30), (64, 24)):
        draft = TableModel(VOCAB, NEAR, context_length=limit)
        result = answer(kind, draft, size, **more)
        assert all_tokens(result) == all_tokens(whole)
        stats = result.stats
        assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (
            whole.stats.num_draft_tokens,
            whole.stats.num_accepted_tokens,
        )
        assert max(map(len, draft.computed_paths)) <= (limit or 23)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_after_a_rejected_draft_the_path_goes_on(kind: dict[str, Any]) -> None:
    """A long draft that is rejected ends far beyond the tokens that the next one continues."""
    kind, far = {**kind, "draft_length": 9}, of_last(random_table(6, VOCAB))
    plain, short = (answer(kind, TableModel(VOCAB, far), size) for size in ("all", 2))
    assert all_tokens(short) == all_tokens(plain)
    assert short.stats.num_draft_tokens == plain.stats.num_draft_tokens


@pytest.mark.parametrize("kind", KINDS[:2], ids=str)
def test_requests_together_have_drafts_that_begin_again(kind: dict[str, Any]) -> None:
    shape = {"max_new_tokens": 40, "eos_token_id": None, "draft_length": 3, "draft_context": "all"}
    config = DecodingConfig(**{**shape, **kind})
    draft = TableModel(VOCAB, NEAR, context_length=24)
    decoder = BatchedDecoder(TableModel(VOCAB, LOCAL_TARGET), draft, max_rows=300)
    members = [decoder.join(request_on(config, PROMPT, seed)) for seed in range(3)]
    found = outcomes(decoder)
    for seed, member in enumerate(members):
        alone = request_on(config, PROMPT, seed)
        models = TableModel(VOCAB, LOCAL_TARGET), TableModel(VOCAB, NEAR)
        assert all_tokens(found[member]) == all_tokens(decoded(alone, *models))
    reads = [path for path in draft.computed_paths if path == PROMPT[84 : 84 + len(path)]]
    reads = [path for path in reads if 5 < len(path) <= 15]
    assert len(reads) == len(set(reads)) == 10  # of one prompt by three requests


def test_a_draft_without_positions_for_what_it_missed_rests_for_good() -> None:
    """Two beams go on without a draft for longer than its context, then it would be cheap."""
    kind = {"strategy": "dsbd", "num_beams": 2, "max_new_tokens": 60, "draft_policy": "throughput"}
    plain = answer({**kind, "draft_policy": "fixed"}, TableModel(VOCAB, NEAR), "all")
    draft = TableModel(VOCAB, NEAR, context_length=24)
    late = answer(kind, draft, "all", costs=LateCosts(40), estimator=AcceptanceEstimator())
    assert all_tokens(late) == all_tokens(plain)
    assert late.stats.draft_calls == 0


def test_a_prompt_that_ends_alike_is_read_once() -> None:
    draft = TableModel(VOCAB, NEAR)
    decoder = BatchedDecoder(TableModel(VOCAB, LOCAL_TARGET), draft)
    config = DecodingConfig(num_beams=2, max_new_tokens=8, draft_context=16)
    first = decoded_next(decoder, request_on(config, PROMPT, 5))
    assert len(draft.computed_paths) == first.stats.draft_rows
    assert len(prefix_of(decoder, "draft", PROMPT[80:]).tokens) >= len(PROMPT) - 81
    again = decoded_next(decoder, request_on(config, PROMPT, 5))
    assert first.stats.draft_rows - again.stats.draft_rows == 19  # all except the last token
    assert all_tokens(first) == all_tokens(again)


def context_of(
    draft: float,
    num_new: int,
    estimator: AcceptanceEstimator | None = None,
    most: int | None = None,
) -> DraftContext:
    """A context of a request with 1,000 prompt tokens; a draft's call takes this many seconds."""
    curve = CostCurve((1, 256), (draft, 256 * draft))
    costs = EngineCosts(CostCurve((1, 8), (1e-2, 1.1e-2)), curve)
    priced = RequestCosts(
        costs, lambda: 1, num_beams=1, most_rows=40, most_beams=4, has_draft_model=True
    )
    lengths = 1001, num_new, 8
    return DraftContext("auto", most, None, lengths, priced, estimator or AcceptanceEstimator())


def size_chosen(context: DraftContext, num_cached: int = 0) -> int:
    context.choose(1000, lambda start: num_cached if not start else 0)
    assert context.start == (0 if context.size == WHOLE else start_of(1000, context.size))
    return context.size


def test_the_size_is_chosen_by_price_and_length() -> None:
    """Reading costs the draft a thousandth, or a half, of a target call for each token."""
    assert size_chosen(context_of(1e-5, 512)) == WHOLE
    sizes = [size_chosen(context_of(1e-3, num_new)) for num_new in (8, 256, 2048, 100_000)]
    assert sizes == sorted(sizes) and sizes[0] == SIZES[0] and sizes[-1] == WHOLE
    assert size_chosen(context_of(1e-3, 256), num_cached=990) == WHOLE  # the next turn of a chat
    assert size_chosen(context_of(1e-5, 512, most=512)) == 256


def test_earlier_answers_and_drafts_are_taken_into_account() -> None:
    short = AcceptanceEstimator()
    for _ in range(30):
        short.learn_length(8)
    usual = size_chosen(context_of(1e-3, 2048))
    assert size_chosen(context_of(1e-3, 2048, short)) < usual
    poor = AcceptanceEstimator()
    for _ in range(2000):
        poor.learn_agreement(WHOLE, agrees=True)
        poor.learn_agreement(64, agrees=False)
    assert poor.agreement(64) < 0.2 < 0.85 < poor.agreement(128) <= 1.0
    assert size_chosen(context_of(1e-3, 256, poor)) > 64
