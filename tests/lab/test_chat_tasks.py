"""Chat tasks: what counts as an answer, and the tasks themselves."""

from __future__ import annotations

import pytest

from lab.chat_tasks import KINDS, Task, tasks

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
