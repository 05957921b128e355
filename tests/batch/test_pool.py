"""Answers that come in any order are given in the order of their lines."""

from __future__ import annotations

from dsbd_ort.batch.answer_sources import answers_in_order
from dsbd_ort.batch.prompt_lines import LineAnswer, RawLine


class LastFirst:
    """A pool that finishes the line it got last; the one that lasts only when no other is left."""

    def __init__(self, num_members, lasting=None):
        self.num_members = num_members
        self.sent = []
        self._busy = []
        self._lasting = lasting
        self.num_sent_while_lasting = 0

    def has_idle(self):
        return len(self._busy) < self.num_members

    def send(self, index, line):
        self._busy.append((index, line))
        self.sent.append(index)

    def receive(self, seconds):
        index, line = self._busy[-1] if self._busy[-1][0] != self._lasting else self._busy[0]
        self._busy.remove((index, line))
        if index == self._lasting:
            self.num_sent_while_lasting = len(self.sent)
        return [(index, LineAnswer({"line": line.number}, num_tokens=1, is_error=False))]


def numbers(answers):
    return [answer.fields["line"] for answer in answers]


def lines(num):
    return (RawLine(number, b"{}") for number in range(num))


def test_the_order_is_that_of_the_lines():
    pool = LastFirst(3)
    assert numbers(answers_in_order(pool, lines(20), lambda: False)) == list(range(20))
    assert pool.sent == list(range(20))


def test_no_line_is_taken_far_ahead_of_one_that_lasts():
    pool = LastFirst(2, lasting=0)
    assert numbers(answers_in_order(pool, lines(100), lambda: False)) == list(range(100))
    assert pool.num_sent_while_lasting == 2 * 8


def test_a_wish_to_end_is_heard_between_two_answers():
    pool = LastFirst(1)
    answers = answers_in_order(pool, lines(9), lambda: len(pool.sent) == 4)
    assert numbers(answers) == [0, 1, 2, 3]


def test_no_line_no_answer():
    assert numbers(answers_in_order(LastFirst(2), lines(0), lambda: False)) == []
