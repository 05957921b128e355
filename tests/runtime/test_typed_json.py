"""Values of a bundle's JSON files that no message could show as they are."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from dsbd_runtime.errors import BundleError
from dsbd_runtime.typed_json import in_short, json_from_file, typed


@dataclass(frozen=True)
class Entry:
    name: str


def nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


def test_a_value_too_deep_or_too_long_to_show_is_named_by_its_type():
    with pytest.raises(BundleError, match="entry: name is a list too large to show, expected str"):
        typed(Entry, {"name": nested(sys.getrecursionlimit())}, "entry")
    assert in_short(10**5000) == "a int too large to show"
    assert in_short("x" * 200) == "'" + "x" * 96 + "..."


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000])
def test_a_file_too_deep_or_with_too_many_digits_is_no_json(tmp_path, text):
    file = tmp_path / "dsbd.json"
    file.write_text(text)
    with pytest.raises(BundleError, match="cannot be read as JSON"):
        json_from_file(file)
