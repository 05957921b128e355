"""The versions that were tried are those that are asked for, installed and named in the docs."""

import re
from pathlib import Path

import pytest

from dsbd_export.tool_versions import (
    TRIED_VERSIONS,
    tool_versions,
    tried_range,
    untried_versions,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("library", TRIED_VERSIONS)
def test_the_range_is_the_same_everywhere(library):
    oldest, newest = TRIED_VERSIONS[library]
    assert f'"{library}>={oldest}' in (ROOT / "pyproject.toml").read_text()
    constraints = (ROOT / "constraints.txt").read_text()
    assert re.search(rf"^{library}=={re.escape(newest)}\.\d+$", constraints, re.MULTILINE)
    assert f"{library} {tried_range(library)}" in (ROOT / "docs" / "export.md").read_text()


def test_what_is_installed_was_tried():
    assert untried_versions(tool_versions()) == []


@pytest.mark.parametrize(
    ("version", "is_tried"),
    [("5.23.9", False), ("5.24.0", True), ("5.24.7", True), ("5.100.0", False), ("unknown", True)],
)
def test_other_versions_are_named(version, is_tried):
    warnings = untried_versions({"transformers": version, "onnxruntime": "1.32.0"})
    assert len(warnings) == (not is_tried)
    assert all(f"transformers {version} was not tested, 5.24 was" in w for w in warnings)
