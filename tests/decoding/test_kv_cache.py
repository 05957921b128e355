"""Shared forwards: what a call gets of the result, full logits included, is its own rows alone."""

import dataclasses
from functools import partial

import numpy as np
import pytest

from dsbd_forward.forward import Forward
from dsbd_forward.logits import TopLogits
from dsbd_forward.spec import MemorySpec
from dsbd_ort.decoding.cache_view import CacheView
from dsbd_ort.decoding.engine_call import EngineCall, Meter
from dsbd_ort.decoding.kv_cache import PrefixCache, SharedKVCache
from tests.decoding.tables import random_table
from tests.decoding.top_table import TopTable

VOCAB = 9
TABLE = random_table(3, VOCAB)


def results_of_calls(num_logit_rows: list[int], *, keeps_full: bool = True) -> list[TopLogits]:
    """Make a call for every view: a chain of so many rows, all with logits, in one forward."""
    cache = SharedKVCache(TopTable(VOCAB, TABLE, 4, keeps_full=keeps_full))
    calls = []
    for token, num_rows in enumerate(num_logit_rows):
        view = CacheView(cache, PrefixCache())
        forward_at = partial(chain, view, token, num_rows)
        calls.append(EngineCall("target", Meter(), num_rows, forward_at))
    return [result.logits for result in cache.forward(calls)]


def chain(view: CacheView, first_token: int, num_rows: int, first_row: int) -> Forward:
    rows = np.arange(num_rows)
    mask = view.append(rows, first_row)  # the slot of each one's parent is its number
    return Forward(rows + first_token, rows, mask, rows)


def test_every_call_reads_its_own_rows() -> None:
    whole = results_of_calls([2, 1, 3])
    parts = results_of_calls([2, 0, 3])
    for part, full in zip(parts, (whole[0].full, None, whole[2].full), strict=True):
        rows = np.arange(len(part.top_ids))[::-1]
        found = part.full.read(rows)
        assert found.shape == (len(rows), VOCAB)
        if full is not None:
            np.testing.assert_array_equal(found, full.read(rows))
            np.testing.assert_array_equal(found.max(axis=1), part.top_logits[rows, 0])
            best = part.full.read_tokens(rows, part.top_ids[rows, 0])
            np.testing.assert_array_equal(best, part.top_logits[rows, 0])


@pytest.mark.parametrize(("kept", "most_unused"), [("attention rows", 164), ("recurrent rows", 64)])
def test_unused_rows_are_dropped_sooner_where_rows_are_folded(kept: str, most_unused: int) -> None:
    """A quarter of those in use may lie between them, but not where a fold waits for it."""
    model = TopTable(VOCAB, TABLE, 4, keeps_full=True)
    memory = MemorySpec(kept=frozenset(["attention rows", kept]))
    model.spec = dataclasses.replace(model.spec, memory=memory)
    cache = SharedKVCache(model)
    view = CacheView(cache, PrefixCache())

    def call(num_rows: int) -> None:
        forward_at = partial(chain, view, 0, num_rows)
        cache.forward([EngineCall("target", Meter(), num_rows, forward_at)])

    call(400)
    for _ in range(300):
        kept_slots = np.arange(1, view.num_slots)
        call(1)
        view.keep(kept_slots)
        assert model.num_rows <= 400 + most_unused + 2
    assert model.num_rows > 400 + most_unused // 2
