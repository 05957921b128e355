"""Files of tries: what is written is read; damage and foreign bytes are refused by name."""

import io
import json
import os
import pickle
import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.lib import format as npy

from dsbd_ort.constraints import TokenTrie
from dsbd_ort.decoding.errors import ConstraintError
from tests.constraints.test_token_trie import (
    EXAMPLE,
    ITEMS,
    SEQUENCES,
    assert_is_trie_of,
    padded,
    rows_of,
    with_items,
)

TRIE = with_items(end="eos")


@pytest.mark.parametrize("end", ["leaf", "eos"])
def test_saved_tries_are_mapped(tmp_path, end):
    rows = np.random.default_rng(3).integers(0, 1000, (5000, 3))
    made = TokenTrie.from_array(rows, end=end)
    made.save(tmp_path / "items.trie")
    assert [p.name for p in tmp_path.iterdir()] == ["items.trie"]
    for found in (
        TokenTrie.load(tmp_path / "items.trie"),
        TokenTrie.from_file(str(tmp_path / "items.trie")),
    ):
        assert found == made and found.end == end
        assert not found._tokens.flags.owndata and not found._tokens.flags.writeable
        children = found.advance(np.zeros(2, dtype=np.int64), rows[:2, 0])
        assert rows_of(found.allowed(children)) == rows_of(made.allowed(children))
        assert "items.trie" in found.name
    assert TokenTrie.load(tmp_path / "items.trie", end="eos").end == "eos"


def test_a_mapped_trie_is_pickled_as_its_path(tmp_path, monkeypatch):
    made = TokenTrie.from_array(np.random.default_rng(0).integers(0, 99, (2000, 2)), end="eos")
    assert pickle.loads(pickle.dumps(made)) == made
    made.save(tmp_path / "items.trie")
    monkeypatch.chdir(tmp_path)
    mapped = TokenTrie.load("items.trie", end="leaf")
    pickled = pickle.dumps(mapped)
    assert len(pickled) < 500
    monkeypatch.chdir("/")
    again = pickle.loads(pickled)
    assert again == mapped and again.end == "leaf" and again != made


def test_files_and_pickles_keep_items(tmp_path):
    path = tmp_path / "items.trie"
    TRIE.save(path)
    for found in (
        TokenTrie.load(path),
        TokenTrie.from_file(path),
        TokenTrie.load(path).ending("eos"),
        pickle.loads(pickle.dumps(TRIE)),
        pickle.loads(pickle.dumps(TokenTrie.load(path))),
    ):
        assert found == TRIE and found.end == "eos"
        assert found.items_of([6, 7]) == [ITEMS[1], ITEMS[3]]
        assert found.num_bytes == TRIE.num_bytes
    without = tmp_path / "without.trie"
    TokenTrie.from_sequences(SEQUENCES, end="eos").save(without)
    seal = 132  # bytes of the last array
    assert path.read_bytes().startswith(without.read_bytes()[:-seal])  # what other hosts read
    assert not TokenTrie.load(without).has_items


def test_text_files_arrays_and_lines_of_json(tmp_path):
    (tmp_path / "items.txt").write_text("5\n5 7\r\n6\t7")
    assert_is_trie_of(TokenTrie.from_file(tmp_path / "items.txt", end="eos"), EXAMPLE)
    np.save(tmp_path / "items.npy", padded(EXAMPLE).astype(np.int16))
    assert_is_trie_of(TokenTrie.from_file(tmp_path / "items.npy"), EXAMPLE)
    write_lines(tmp_path / "items.jsonl")
    assert TokenTrie.from_file(tmp_path / "items.jsonl") == with_items()
    assert TokenTrie.from_file(tmp_path / "items.jsonl", end="eos") == TRIE


def write_lines(path):
    lines = ({"token_ids": ids, "item": item} for ids, item in zip(SEQUENCES, ITEMS, strict=True))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_text_of_many_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("dsbd_ort.constraints.trie_file._LINES", 7)
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, 10**6, rng.integers(1, 5)).tolist() for _ in range(200)]
    text = "\n".join(" ".join(map(str, row)) for row in rows)
    (tmp_path / "items.txt").write_text(text + "\n")
    assert TokenTrie.from_file(tmp_path / "items.txt") == TokenTrie.from_sequences(rows)
    (tmp_path / "items.txt").write_text(text + "\n7 x\n")
    with pytest.raises(ConstraintError, match=r"line 201 of .*items.txt is b'7 x"):
        TokenTrie.from_file(tmp_path / "items.txt")


def outcome(path):
    """The trie of a file, None if an error of one line names the file."""
    try:
        return TokenTrie.from_file(path)
    except ConstraintError as error:
        assert str(path) in str(error)
        return None


def write_anew(path, content):
    path.unlink(missing_ok=True)  # a file system syncs one that is cut and written again
    path.write_bytes(content)


