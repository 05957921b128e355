"""Files of tries that are damaged or foreign: the right trie, or an error that names the file."""

import io
import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.lib import format as npy

from dsbd_ort.constraints import TokenTrie
from dsbd_ort.decoding.errors import ConstraintError

SEQUENCES = [[5, 7], [6, 7], [5], [8, 1, 2]]
ITEMS = ["a", {"sku": 1, "names": ["é", None]}, 3.5, ["x"]]
TRIE = TokenTrie.from_sequences(SEQUENCES, items=ITEMS, end="eos")


def saved(folder):
    path = folder / "items.trie"
    TRIE.save(path)
    return path, path.read_bytes()


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


def assert_refused(path, content):
    write_anew(path, content)
    assert outcome(path) is None


def test_every_cut_is_noticed(tmp_path):
    path, whole = saved(tmp_path)
    for size in range(len(whole)):
        assert_refused(path, whole[:size])
    for more in (b"\0", b"\n", whole, bytes(4096)):
        assert_refused(path, whole + more)
    path.write_bytes(whole)
    assert outcome(path) == TRIE


def test_a_trie_without_a_seal_is_of_another_version(tmp_path):
    path, whole = saved(tmp_path)
    before = bytearray(whole[:-132])
    before[128] = 1  # the version, as it was written before there was a seal
    path.write_bytes(before)
    with pytest.raises(ConstraintError, match=r"begins with \[1, 1\], a trie of this release with"):
        TokenTrie.load(path)


def sealed(arrays):
    """The bytes of arrays after the head, as another program might write them."""
    file = io.BytesIO()
    for array in (np.array([2, 0], np.int64), *arrays):
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


FOREIGN = [  # of TRIE: row_offsets 0 3 4 5 6 6 6 7 7, tokens 5 6 8 7 7 1 2
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
    ("nodes", i8(1, 4, 5, 8)),
    ("nodes", i8(-1, 4, 5, 7)),
    ("nodes", i8(4, 1, 5, 7)),
    ("nodes", i4(1, 4, 5, 7)),
    ("offsets", i8(0, 3, 2, 40, 45)),
    ("offsets", i8(0, 3, 6)),
    ("text", np.zeros(3, np.uint8)),
    ("tokens", np.zeros((7, 1), np.int32)),
    ("tokens", np.zeros(7, np.float64)),
    ("tokens", np.zeros(7, ">i4")),
    ("tokens", np.zeros(7, [("a", "<i4")])),
]


@pytest.mark.parametrize(("name", "array"), FOREIGN)
def test_arrays_that_are_none_of_a_trie_are_refused(tmp_path, name, array):
    assert_refused(tmp_path / "foreign.trie", sealed(arrays_with(name, array)))


def test_another_program_may_write_one(tmp_path):
    (tmp_path / "foreign.trie").write_bytes(sealed(arrays_with()))
    assert TokenTrie.load(tmp_path / "foreign.trie", end="eos") == TRIE
    (tmp_path / "long.trie").write_bytes(sealed(arrays_with("row_offsets", i8(*TRIE._row_offsets))))
    assert TokenTrie.load(tmp_path / "long.trie", end="eos") == TRIE


LINES = [
    '{"token_ids": [5, 9223372036854775808], "item": 1}',
    '{"token_ids": [5, -9223372036854775809], "item": 1}',
    '{"token_ids": [5, 2147483648], "item": 1}',
    '{"token_ids": [5, ' + "9" * 5000 + '], "item": 1}',
    '{"token_ids": [5, -1], "item": 1}',
    '{"token_ids": [5, 6.0], "item": 1}',
    '{"token_ids": [5, true], "item": 1}',
    '{"token_ids": [5, null], "item": 1}',
    '{"token_ids": [5, "6"], "item": 1}',
    '{"token_ids": [5, [6]], "item": 1}',
    '{"token_ids": [], "item": 1}',
    '{"token_ids": null, "item": 1}',
    '{"token_ids": [5], "item": NaN}',
    '{"token_ids": [5], "item": "\\ud800"}',
    '{"token_ids": [5], "item": ' + "[" * 900 + "]" * 900 + "}",
    '{"token_ids": [5], "item": ' + "[" * 99999 + "]" * 99999 + "}",
    "null", "\0", "{", "\x0c",
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(LINES)))
def test_lines_that_hold_no_sequence_name_the_file(tmp_path, number):
    path = tmp_path / "items.jsonl"
    path.write_text('{"token_ids": [5, 7], "item": null}\n' + LINES[number] + "\n")
    found = outcome(path)
    assert found is None or found.items_of([5]) == [json.loads(LINES[number])["item"]]
    assert_refused(path, b"")
    assert_refused(path, b'{"token_ids": [5, 7], "item": "\xff"}')


ARRAYS = [
    np.array([[5.0]]), np.array([[True]]), np.array([["5"]]), np.array([[None]], dtype=object),
    np.array([[2**63]], dtype=np.uint64), np.array([[2**31]]), np.array(5), np.array([5]),
    np.zeros((1, 1, 1), dtype=int), np.zeros((0, 3), dtype=int), np.zeros((3, 0), dtype=int),
    np.array([[-2]]), np.array([[-1, 3]]), np.zeros((1, 1), dtype=[("a", int)]),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ARRAYS)))
def test_arrays_that_hold_no_sequences_name_the_file(tmp_path, number):
    np.save(tmp_path / "items.npy", ARRAYS[number], allow_pickle=True)
    assert outcome(tmp_path / "items.npy") is None


def test_other_kinds_of_files_are_named(tmp_path):
    for suffix in (".trie", ".npy", ".jsonl", ".txt"):
        assert outcome(tmp_path / f"none{suffix}") is None
        (tmp_path / f"folder{suffix}").mkdir()
        assert outcome(tmp_path / f"folder{suffix}") is None
        assert_refused(tmp_path / f"empty{suffix}", b"")
        assert outcome(tmp_path / f"\0{suffix}") is None
    np.savez(tmp_path / "zip.npz", a=np.array([[5]]))
    assert_refused(tmp_path / "zip.npy", (tmp_path / "zip.npz").read_bytes())


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
    lines = ({"token_ids": ids, "item": item} for ids, item in zip(SEQUENCES, ITEMS, strict=True))
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, lines)))
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
