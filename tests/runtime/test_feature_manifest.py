"""Features in the manifest: those of target and draft fit, or the bundle is refused by one line."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from dsbd_runtime.bundle_files.bundle import Bundle, open_bundle
from dsbd_runtime.errors import BundleError
from dsbd_runtime.parts.features import FeatureEntry
from tests.runtime.bundle_edits import edited
from tests.runtime.feature_pair import DRAFT, TARGET, WIDTH
from tests.runtime.tiny_graph import write_tiny_bundle


@pytest.fixture(scope="module")
def feature_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    path = tmp_path_factory.mktemp("bundles") / "features"
    write_tiny_bundle(path, target=TARGET, draft=DRAFT)
    return open_bundle(path, verify=True)


def test_what_was_written_is_read(feature_bundle: Bundle) -> None:
    target, draft = feature_bundle.entry("target"), feature_bundle.entry("draft")
    assert target.features == FeatureEntry(width=2 * WIDTH, layers=[2, 0])
    assert draft.features == FeatureEntry(width=2 * WIDTH, own_width=WIDTH)
    assert (target.is_feature_draft, draft.is_feature_draft) == (False, True)


WRONG = [  # (role, features, what is said)
    ("target", None, "features have width 64, but those of the target are null; export target and"),
    (
        "target",
        {"width": 96, "layers": [0, 1]},
        "width 64, but those of the target are of width 96",
    ),
    ("target", {"width": 64, "layers": [0, 3]}, "layers from 0 to 2"),
    ("target", {"width": 64, "layers": [1, 1]}, "is [1, 1], expected different layers"),
    ("target", {"width": 64, "layers": []}, "is [], expected different layers from 0 to 2"),
    ("target", {"width": 64}, "is None, expected different layers from 0 to 2"),
    ("target", {"width": 63, "layers": [0, 1]}, "is 63, expected a width for each layer"),
    ("target", {"width": 0, "layers": [0]}, "is 0, expected a width for each layer"),
    ("target", {"width": 64, "layers": [0, 1], "own_width": 8}, "null own_width: it is a draft's"),
    ("target", {"layers": [0]}, "missing or unknown entries ['width']"),
    ("target", {"width": "64", "layers": [0]}, "width is '64', expected int"),
    ("target", [64], "features is [64], expected"),
    ("draft", {"width": 64}, "expected own_width above 0, and null layers"),
    ("draft", {"width": 64, "own_width": 0}, "expected own_width above 0"),
    ("draft", {"width": 64, "own_width": 32, "layers": [1]}, "null layers: they are the target's"),
    ("draft", {"width": 10**12, "own_width": 32}, "width 1000000000000, but those of the target"),
]


@pytest.mark.parametrize(("role", "features", "said"), WRONG)
def test_features_that_do_not_fit_are_refused(
    feature_bundle: Bundle, tmp_path: Path, role: str, features: Any, said: str
) -> None:
    folder = Path(shutil.copytree(feature_bundle.path, tmp_path / "copy"))
    edited(folder, lambda data: data[role].update(features=features))
    with pytest.raises(BundleError) as caught:
        open_bundle(folder)
    message = str(caught.value)
    assert said in message and "\n" not in message and len(message) < 500
