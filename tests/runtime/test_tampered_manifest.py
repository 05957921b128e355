"""A manifest can hold anything: what an error shows of it is short and one line."""

import copy
import json
import sys
from dataclasses import dataclass

import pytest

from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.errors import BundleError
from dsbd_runtime.typed_json import in_short, typed
from tests.runtime.bundle_edits import put

MOST_CHARACTERS = 1000


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


LONG = "x\n" * 5000
VALUES = {
    "text": LONG,
    "list of numbers": list(range(5000)),
    "list of texts": [LONG] * 3,
    "number": 10**4000,
    "negative number": -(10**4000),
    "keys": {f"{LONG}{i}": i for i in range(3)},
    "nested": nested(200),
    "deeply nested": nested(900),
    "infinity": float("inf"),
}
NAMES = ["x" * 5000, "x" * 200, "a\nb", "../" + "y" * 5000, "z/" * 3000, "\ud800", "\0" * 3000]


def places(value, place=()):
    """Yield every place of a manifest, that of objects and lists themselves as well."""
    if place:
        yield place
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*place, key))


def set_at(data, place, value):
    """Return a copy of ``data`` with another value at ``place``."""
    changed = copy.deepcopy(data)
    put(place, value)(changed)
    return changed


def check_refusal(bundle, manifest):
    """Open with another manifest; it may be right all the same, but an error must be short."""
    (bundle / "dsbd.json").write_text(json.dumps(manifest))
    try:
        open_bundle(bundle, verify=True)
    except BundleError as error:
        message = str(error)
        assert len(message) <= MOST_CHARACTERS + len(str(bundle)) and message.isprintable()


@pytest.mark.parametrize("kind", VALUES)
def test_errors_of_any_value_anywhere_are_short(tiny_bundle, bundle_copy, kind):
    manifest = json.loads((tiny_bundle.path / "dsbd.json").read_text())
    for place in places(manifest):
        check_refusal(bundle_copy, set_at(manifest, place, VALUES[kind]))


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:5]))
def test_errors_of_any_name_are_short(tiny_bundle, bundle_copy, name):
    manifest = json.loads((tiny_bundle.path / "dsbd.json").read_text())
    entries = [{"size": 1, "sha256": ""}, {"size": "1", "sha256": ""}, {}, None]
    for *above, _ in places(manifest):
        parent = manifest
        for key in above:
            parent = parent[key]
        if isinstance(parent, dict):
            for entry in entries:
                check_refusal(bundle_copy, set_at(manifest, (*above, name), entry))


def test_token_ids_that_differ_are_shown_in_short(tiny_bundle, bundle_copy):
    manifest = json.loads((tiny_bundle.path / "dsbd.json").read_text())
    manifest["target"]["eos_token_ids"] = [i % 258 for i in range(5000)]
    check_refusal(bundle_copy, manifest)


@dataclass(frozen=True)
class Entry:
    name: str


def test_a_value_too_deep_or_too_long_to_show_is_named_by_its_type():
    with pytest.raises(BundleError, match="entry: name is a list too large to show, expected str"):
        typed(Entry, {"name": nested(sys.getrecursionlimit())}, "entry")
    assert in_short(10**5000) == "a int too large to show"
    assert in_short("x" * 200) == "'" + "x" * 96 + "..."
