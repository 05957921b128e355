"""Calls and rows of requests under a trie: what is known costs no draft row, leaves cost none."""

from typing import Any

import numpy as np
import pytest

from dsbd_ort.constraints import TokenTrie
from dsbd_ort.decoding import DecodingConfig, TableModel
from dsbd_ort.decoding.batched_decoder import BatchedDecoder
from dsbd_ort.decoding.drafting.cost_curve import CostCurve, EngineCosts
from dsbd_ort.decoding.result import DecodeResult
from dsbd_ort.decoding.row_bounds import most_rows
from tests.decoding.tables import decoded as on_tables
from tests.decoding.tables import mixed_table, random_table, request_on

VOCAB, EOS = 30, 29
PROMPT = (1, 0, 1)
TARGET = random_table(7, VOCAB)
DRAFT = mixed_table(TARGET, random_table(8, VOCAB), 0.5)
PREFILL = 2  # rows, in one call: the prompt without its last token
CHEAP_ROWS = EngineCosts(CostCurve((1, 64), (1e-2, 1.1e-2)), CostCurve((1, 64), (2e-3, 2.1e-3)))
DEAR_ROWS = EngineCosts(CostCurve((1, 64), (1e-3, 64e-3)), CostCurve((1, 64), (2e-3, 2.1e-3)))
FAR_TOO_DEAR = CostCurve((1, 64), (1.0, 64.0))  # for a draft


def decoded(
    sequences: list[list[int]],
    strategy: str = "speculative-beam-search",
    end: str = "leaf",
    costs: EngineCosts | None = None,
    **options: Any,
) -> DecodeResult:
    trie = TokenTrie.from_sequences(sequences, end=end)
    config = DecodingConfig(
        strategy=strategy, constraint=trie, eos_token_id=EOS, **{"max_new_tokens": 12, **options}
    )
    draft = TableModel(VOCAB, DRAFT) if config.has_draft_model else None
    return on_tables(request_on(config, PROMPT, costs=costs), TableModel(VOCAB, TARGET), draft)


def counts(result: DecodeResult) -> tuple[int, int, int, int]:
    """Target calls, target rows, draft calls, draft rows."""
    stats = result.stats
    return stats.target_calls, stats.target_rows, stats.draft_calls, stats.draft_rows


CHAIN = [[3, 4, 6, 7]]
SPECULATIVE: list[dict[str, Any]] = [
    {"strategy": "speculative-beam-search", "num_beams": 1},
    {"strategy": "speculative-beam-search", "num_beams": 3, "num_return_sequences": 1},
    {"strategy": "dsbd", "num_beams": 2},
    {"strategy": "speculative"},
]


