"""Wide requests in processes of their own: all beams, legal, compared setting by setting."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dsbd_ort import TokenTrie
from lab.frame.own_process import in_own_process
from lab.peers.ids import Ids
from lab.retrieval.wide_requests import Computed, cells_of, computed, settings_of

WIDTH = 6


def test_the_first_of_the_settings_is_plain():
    found = settings_of(("beam-search", "speculative-beam-search"), WIDTH)
    assert [(each.strategy, each.are_together) for each in found] == [
        ("beam-search", False),
        ("speculative-beam-search", False),
        ("beam-search", True),
        ("speculative-beam-search", True),
    ]
    assert {each.num_beams for each in found} == {WIDTH}


def test_all_beams_of_every_request_are_computed_alike_in_every_setting(tmp_path, tiny_bundle):
    ids = Ids.written(tmp_path, 500, 258)
    trie_file = tmp_path / "ids.trie"
    TokenTrie.from_array(np.load(ids.file)).save(trie_file)
    known = {tuple(row) for row in np.load(ids.file).tolist()}
    prompts = [[3, 4, 5], [8, 9]]
    plain, together = (
        in_own_process(computed, tiny_bundle.path, trie_file, prompts, setting, 1)
        for setting in settings_of(("beam-search", "dsbd"), WIDTH)[::2]
    )
    assert len(plain.outputs) == 2
    for output in plain.outputs:
        assert len(output) == WIDTH
        assert {tuple(tokens) for tokens, _ in output} <= known
    assert plain.outputs[0] != plain.outputs[1]
    cells, is_right = cells_of([plain, together], ids)
    assert is_right and cells[2:] == ["2/2"]
    assert 10**7 < plain.resident_bytes < 10**9
    assert 0 < plain.kv_bytes < plain.resident_bytes


@pytest.fixture
def ids(tmp_path):
    file = tmp_path / "ids.npy"
    np.save(file, np.array([[1], [2], [3], [5]]))
    return Ids(file)


def found_of(*tokens: int) -> Computed:
    outputs = [([token], [-1.0]) for token in tokens]
    return Computed(
        outputs=[[output] for output in outputs],
        resident_bytes=212_000_000,
        kv_bytes=4_350_000,
    )


def test_cells_count_the_requests_that_are_the_same(ids):
    cells, is_right = cells_of([found_of(1, 2, 3), found_of(1, 2, 3), found_of(1, 5, 3)], ids)
    assert cells == ["212, 4.3"] * 3 + ["3/3", "2/3"]
    assert not is_right
    assert cells_of([found_of(1)] * 2, ids)[1]
    assert not cells_of([found_of(4)] * 2, ids)[1]  # no id
    twice = replace(found_of(1), outputs=[[([1], [-1.0]), ([1], [-1.0])]])
    assert not cells_of([twice, twice], ids)[1]
    fewer = replace(found_of(1, 2), outputs=found_of(1).outputs)
    with pytest.raises(ValueError):
        cells_of([found_of(1, 2), fewer], ids)
