"""Wide requests in processes of their own: all beams, legal, compared setting by setting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsbd_ort import TokenTrie
from dsbd_runtime.bundle import Bundle
from peers.ids import made_ids
from retrieval_costs.wide_requests import Computed, cells_of, computed, is_whole, settings_of

TRIE = TokenTrie.from_sequences([[5, 7, 9], [5, 8], [6]])
WIDTH = 6


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [([5, 7, 9], True), ([6], True), ([5, 7], False), ([5, 9], False), ([6, 7], False)],
)
def test_a_whole_path_of_a_trie(token_ids, expected):
    assert is_whole(TRIE, token_ids) is expected


def test_the_first_of_the_settings_is_plain():
    found = settings_of(("beam-search", "speculative-beam-search"), WIDTH)
    assert [(each.strategy, each.are_together) for each in found] == [
        ("beam-search", False),
        ("speculative-beam-search", False),
        ("beam-search", True),
        ("speculative-beam-search", True),
    ]
    assert {each.num_beams for each in found} == {WIDTH}


def test_all_beams_of_every_request_are_computed_alike_in_every_setting(
    tmp_path: Path, tiny_bundle: Bundle
) -> None:
    ids = made_ids(500, 258)
    trie_file = tmp_path / "ids.trie"
    TokenTrie.from_array(ids).save(trie_file)
    known = {tuple(row) for row in ids.tolist()}
    prompts = [[3, 4, 5], [8, 9]]
    plain, together = (
        computed(tiny_bundle.path, trie_file, prompts, setting, 1)
        for setting in settings_of(("beam-search", "dsbd"), WIDTH)[::2]
    )
    assert len(plain.outputs) == 2
    for output in plain.outputs:
        assert len(output) == WIDTH
        assert {tuple(tokens) for tokens, _ in output} <= known
    assert plain.outputs[0] != plain.outputs[1]
    cells, is_right = cells_of([plain, together])
    assert is_right and cells[2:] == ["2/2"]
    assert 10**7 < plain.resident_bytes < 10**9
    assert 0 < plain.kv_bytes < plain.resident_bytes


def found_of(*tokens: int, is_legal: bool = True) -> Computed:
    outputs = [([token], [-1.0]) for token in tokens]
    return Computed(
        outputs=[[output] for output in outputs],
        are_legal=is_legal,
        resident_bytes=212_000_000,
        kv_bytes=4_350_000,
    )


def test_cells_count_the_requests_that_are_the_same():
    cells, is_right = cells_of([found_of(1, 2, 3), found_of(1, 2, 3), found_of(1, 5, 3)])
    assert cells == ["212, 4.3"] * 3 + ["3/3", "2/3"]
    assert not is_right
    assert cells_of([found_of(1)] * 2)[1]
    assert not cells_of([found_of(1), found_of(1, is_legal=False)])[1]
    fewer = replace(found_of(1, 2), outputs=found_of(1).outputs)
    with pytest.raises(ValueError):
        cells_of([found_of(1, 2), fewer])
