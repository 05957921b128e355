"""scripts/check_structure finds references to members that no class has, and unplain words."""

import ast
import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SOURCE = '''
class Base:
    """See Other.turn."""
    size = 0

class Other(Base):
    """``Other.size``, ``Other.turn``, `Other.rows`; not ``Other.speed``, ``Gone.turn``."""
    def turn(self):
        self.rows, local = 1, 2  # see Other.local, Other.speed and Unknown.thing
'''


@pytest.fixture
def check():
    path = str(ROOT / "scripts/check_structure")
    loader = importlib.machinery.SourceFileLoader("check_structure", path)
    spec = importlib.util.spec_from_loader("check_structure", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_references_to_members_that_do_not_exist_are_found(check, tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own/parts.py").write_text(SOURCE)
    monkeypatch.setattr(check, "PACKAGES", (str(tmp_path / "own"),))
    found = check.false_references({"own.parts": ast.parse(SOURCE)})
    assert found == [
        f"{tmp_path}/own/parts.py:7 names Other.speed, which does not exist",
        f"{tmp_path}/own/parts.py:7 names Gone.turn, which does not exist",
        f"{tmp_path}/own/parts.py:9 names Other.local, which does not exist",
    ]


def test_words_that_have_a_plain_synonym_are_found(check):
    text = '"""What is behind."""\nx = 1  # all but\n# for rows_beside, not besides\n"""Whatever"""'
    found = [(1, "what"), (1, "behind"), (2, "but for"), (3, "beside")]
    assert check.words_to_replace(text) == found
    assert check.words_to_replace("## Behind a proxy\nIt lags behind (#behind-a-proxy)") == []
