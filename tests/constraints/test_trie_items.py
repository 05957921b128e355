"""Items of a trie: what its sequences stand for, in memory, in files and in results."""

import json
import pickle

import numpy as np
import pytest

from dsbd_ort.constraints import TokenTrie
from dsbd_ort.decoding.errors import ConstraintError

SEQUENCES = [[5, 7], [6, 7], [5], [6, 7], [8, 1, 2]]
ITEMS = ["a", {"sku": 1, "names": ["é", None]}, 3.5, "second of 6 7", ["x"]]


def trie(**options):
    return TokenTrie.from_sequences(SEQUENCES, items=ITEMS, **options)


def test_items_of_sequences():
    found = trie()
    assert found.has_items
    assert found.items_of([5, 7]) == ["a"]
    assert found.items_of([6, 7]) == [ITEMS[1], ITEMS[3]]  # in the order given
    assert found.items_of([5]) == [3.5]
    assert found.items_of([5, 99]) == [3.5]  # 99: an end-of-sequence token
    assert found.items_of([8, 1, 2]) == [["x"]]
    for none in ([], [6], [8, 1], [8, 99, 2], [9], [5, 99, 99]):
        assert found.items_of(none) == []
    assert TokenTrie.from_sequences(SEQUENCES).items_of([5]) == []
    assert not TokenTrie.from_sequences(SEQUENCES).has_items


@pytest.mark.parametrize("num_sequences", [1, 7, 3000])
def test_many_items_in_any_order(num_sequences):
    rng = np.random.default_rng(num_sequences)
    array = rng.integers(0, 12, size=(num_sequences, 4))
    array[rng.random(num_sequences) < 0.3, 3] = -1
    wanted = {}
    for index, row in enumerate(array.tolist()):
        wanted.setdefault(tuple(token for token in row if token >= 0), []).append(index)
    found = TokenTrie.from_array(array, items=range(num_sequences))
    assert {path: found.items_of(path) for path in wanted} == wanted


def test_tries_of_other_items_are_others():
    assert trie() == trie()
    assert trie() != TokenTrie.from_sequences(SEQUENCES)
    assert trie() != TokenTrie.from_sequences(SEQUENCES, items=[*ITEMS[:-1], "y"])
    swapped = [ITEMS[0], ITEMS[3], ITEMS[2], ITEMS[1], ITEMS[4]]
    assert trie() != TokenTrie.from_sequences(SEQUENCES, items=swapped)


def test_files_and_pickles_keep_them(tmp_path):
    path = tmp_path / "items.trie"
    trie(end="eos").save(path)
    for found in (
        TokenTrie.load(path),
        TokenTrie.from_file(path),
        TokenTrie.load(path).ending("eos"),
        pickle.loads(pickle.dumps(trie(end="eos"))),
        pickle.loads(pickle.dumps(TokenTrie.load(path))),
    ):
        assert found == trie(end="eos") and found.end == "eos"
        assert found.items_of([6, 7]) == [ITEMS[1], ITEMS[3]]
        assert found.num_bytes == trie().num_bytes
    without = tmp_path / "without.trie"
    TokenTrie.from_sequences(SEQUENCES, end="eos").save(without)
    seal = 132  # bytes of the last array
    assert path.read_bytes().startswith(without.read_bytes()[:-seal])  # what other hosts read
    assert not TokenTrie.load(without).has_items


def test_lines_of_json(tmp_path):
    path, pairs = tmp_path / "items.jsonl", zip(SEQUENCES, ITEMS, strict=True)
    path.write_text(
        "".join(json.dumps({"token_ids": ids, "item": item}) + "\n" for ids, item in pairs)
    )
    assert TokenTrie.from_file(path) == trie()
    assert TokenTrie.from_file(path, end="eos") == trie(end="eos")


@pytest.mark.parametrize(
    "line",
    ["", "[5, 7]", '{"token_ids": [5]}', '{"token_ids": [5.0], "item": 1}', "{", "[" * 100_000],
)
def test_other_lines_are_refused(tmp_path, line):
    path = tmp_path / "items.jsonl"
    path.write_text(f'{{"token_ids": [5, 7], "item": null}}\n{line}\n')
    with pytest.raises(ConstraintError, match=r"line 2 of .*items.jsonl is .*; expected an object"):
        TokenTrie.from_file(path)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["a"], "1 items are given for 5 sequences"),
        ([1, 2, {3}, 4, 5], "item 2 is a set that is not valid JSON"),
        ([1, 2, 3, 4, float("nan")], "item 4 is a float that is not valid JSON"),
    ],
)
def test_senseless_items_are_refused(items, message):
    with pytest.raises(ConstraintError, match=message):
        TokenTrie.from_sequences(SEQUENCES, items=items)


def test_the_longest_path():
    assert trie().most_tokens == 3
    assert trie(end="eos").most_tokens == 4
    assert TokenTrie.from_sequences([[3], [4]]).most_tokens == 1


def test_where_every_edge_leads_to_a_leaf():
    found = TokenTrie.from_sequences([[5], [5, 7], [6, 7], [6, 8, 9], [4, 1], [4, 2]])
    states = np.arange(found.num_nodes)  # the root, 4, 5, 6, then 41, 42, 57, 67, 68, then 689
    expected = [False, True, True, False, True, True, True, True, True, True]
    assert found.ends_next(states).tolist() == expected
    assert not found.ending("eos").ends_next(states).any()
