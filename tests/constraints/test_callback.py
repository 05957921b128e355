"""A function of the path as a constraint."""

import pickle

import numpy as np
import pytest

from dsbd_ort.constraints import AllowedTokens
from dsbd_ort.decoding.errors import ConstraintError

EOS = 9


def next_numbers(path):
    """Allow the last token plus 1 and plus 2, and an end after multiples of 3."""
    last = int(path[-1])
    return [last + 2, last + 1, last + 1, *([EOS] if last % 3 == 0 else [])]


def transformers_function(batch_id, input_ids):
    assert batch_id == 0
    return next_numbers(input_ids.tolist())


def rows_of(lists):
    return [row.tolist() for row in np.split(lists.tokens, np.cumsum(lists.counts)[:-1])]


def advance(constraint, states, *tokens):
    return constraint.advance(states, np.array(tokens, dtype=np.int64))


@pytest.mark.parametrize(
    "constraint",
    [AllowedTokens(next_numbers, EOS), AllowedTokens(transformers_function, [EOS, 99], True)],
)
def test_what_the_function_says(constraint):
    start = constraint.start([7, 1])
    assert rows_of(constraint.allowed(start)) == [[2, 3]]
    states = advance(constraint, start.repeat(2), 2, 3)
    assert rows_of(constraint.allowed(states)) == [[3, 4], [4, 5]]
    assert constraint.accepts(states).tolist() == [False, True]
    assert constraint.has_ended(states).tolist() == [False, False]
    assert rows_of(constraint.allowed(start)) == [[2, 3]]


def test_the_function_gets_prompt_and_new_tokens_once_a_node():
    seen = []

    def record(path):
        assert path.dtype == np.int64 and not path.flags.writeable
        seen.append(path.tolist())
        return {4, 5}

    constraint = AllowedTokens(record, EOS)
    start = constraint.start([7, 8])
    states = advance(constraint, advance(constraint, start.repeat(2), 4, 5), 5, 4)
    assert seen == []
    for _ in range(2):
        constraint.accepts(states)
        assert rows_of(constraint.allowed(states)) == [[4, 5], [4, 5]]
    constraint.allowed(start)
    assert seen == [[7, 8, 4, 5], [7, 8, 5, 4], [7, 8]]


def test_paths_share_their_beginnings():
    constraint = AllowedTokens(lambda path: [len(path)], EOS)
    state = constraint.start([0])
    for token in range(1, 3000):
        state = advance(constraint, state, token)
    assert constraint.allowed(state).tokens.tolist() == [3000]
    children = advance(constraint, state.repeat(2), 1, 2)
    assert children[0].position.parent is children[1].position.parent is state[0].position
    assert children[0].position.token == 1 and children[0].position.depth == 3000


RETURNED = [  # (value, tokens, whether the path may end)
    ([], [], False),
    ((), [], False),
    ([EOS], [], True),
    (np.array([3, EOS, 1], dtype=np.int32), [1, 3], True),
    (iter([3, 1]), [1, 3], False),
    (range(3), [0, 1, 2], False),
]


@pytest.mark.parametrize(("found", "tokens", "accepts"), RETURNED)
def test_what_a_function_may_return(found, tokens, accepts):
    constraint = AllowedTokens(lambda path: found, EOS)
    start = constraint.start([1])
    assert constraint.allowed(start).tokens.tolist() == tokens
    assert constraint.allowed(start).counts.tolist() == [len(tokens)]
    assert constraint.accepts(start).tolist() == [accepts]


@pytest.mark.parametrize("found", [[-1], [1.5], ["a"], [[1, 2]], [True], None, 5])
def test_what_a_function_may_not_return(found):
    constraint = AllowedTokens(lambda path: found, EOS)
    with pytest.raises(ConstraintError, match=r"the allowed tokens of .*lambda.*; return a list"):
        constraint.allowed(constraint.start([1]))


def test_no_function_and_an_error_of_the_function():
    with pytest.raises(ConstraintError, match="allowed tokens of 5; give a function"):
        AllowedTokens(5, EOS)
    constraint = AllowedTokens(lambda path: 1 // 0, EOS)
    with pytest.raises(ZeroDivisionError):
        constraint.allowed(constraint.start([1]))


def test_equal_functions_are_equal_constraints():
    made = AllowedTokens(next_numbers, EOS)
    assert made == pickle.loads(pickle.dumps(made)) == AllowedTokens(next_numbers, [EOS])
    assert len({made, AllowedTokens(next_numbers, [EOS]), AllowedTokens(next_numbers, 8)}) == 2
