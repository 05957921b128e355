"""Tries against brute force over their sets of sequences, and the items of sequences."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsbd_ort.constraints.token_trie import TokenTrie
from dsbd_ort.decoding.errors import ConstraintError

EXAMPLE = [[5], [5, 7], [6, 7]]
SEQUENCES = [[5, 7], [6, 7], [5], [6, 7], [8, 1, 2]]
ITEMS = ["a", {"sku": 1, "names": ["é", None]}, 3.5, "second of 6 7", ["x"]]
LONG = [[2**31 - 1, k, 2**31 - 1, *range(k)] for k in range(1, 40)]  # packed in many pieces

tokens = st.one_of(st.integers(0, 4), st.integers(0, 2**31 - 1))
sequence_lists = st.lists(st.lists(tokens, min_size=1, max_size=7), min_size=1, max_size=20)


def with_items(items=ITEMS, end="leaf"):
    return TokenTrie.from_sequences(SEQUENCES, items=items, end=end)


def prefixes_of(sequences):
    """Return all prefixes, shorter ones first, then in order: the numbering of the nodes."""
    found = {tuple(s[:k]) for s in sequences for k in range(len(s) + 1)}
    return sorted(found, key=lambda prefix: (len(prefix), prefix))


def rows_of(lists):
    return [row.tolist() for row in np.split(lists.tokens, np.cumsum(lists.counts)[:-1])]


def padded(sequences):
    array = np.full((len(sequences), max(map(len, sequences))), -1, dtype=np.int64)
    for row, sequence in zip(array, sequences, strict=True):
        row[: len(sequence)] = sequence
    return array


def assert_is_trie_of(trie, sequences):
    """Walk every prefix and compare what follows, and what ends there, with the set."""
    prefixes = prefixes_of(sequences)
    valid = {tuple(s) for s in sequences}
    assert trie.num_nodes == len(prefixes)
    nodes = {(): trie.start([1, 2])}
    for prefix in prefixes[1:]:
        nodes[prefix] = trie.advance(nodes[prefix[:-1]], np.array(prefix[-1:], dtype=np.int64))
    states = np.concatenate([nodes[prefix] for prefix in prefixes])
    assert states.dtype == np.int64
    followers = [
        sorted({p[-1] for p in prefixes if len(p) == len(prefix) + 1 and p[:-1] == prefix})
        for prefix in prefixes
    ]
    assert rows_of(trie.allowed(states)) == followers
    assert trie.accepts(states).tolist() == [prefix in valid for prefix in prefixes]
    is_leaf = [not f for f in followers]
    ended = is_leaf if trie.end == "leaf" else [False] * len(prefixes)
    assert trie.has_ended(states).tolist() == ended
    for one in range(len(states)):
        assert rows_of(trie.allowed(states[one : one + 1])) == [followers[one]]
        assert trie.accepts(states[one : one + 1]).tolist() == [prefixes[one] in valid]


@settings(deadline=None, max_examples=200)
@given(sequence_lists, st.sampled_from(["leaf", "eos"]))
@example(LONG, "leaf")
@example(EXAMPLE, "eos")
def test_tries_are_their_sets_of_sequences(sequences, end):
    trie = TokenTrie.from_sequences(sequences, end=end)
    assert_is_trie_of(trie, sequences)
    assert trie == TokenTrie.from_array(padded(sequences), end=end)
    assert trie == TokenTrie.from_sequences([*sequences[::-1], sequences[0]], end=end)
    assert hash(trie) == hash(TokenTrie.from_array(padded(sequences), end=end))


def test_the_example_of_the_docstring():
    arrays = TokenTrie.from_sequences(EXAMPLE)._arrays
    assert arrays.row_offsets.tolist() == [0, 2, 3, 4, 4, 4]
    assert arrays.tokens.tolist() == [5, 6, 7, 7]
    assert arrays.is_end.tolist() == [False, True, False, True, True]


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 400), st.integers(0, 2**32 - 1))
def test_many_states_advance_as_single_ones_do(num_states, seed):
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 40, (300, 3))
    rows[rng.random(300) < 0.3, 2] = -1
    trie = TokenTrie.from_array(rows)
    states = np.zeros(num_states, dtype=np.int64)
    for _ in range(2):
        lists = rows_of(trie.allowed(states))
        chosen = np.array([rng.choice(row) if row else -1 for row in lists])
        states, chosen = states[chosen >= 0], chosen[chosen >= 0]
        children = trie.advance(states, chosen)
        alone = [trie.advance(states[k : k + 1], chosen[k : k + 1])[0] for k in range(len(states))]
        assert children.tolist() == alone
        states = children


def test_advancing_leaves_the_states_as_they_were():
    trie = TokenTrie.from_sequences(EXAMPLE)
    for num_states in (1, 100):
        states = np.zeros(num_states, dtype=np.int64)
        fives = trie.advance(states, np.full(num_states, 5))
        sixes = trie.advance(states, np.full(num_states, 6))
        assert states.tolist() == [0] * num_states
        assert (fives.tolist(), sixes.tolist()) == ([1] * num_states, [2] * num_states)


@pytest.mark.parametrize("num_states", [1, 100])
@pytest.mark.parametrize(("node", "token"), [(0, 4), (0, 8), (1, 6), (4, 7), (3, 0), (2, 2**40)])
def test_a_token_that_is_not_allowed_is_refused(num_states, node, token):
    trie = TokenTrie.from_sequences(EXAMPLE)
    with pytest.raises(ConstraintError, match=rf"has no token {token} after node {node}; a path"):
        trie.advance(np.full(num_states, node), np.full(num_states, token))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenTrie.from_sequences([]), "of no sequences"),
        (lambda: TokenTrie.from_sequences([[1], []]), "sequence 1 is empty"),
        (lambda: TokenTrie.from_array(np.array([[1, 2], [-1, -1]])), "sequence 1 is empty"),
        (lambda: TokenTrie.from_array(np.array([[1, 2], [-1, 2]])), r"row 1 .* is \[-1, 2\]"),
        (lambda: TokenTrie.from_array(np.array([[1, -2]])), r"row 0 .* is \[1, -2\]"),
        (lambda: TokenTrie.from_array(np.array([1, 2])), "with 1 dimensions; give integers"),
        (lambda: TokenTrie.from_array(np.array([[1.0]])), "array of float64"),
        (lambda: TokenTrie.from_array(np.empty((0, 3), dtype=int)), "of no sequences"),
        (lambda: TokenTrie.from_array(np.empty((3, 0), dtype=int)), "sequence 0 is empty"),
        (lambda: TokenTrie.from_sequences([[1]], end="stop"), "end is 'stop'"),
        (lambda: with_items(["a"]), "1 items are given for 5 sequences"),
        (lambda: with_items([1, 2, {3}, 4, 5]), "item 2 is a set that is not valid JSON"),
        (lambda: with_items([1, 2, 3, 4, float("nan")]), "item 4 is a float that is not valid"),
    ],
)
def test_senseless_sequences_are_refused(make, message):
    with pytest.raises(ConstraintError, match=message):
        make()


@pytest.mark.parametrize(
    ("sequence", "said"),
    [
        *(([7, token], f"has the token id {shown}; expected a whole number from 0 to 2147483647")
          for token, shown in [
              (1.5, "1.5"), (1.0, "1.0"), (None, "None"), (True, "True"), ("5", "'5'"),
              (np.True_, "np.True_"), (np.float32(1), r"np.float32\(1.0\)"), ([1], r"\[1\]"),
              (-1, "-1"), (-(2**63) - 1, "-9223372036854775809"), (2**31, "2147483648"),
              (2**63, "9223372036854775808"), (2**64, "18446744073709551616"),
              (10**5000, "a number of 16610 bits"), (float("nan"), "nan"),
          ]),
        *((sequence, f"is {shown}; expected a list of token ids")
          for sequence, shown in [(7, "7"), (None, "None"), (np.int64(3), r"np.int64\(3\)")]),
        ("57", "has the token id '5'"),
    ],
)  # fmt: skip
def test_what_is_no_token_id_is_named(sequence, said):
    with pytest.raises(ConstraintError, match=f"^sequence 2 {said}"):
        TokenTrie.from_sequences([[1], [2, 3], sequence])


@pytest.mark.parametrize("sequences", [None, 3, True])
def test_what_is_no_list_of_sequences_is_named(sequences):
    with pytest.raises(ConstraintError, match=f"the sequences are {sequences}; give lists"):
        TokenTrie.from_sequences(sequences)
    with pytest.raises(ConstraintError, match="give an array of integers, or lists to from_seq"):
        TokenTrie.from_array(sequences)


def test_whole_numbers_of_any_type_are_token_ids():
    mixed = [np.array([5], np.uint64), (np.int8(5), 7), np.array([6, 7], np.int32)]
    assert TokenTrie.from_sequences(iter(mixed)) == TokenTrie.from_sequences(EXAMPLE)


def test_texts_in_one_spelling():
    trie = TokenTrie.from_texts(["ab", "b"], lambda text: [ord(c) for c in text], end="eos")
    assert_is_trie_of(trie, [[97, 98], [98]])


def test_items_of_sequences():
    found = with_items()
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
    assert with_items() == with_items()
    assert with_items() != TokenTrie.from_sequences(SEQUENCES)
    assert with_items() != with_items([*ITEMS[:-1], "y"])
    swapped = [ITEMS[0], ITEMS[3], ITEMS[2], ITEMS[1], ITEMS[4]]
    assert with_items() != with_items(swapped)


def test_the_longest_path():
    assert with_items().most_tokens == 3
    assert with_items(end="eos").most_tokens == 4
    assert TokenTrie.from_sequences([[3], [4]]).most_tokens == 1


def test_where_every_edge_leads_to_a_leaf():
    found = TokenTrie.from_sequences([[5], [5, 7], [6, 7], [6, 8, 9], [4, 1], [4, 2]])
    states = np.arange(found.num_nodes)  # the root, 4, 5, 6, then 41, 42, 57, 67, 68, then 689
    expected = [False, True, True, False, True, True, True, True, True, True]
    assert found.ends_next(states).tolist() == expected
    assert not found.ending("eos").ends_next(states).any()