def test_every_cut_is_noticed(tmp_path):
    path = tmp_path / "items.trie"
    TRIE.save(path)
    whole = path.read_bytes()
    for content in (
        *(whole[:size] for size in range(len(whole))),
        *(whole + more for more in (b"\0", b"\n", whole, bytes(4096))),
    ):
        write_anew(path, content)
        assert outcome(path) is None
    path.write_bytes(whole)
    assert outcome(path) == TRIE


def sealed(arrays, version=2):
    """The bytes of arrays after the head, as another program might write them."""
    file = io.BytesIO()
    for array in (np.array([version, 0], np.int64), *arrays):
        npy.write_array(file, array)
    seal = np.array([zlib.crc32(file.getvalue())], np.uint32)
    npy.write_array(file, seal)
    return file.getvalue()


def arrays_with(name=None, value=None):
    """The arrays of TRIE, one of them replaced."""
    arrays = {
        "row_offsets": TRIE._row_offsets, "tokens": TRIE._tokens, "is_end": TRIE._is_end,
        "nodes": TRIE._items.nodes, "offsets": TRIE._items.offsets, "text": TRIE._items.text,
    }  # fmt: skip
    return [array if key != name else value for key, array in arrays.items()]


def i4(*values):
    return np.array(values, np.int32)


def i8(*values):
    return np.array(values, np.int64)


# Of TRIE: row_offsets 0 3 4 5 6 6 6 7 7, tokens 5 6 8 7 7 1 2, nodes 1 4 5 5 7,
# offsets 0 3 6 39 54 59.
FOREIGN = [
    ("row_offsets", i4(0, 3, 4, 5, 6, 6, 6, 7)),  # one too few
    ("row_offsets", i4(0, 3, 4, 5, 6, 6, 6, 7, 8)),  # beyond the edges
    ("row_offsets", i4(1, 3, 4, 5, 6, 6, 6, 7, 7)),
    ("row_offsets", i4(0, 3, 2, 5, 6, 6, 6, 7, 7)),  # goes back
    ("row_offsets", i4(0, 0, 3, 5, 6, 6, 6, 7, 7)),  # node 1 is its own child
    ("row_offsets", np.zeros(9, np.bool_)),
    ("tokens", i4(-1, 6, 8, 7, 7, 1, 2)),
    ("tokens", i8(5, 6, 8, 7, 7, 1, 2)),
    ("tokens", i4(5, 6, 8, 7, 7, 1)),
    ("is_end", np.zeros(8, np.int32)),
    ("is_end", np.ones(7, np.bool_)),
    ("nodes", i8(1, 4, 5, 5, 8)),
    ("nodes", i8(-1, 4, 5, 5, 7)),
    ("nodes", i8(4, 1, 5, 5, 7)),
    ("nodes", i4(1, 4, 5, 5, 7)),
    ("offsets", i8(0, 3, 2, 39, 54, 59)),
    ("offsets", i8(0, 3, 6)),
    ("text", np.zeros(3, np.uint8)),
    ("tokens", np.zeros((7, 1), np.int32)),
    ("tokens", np.zeros(7, np.float64)),
    ("tokens", np.zeros(7, ">i4")),
    ("tokens", np.zeros(7, [("a", "<i4")])),
]


def test_another_program_may_write_one(tmp_path):
    (tmp_path / "foreign.trie").write_bytes(sealed(arrays_with()))
    assert TokenTrie.load(tmp_path / "foreign.trie", end="eos") == TRIE
    (tmp_path / "long.trie").write_bytes(sealed(arrays_with("row_offsets", i8(*TRIE._row_offsets))))
    assert TokenTrie.load(tmp_path / "long.trie", end="eos") == TRIE