@pytest.mark.parametrize("options", SPECULATIVE, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("policy", ["fixed", "throughput"])
def test_a_chain_takes_one_call_and_no_draft_row(options: dict[str, Any], policy: str) -> None:
    given = {"draft_length": 1} if policy == "fixed" else {"costs": CHEAP_ROWS}
    found = decoded(CHAIN, draft_policy=policy, **given, **options)
    assert found.sequences[0].token_ids == CHAIN[0]
    # the root and three of the four tokens; the leaf has no row
    assert counts(found) == (1 + 1, PREFILL + 4, 0, 0)


def test_a_chain_ends_with_a_row_for_an_end_token() -> None:
    found = decoded(CHAIN, end="eos", num_beams=1, draft_policy="fixed", draft_length=1)
    assert found.sequences[0].token_ids == [*CHAIN[0], EOS]
    assert counts(found) == (1 + 1, PREFILL + 5, 0, 0)


def test_without_a_draft_every_token_takes_a_call() -> None:
    found = decoded(CHAIN, "beam-search", num_beams=2)
    assert counts(found)[:2] == (1 + 4, PREFILL + 4)


def test_of_a_long_chain_four_layers_are_forced_at_a_time() -> None:
    found = decoded([list(range(2, 14))], num_beams=1, draft_policy="fixed", draft_length=1)
    # [root + 4], [5 more], the last but one and the last token's parent
    assert counts(found) == (1 + 3, PREFILL + 12, 0, 0)


def test_nothing_is_drafted_below_the_last_choice() -> None:
    leaves = [[first, last] for first in (3, 4) for last in range(5, 15)]
    fixed = {"draft_policy": "fixed", "draft_length": 3, "draft_beams": 2}
    found = decoded(leaves, num_beams=2, num_return_sequences=2, **fixed)
    # Both first tokens are drafted by the trie: two candidates, as many as draft_beams.
    assert counts(found) == (1 + 1, PREFILL + 3, 0, 0)
    three = [[*path, token] for path in leaves for token in (20, 21)]
    found = decoded(three, num_beams=2, num_return_sequences=2, **fixed)
    # The second layer is the model's, by one call of its first rows. The third is leaves, and so
    # is what follows where the target has chosen others.
    assert counts(found)[2:] == (1 + 1, PREFILL + 3)
    plain = decoded(three, "beam-search", num_beams=2, num_return_sequences=2)
    assert [s.token_ids for s in found.sequences] == [s.token_ids for s in plain.sequences]


def test_a_trie_of_single_children_takes_one_call_for_all_beams() -> None:
    items = [[first, first + 1, first + 2, first + 3] for first in range(2, 10)]
    given = {"num_beams": 8, "num_return_sequences": 8}
    found = decoded(items, draft_policy="fixed", draft_length=1, draft_beams=8, **given)
    # eight chains of four tokens, the last of which have no rows
    assert counts(found) == (1 + 1, PREFILL + 1 + 8 * 3, 0, 0)
    plain = decoded(items, "beam-search", **given)
    assert counts(plain)[:2] == (1 + 4, PREFILL + 1 + 8 * 3)
    assert [s.token_ids for s in found.sequences] == [s.token_ids for s in plain.sequences]
    assert [s.logprob for s in found.sequences] == pytest.approx(
        [s.logprob for s in plain.sequences], abs=1e-9
    )


def test_small_subtrees_are_drafted_whole_where_rows_are_cheap() -> None:
    items = [[a, b, c] for a in (2, 3) for b in (4, 5) for c in (6, 7, 8)]
    given = {"num_beams": 2, "num_return_sequences": 2, "draft_policy": "throughput"}
    cheap = decoded(items, costs=CHEAP_ROWS, **given)
    assert counts(cheap) == (1 + 1, PREFILL + 1 + 2 + 4, 0, 0)
    dear = decoded(items, costs=DEAR_ROWS, **given)
    assert counts(dear)[0] > 2
    assert [s.token_ids for s in dear.sequences] == [s.token_ids for s in cheap.sequences]


@pytest.mark.parametrize("coupling", ["gumbel", "rejection"])
@pytest.mark.parametrize("width_policy", ["fixed", "threshold"])
def test_mixed_lengths_stay_lawful(coupling: str, width_policy: str) -> None:
    rng = np.random.default_rng(5)
    sizes = rng.integers(1, 5, size=40).tolist()
    items = [rng.integers(2, 12, size=size).tolist() for size in sizes]
    options = {"num_beams": 3, "num_return_sequences": 2, "min_beams": None}
    if width_policy == "threshold":
        options["min_beams"] = 2
    found = decoded(items, "dsbd", coupling=coupling, **options)
    assert all(s.token_ids in items or s.token_ids[-1] == EOS for s in found.sequences)
    if (coupling, width_policy) == ("gumbel", "fixed"):
        plain = decoded(items, "beam-sample", num_beams=3, num_return_sequences=2)
        assert [s.token_ids for s in found.sequences] == [s.token_ids for s in plain.sequences]


def test_the_bound_of_rows_is_that_of_a_short_request() -> None:
    trie = TokenTrie.from_sequences(CHAIN)
    given: dict[str, Any] = {"num_beams": 256, "max_new_tokens": 4, "constraint": trie}
    plain = DecodingConfig(strategy="beam-search", **given)
    # a row a beam and token, what is selected in one iteration, twice for a top-k head
    assert most_rows(300, plain) == 300 + 256 * 5 + 256 + 2 * 2 * 256
    assert most_rows(300, plain, has_top_k_head=False) == 300 + 256 * 5 + 256 + 2 * 256
    drafted = DecodingConfig(
        strategy="speculative-beam-search", draft_policy="fixed", draft_length=8, **given
    )
    # of eight layers of 256 three can be drafted before the last token
    nodes = 3 * 256
    assert most_rows(300, drafted) == 300 + 256 * 5 + 256 + 2 * nodes + 2 * (nodes + 5 * 256)


def test_a_request_holds_no_more_rows_than_its_bound() -> None:
    rng = np.random.default_rng(6)
    items = rng.integers(2, 8, size=(200, 9)).tolist()
    for options in ({"draft_length": 1, "draft_beams": 4}, {"draft_length": 4}, {}):
        config = DecodingConfig(
            strategy="speculative-beam-search",
            num_beams=4,
            draft_policy="fixed",
            max_new_tokens=9,
            constraint=TokenTrie.from_sequences(items),
            **options,
        )
        decoder = BatchedDecoder(TableModel(VOCAB, TARGET), TableModel(VOCAB, DRAFT))
        member = decoder.join(request_on(config, PROMPT))
        held = 0
        while decoder.num_live:
            decoder.iterate()
            held = max(held, member.num_rows, member.num_rows_at_end)
        assert 0 < held <= most_rows(len(PROMPT), config)


def test_a_first_layer_of_all_codes_goes_with_the_prompts_last_row() -> None:
    """As many codes as beams: the rows are needed anyway, and a call is saved."""
    items = [[a, b, c] for a in range(2, 10) for b in range(10, 18) for c in range(18, 26)]
    given = {"num_beams": 8, "num_return_sequences": 8, "draft_policy": "throughput"}
    found = decoded(items, costs=EngineCosts(DEAR_ROWS.target, FAR_TOO_DEAR), **given)
    assert counts(found) == (1 + 2, PREFILL + (1 + 8) + 8, 0, 0)
    plain = decoded(items, "beam-search", num_beams=8, num_return_sequences=8)
    assert counts(plain)[:2] == (1 + 3, PREFILL + 1 + 8 + 8)
    assert [s.token_ids for s in found.sequences] == [s.token_ids for s in plain.sequences]
