"""Shared forwards: what a call gets of the result, full logits included, is its own rows alone."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest

from dsbd_forward.forward import Forward
from dsbd_forward.logits import FullLogitsPart, TopLogits
from dsbd_forward.spec import MemorySpec
from dsbd_ort.decoding.cache_view import CacheView, PrefixCache
from dsbd_ort.decoding.engine_call import EngineCall, Meter
from dsbd_ort.decoding.errors import ModelError
from dsbd_ort.decoding.kv_cache import SharedKVCache
from tests.decoding.tables import random_table
from tests.decoding.top_table import TopTable

VOCAB = 9
TABLE = random_table(3, VOCAB)


def results_of_calls(num_logit_rows: list[int], first_full_row: int | None) -> list[TopLogits]:
    """Make a call for every view: a chain of so many rows, all with logits, in one forward."""
    cache = SharedKVCache(TopTable(VOCAB, TABLE, 4, first_full_row))
    calls = []
    for token, num_rows in enumerate(num_logit_rows):
        view = cache.open_view(PrefixCache())
        forward_at = partial(chain, view, token, num_rows)
        calls.append(EngineCall("target", Meter(), num_rows, forward_at, "all logits"))
    return [result.logits for result in cache.forward(calls)]


def chain(view: CacheView, first_token: int, num_rows: int, first_row: int) -> Forward:
    rows = np.arange(num_rows)
    mask = view.append(rows, first_row)  # the slot of each one's parent is its number
    return Forward(rows + first_token, rows, mask, rows)


PARTS = [
    # first row of five that can be read, and of the parts of two, none and three
    (0, [0, 0, 0]),
    (1, [1, 0, 0]),
    (2, [2, 0, 0]),
    (4, [2, 0, 2]),
    (5, [2, 0, 3]),
]


@pytest.mark.parametrize(("first_full_row", "first_rows"), PARTS)
def test_every_call_reads_its_own_rows(first_full_row: int, first_rows: list[int]) -> None:
    whole = results_of_calls([2, 1, 3], 0)
    parts = results_of_calls([2, 0, 3], first_full_row)
    del whole[1]
    wanted = [whole[0].full, None, whole[1].full]
    assert [part.full.first_row for part in parts] == first_rows
    for part, full in zip(parts, wanted, strict=True):
        rows = np.arange(part.full.first_row, len(part.top_ids))[::-1]
        found = part.full.read(rows)
        assert found.shape == (len(rows), VOCAB)
        if full is not None:
            np.testing.assert_array_equal(found, full.read(rows))
            np.testing.assert_array_equal(found.max(axis=1), part.top_logits[rows, 0])


def test_rows_of_another_call_are_refused() -> None:
    first, second = results_of_calls([2, 3], 1)
    for part, rows, said in (
        (first, [0], "expected rows 1 to 1"),
        (first, [1, 2], "expected rows 1 to 1"),
        (second, [-1], "expected rows 0 to 2"),
        (second, [3], "expected rows 0 to 2"),
    ):
        with pytest.raises(ModelError, match=said):
            part.full.read(np.array(rows))


def test_without_full_logits_no_part_has_them() -> None:
    assert [part.full for part in results_of_calls([2, 3], None)] == [None, None]
    assert isinstance(results_of_calls([1, 1], 0)[0].full, FullLogitsPart)


@pytest.mark.parametrize(("kept", "most_unused"), [("attention rows", 164), ("recurrent rows", 64)])
def test_unused_rows_are_dropped_sooner_where_rows_are_folded(kept: str, most_unused: int) -> None:
    """A quarter of those in use may lie between them, but not where a fold waits for it."""
    model = TopTable(VOCAB, TABLE, 4, 0)
    memory = MemorySpec(kept=frozenset(["attention rows", kept]))
    model.spec = dataclasses.replace(model.spec, memory=memory)
    cache = SharedKVCache(model)
    view = cache.open_view(PrefixCache())

    def call(num_rows: int) -> None:
        forward_at = partial(chain, view, 0, num_rows)
        cache.forward([EngineCall("target", Meter(), num_rows, forward_at, "all logits")])

    call(400)
    for _ in range(300):
        kept_slots = np.arange(1, view.num_slots)
        call(1)
        view.keep(kept_slots)
        assert model.num_rows <= 400 + most_unused + 2
    assert model.num_rows > 400 + most_unused // 2