NO_IDS = ["9223372036854775808", "-9223372036854775809", "2147483648", "-1"]
NO_LISTS = ["[5, 6.0]", "[5, true]", "[5, null]", '[5, "6"]', "[5, [6]]", "null", f"[{'9' * 5000}]"]
NO_ITEMS = ["NaN", '"\\ud800"', "[" * 99999 + "]" * 99999]
NO_LINES = ["", "[5, 7]", '{"token_ids": [5]}', "{", "[" * 100_000, "null", "\0", "\x0c"]
NO_LINES += [f'{{"token_ids": {ids}, "item": 1}}' for ids in NO_LISTS]
NO_ARRAYS = [
    ([[5.0]], "array of float64"),
    ([[True]], "array of bool"),
    ([["5"]], "array of <U1"),
    (np.array([[None]], dtype=object), "is not a .npy file of integers"),
    ([[2**63]], "has the token id 9223372036854775808"),
    ([[2**31]], "has the token id 2147483648"),
    (5, "with 0 dimensions"),
    ([5], "with 1 dimensions"),
    ([[[0]]], "with 3 dimensions"),
    (np.zeros((0, 3), dtype=int), "of no sequences"),
    (np.zeros((3, 0), dtype=int), "sequence 0 is empty"),
    ([[-2]], "row 0 "),
    ([[-1, 3]], "row 0 "),
    (np.zeros((1, 1), dtype=[("a", int)]), "array of "),
]
FIRST_LINE = '{"token_ids": [5, 7], "item": null}'
NO_TRIES = [  # (name, content, what is said)
    ("items.txt", "1 2\n\n3\n", r"line 2 of .* is b'\\n'; expected the token ids"),
    ("items.txt", "1\n2 -3\n", "line 2 of .* is b'2 -3"),
    ("items.txt", "1\n2,3\n", "line 2 of .* is b'2,3"),
    ("items.txt", "3000000000\n", "does not hold a trie: a sequence has the token id 3000000000"),
    ("items.txt", "1\n" + "9" * 5000, "does not hold a trie: a sequence has the token id 922"),
    ("items.txt", "", "is empty; give the token ids"),
    ("items.jsonl", "", "of no sequences"),
    ("items.jsonl", '{"token_ids": [], "item": 1}', "sequence 0 is empty"),
    ("items.jsonl", b'{"token_ids": [5, 7], "item": "\xff"}', "cannot be read"),
    *(
        ("items.jsonl", f"{FIRST_LINE}\n{line}\n", r"line 2 of .* is .*; expected an object")
        for line in NO_LINES
    ),
    *(
        ("items.jsonl", f'{{"token_ids": [5, {token}], "item": 1}}', f"has the token id {token};")
        for token in NO_IDS
    ),
    *(
        ("items.jsonl", f'{{"token_ids": [5], "item": {item}}}', "(item 0|line 1 of)")
        for item in NO_ITEMS
    ),
    ("items.npy", "no array", r"items\.npy is not a \.npy file of integers"),
    *(("items.npy", np.array(array), words) for array, words in NO_ARRAYS),
    ("items.trie", "", "is no saved trie, or not whole"),
    ("items.trie", b"\x93NUMPY", "is no saved trie, or not whole"),
    ("items.trie", sealed(arrays_with(), version=9), r"begins with \[9, 0\], a trie of this rel"),
    ("items.trie", sealed(arrays_with(), version=1)[:-132], r"begins with \[1, 0\], a trie of "),
    *(
        ("items.trie", sealed(arrays_with(*foreign)), "arrays that do not form|is no saved trie")
        for foreign in FOREIGN
    ),
]


@pytest.mark.parametrize(("name", "content", "said"), NO_TRIES, ids=lambda value: str(value)[:30])
def test_a_file_that_holds_no_trie_is_named(tmp_path, name, content, said):
    path = tmp_path / name
    if isinstance(content, np.ndarray):
        np.save(path, content, allow_pickle=True)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConstraintError, match=said) as caught:
        TokenTrie.from_file(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("suffix", [".trie", ".npy", ".jsonl", ".txt"])
def test_what_is_no_file_is_named(tmp_path, suffix):
    (tmp_path / f"folder{suffix}").mkdir()
    for name in (f"none{suffix}", f"folder{suffix}", f"\0{suffix}"):
        with pytest.raises(ConstraintError, match=r"cannot be read \(|embedded null") as caught:
            TokenTrie.from_file(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
    with pytest.raises(ConstraintError, match=r"does not end in \.trie"):
        TRIE.save(tmp_path / "items.bin")


def mutated(content, rng):
    kind = int(rng.integers(4))
    content = bytearray(content)
    if kind == 0:
        return bytes(content[: int(rng.integers(len(content)))])
    if kind == 1:
        return rng.bytes(int(rng.integers(1, 300)))
    if kind == 2:
        start, stop = sorted(int(i) for i in rng.integers(len(content), size=2))
        return bytes(content[:start]) + rng.bytes(int(rng.integers(9))) + bytes(content[stop:])
    for _ in range(int(rng.integers(1, 6))):
        content[int(rng.integers(len(content)))] = int(rng.integers(256))
    return bytes(content)


@pytest.mark.parametrize("num_rounds", [250, pytest.param(50_000, marks=pytest.mark.long)])
def test_damage_at_random(tmp_path, num_rounds):
    """A damaged file is refused by name, or is a trie that can be walked."""
    TRIE.save(tmp_path / "items.trie")
    np.save(tmp_path / "items.npy", np.array([[5, 7], [6, 7], [8, -1]]))
    write_lines(tmp_path / "items.jsonl")
    (tmp_path / "items.txt").write_text("5 7\n6 7\n5\n8 1 2\n")
    rng = np.random.default_rng(num_rounds)
    for suffix in ("trie", "npy", "jsonl", "txt"):
        whole = (tmp_path / f"items.{suffix}").read_bytes()
        for _ in range(num_rounds):
            path = tmp_path / f"damaged.{suffix}"
            write_anew(path, mutated(whole, rng))
            found = outcome(path)
            if found is not None:
                assert suffix != "trie"
                states, most = found.start([]), found.most_tokens
                for _ in range(most):
                    allowed = found.allowed(states[:1]).tokens
                    if not len(allowed):
                        break
                    states = found.advance(states[:1], allowed[:1])


def test_a_trie_is_synced_before_it_has_its_name(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    TRIE.save(tmp_path / "items.trie")
    (part,) = map(Path, synced)
    assert part.parent == tmp_path and part.name.endswith(".part")
    assert [path.name for path in tmp_path.iterdir()] == ["items.trie"]
