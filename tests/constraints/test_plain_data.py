"""Constraints from plain data: each kind is the object that Python makes, faults are named."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsbd_ort.constraints import Choice, JsonObject, JsonSchema, Lark, Regex, TokenTrie
from dsbd_ort.constraints.binding import (
    KINDS,
    ConstraintBinding,
    TrieFiles,
    constraint_from_data,
    kind_of,
    with_constraint,
)
from dsbd_ort.decoding.errors import ConstraintError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TRIE = TokenTrie.from_sequences([[1, 2], [1, 3]])
SAME: list[tuple[dict[str, Any], Any]] = [
    ({"json_schema": SCHEMA}, JsonSchema(SCHEMA)),
    ({"json_schema": json.dumps(SCHEMA)}, JsonSchema(SCHEMA)),
    (
        {"json_schema": SCHEMA, "item_separator": ", ", "key_separator": ": "},
        JsonSchema(SCHEMA, item_separator=", ", key_separator=": "),
    ),
    ({"json_object": True, "flexible_whitespace": True}, JsonObject(flexible_whitespace=True)),
    ({"regex": "[ab]+"}, Regex("[ab]+")),
    ({"choice": ["yes", "no"]}, Choice(["yes", "no"])),
    ({"grammar": 'start: "a"'}, Lark('start: "a"')),
    ({"trie": "items"}, TRIE),
    ({"trie": "items", "end": "eos"}, TokenTrie.from_sequences([[1, 2], [1, 3]], end="eos")),
]


@pytest.mark.parametrize(("data", "constraint"), SAME)
def test_data_is_what_python_makes(data: dict[str, Any], constraint: Any) -> None:
    found = constraint_from_data(data, lambda name: TRIE)
    assert found == constraint
    assert kind_of(found) in KINDS and kind_of(found) in data


def test_an_option_that_is_no_data_is_left_alone() -> None:
    for options in ({}, {"constraint": None}, {"constraint": Regex("a")}, {"constraint": 3}):
        assert with_constraint(options, lambda name: TRIE) == options
    found = with_constraint({"constraint": {"regex": "a"}, "seed": 1}, lambda name: TRIE)
    assert found == {"constraint": Regex("a"), "seed": 1}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "constraint has []; expected one of json_schema, json_object, regex, choice"),
        ({"regx": "a"}, "constraint has ['regx']; did you mean 'regex'?"),
        ({"regex": "a", "choice": ["b"]}, "constraint has regex and choice; give one of them"),
        ({"regex": "a", "end": "eos"}, "has 'end' with regex; expected one of canonical"),
        ({"trie": "a", "ends": "eos"}, "'ends' with trie; expected one of end there"),
        ({"trie": "a", "end": "never"}, "constraint has end 'never'"),
        ({"json_object": False}, "constraint has json_object False; use true"),
        ({"json_object": True, "item_separator": 3}, "item_separator 3; expected a text"),
        ({"json_schema": 7}, "the JSON schema '7' is not an object"),
        ({"json_schema": "{"}, "the JSON schema '{' is not valid JSON"),
        ({"regex": 5}, "constraint has regex 5; expected a text"),
        ({"grammar": None}, "constraint has grammar None; expected a text"),
        ({"choice": "abc"}, "constraint has choice 'abc'; expected a list of texts"),
        ({"choice": []}, "the choice is []; give a list of at least one text"),
        ({"choice": [1]}, "a text of a choice is 1; give a string"),
    ],
)
def test_a_fault_is_named(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        constraint_from_data(data, lambda name: TRIE)
    assert words in str(caught.value)


def test_a_file_is_read_once_until_it_changes(tmp_path: Path) -> None:
    files, file = TrieFiles(), tmp_path / "items.txt"
    file.write_text("5 6\n5 7\n")
    first = files(str(file))
    assert first == TokenTrie.from_sequences([[5, 6], [5, 7]]) and files(str(file)) is first
    file.write_text("5 6\n5 8\n")
    os.utime(file, ns=(1, 1))
    assert files(str(file)) == TokenTrie.from_sequences([[5, 6], [5, 8]])


def test_threads_that_want_one_file_have_it_read_once(tmp_path: Path) -> None:
    began, may_end, read = threading.Event(), threading.Event(), []

    def slowly(file: Path) -> TokenTrie:
        read.append(file.name)
        began.set()
        assert file.name == "other.txt" or may_end.wait(10)
        return TokenTrie.from_file(file)

    files = TrieFiles(slowly)
    for name in ("items.txt", "other.txt"):
        (tmp_path / name).write_text("5 6\n5 7\n")
    with ThreadPoolExecutor(8) as threads:
        wanted = [threads.submit(files, str(tmp_path / "items.txt")) for _ in range(7)]
        assert began.wait(10)
        other = threads.submit(files, str(tmp_path / "other.txt"))
        wanted_trie = TokenTrie.from_sequences([[5, 6], [5, 7]])
        assert other.result(10) == wanted_trie  # which waits for no other file
        may_end.set()
        assert len({id(trie.result(10)) for trie in wanted}) == 1
    assert read == ["items.txt", "other.txt"]


def test_many_threads_and_more_files_than_are_kept(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(12)]
    for number, path in enumerate(paths):
        path.write_text(f"5 {number}\n" if number else "no trie\n")
    files = TrieFiles()

    def ask(seed: int) -> None:
        for number in np.random.default_rng(seed).integers(len(paths), size=150).tolist():
            if number:
                assert files(str(paths[number])) == TokenTrie.from_sequences([[5, number]])
            else:
                with pytest.raises(ConstraintError, match=r"0\.txt is b'no trie"):
                    files(str(paths[number]))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(8)))


def test_a_file_that_cannot_be_read_displaces_none(tmp_path: Path) -> None:
    files, paths = TrieFiles(), [tmp_path / f"{number}.txt" for number in range(8)]
    for number, path in enumerate(paths):
        path.write_text(f"5 {number}\n")
    kept = [files(str(path)) for path in paths]
    for number in range(20):
        (tmp_path / f"bad {number}.txt").write_text("no trie")
        with pytest.raises(ConstraintError):
            files(str(tmp_path / f"bad {number}.txt"))
    assert all(files(str(path)) is trie for path, trie in zip(paths, kept, strict=True))


def test_a_file_that_is_no_trie_is_named(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("1 two\n")
    for name, words in {
        "words.txt": "line 1 of",
        "missing.trie": "which cannot be read (No such file or directory)",
        "\0": "which cannot be read",
    }.items():
        with pytest.raises(ConstraintError) as caught:
            TrieFiles()(str(tmp_path / name))
        assert str(caught.value).startswith("constraint has trie ") and words in str(caught.value)


def test_a_trie_beyond_the_vocabulary_is_refused() -> None:
    binding = ConstraintBinding(Path("none"), 4, [0])
    assert binding.bound(TRIE) is None
    with pytest.raises(ConstraintError, match="has the token id 4; expected 0 to 3"):
        binding.bound(TokenTrie.from_sequences([[1, 4]]))


@pytest.mark.parametrize(
    ("sequences", "where"),
    [
        ([[1, 2], [1, 0, 2]], "within a sequence"),  # it would never be reached
        ([[1], [1, 0]], "after a sequence of its own"),  # [1, 0] would be two candidates
        ([[1], [2], [1, 3], [2, 3, 0], [2, 3]], "after a sequence of its own"),
        ([[1, 0], [1, 3, 0], [2]], None),
    ],
)
def test_a_sequence_goes_on_after_no_end_token_nor_is_there_without_it(sequences, where) -> None:
    trie = TokenTrie.from_sequences(sequences)
    binding = ConstraintBinding(Path("none"), 4, [0])
    assert binding.bound(trie, []) is None  # a request in which token 0 ends nothing
    if where is None:
        assert binding.bound(trie) is None
        return
    with pytest.raises(ConstraintError, match=f"has the end-of-sequence token 0 {where}"):
        binding.bound(trie)
