"""One forward: the parents that its mask says, and a part of its rows."""

import numpy as np
import pytest

from dsbd_forward.features import ZEROS
from dsbd_forward.forward import NO_ROW, Forward
from tests.forward.tables import NamedFeatures, listed, new_forward, new_parents

NONE = np.arange(0)

PARENTS = {  # (mask, the parents' cache rows)
    "a prompt": ([[1, 0, 0], [1, 1, 0], [1, 1, 1]], [NO_ROW, 0, 1]),
    "a chain below two rows": ([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], [1, 2, 3]),
    "a node below each of two rows": ([[1, 1, 1, 0], [1, 0, 0, 1]], [1, 0]),
    "siblings and a child of each": (
        [
            [1, 1, 1, 0, 0, 0],
            [1, 1, 0, 1, 0, 0],
            [1, 1, 1, 0, 1, 0],
            [1, 1, 0, 1, 0, 1],
        ],
        [1, 1, 2, 3],
    ),
    "two prompts": (
        [
            [1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [0, 0, 1, 0, 0],
            [0, 0, 1, 1, 0],
            [0, 0, 1, 1, 1],
        ],
        [NO_ROW, 0, NO_ROW, 2, 3],
    ),
    "a prompt after the rows of others": ([[0, 0, 1, 0], [0, 0, 1, 1]], [NO_ROW, 2]),
    "a path between the rows of others": ([[1, 0, 1, 0, 1, 0], [0, 1, 0, 1, 0, 1]], [2, 3]),
    "one root": ([[1]], [NO_ROW]),
    "no rows": (np.zeros((0, 2)), []),
}


@pytest.mark.parametrize(("mask", "parents"), PARENTS.values(), ids=PARENTS.keys())
def test_the_parent_is_the_last_row_that_a_node_sees(
    mask: list[list[int]], parents: list[int]
) -> None:
    seen = np.array(mask, np.bool_)
    rows = np.arange(len(seen))
    forward = Forward(rows, rows, seen, NONE)
    assert forward.parents.tolist() == parents
    np.testing.assert_array_equal(seen, np.array(mask, np.bool_))  # only looked at


OF_TARGET, OF_DRAFT = NamedFeatures("target"), NamedFeatures("draft", "draft")
WHOLE = {  # five nodes below two rows
    "mask": [
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 1, 0, 1, 0, 0],
        [1, 1, 1, 0, 1, 1, 0],
        [1, 1, 0, 1, 0, 0, 1],
    ],
    "token_ids": [5, 6, 7, 8, 9],
    "positions": [2, 2, 3, 4, 3],
    "logit_rows": [4, 1, 3, 1],
    "feature_rows": [0, 3, 4],
    "source": "a picture",
}
PARTS = [  # (first row, end, the part)
    (
        0,
        2,
        {
            "mask": [[1, 1, 1, 0], [1, 1, 0, 1]],
            "token_ids": [5, 6],
            "positions": [2, 2],
            "logit_rows": [1, 1],
            "feature_rows": [0],
        },
    ),
    (
        2,
        5,
        {
            "mask": [[1, 1, 1, 0, 1, 0, 0], [1, 1, 1, 0, 1, 1, 0], [1, 1, 0, 1, 0, 0, 1]],
            "token_ids": [7, 8, 9],
            "positions": [3, 4, 3],
            "logit_rows": [2, 1],
            "feature_rows": [1, 2],
        },
    ),
    (
        2,
        3,
        {
            "mask": [[1, 1, 1, 0, 1]],
            "token_ids": [7],
            "positions": [3],
            "logit_rows": [],
            "feature_rows": [],
        },
    ),
    (0, 5, WHOLE),
]


@pytest.mark.parametrize(("start", "stop", "part"), PARTS)
def test_a_part_is_a_forward_of_its_own(start: int, stop: int, part: dict) -> None:
    found = new_forward(**WHOLE).part(start, stop)
    assert listed(found) == {**part, "source": "a picture", "parents": None}
    found = new_forward(**{**WHOLE, "feature_rows": None}).part(start, stop)
    assert found.feature_rows is None


def test_a_part_has_the_features_of_its_own_parents() -> None:
    parents = new_parents((OF_TARGET, OF_DRAFT), [ZEROS, 0, 1, 1, 0], [0, 4, 2, 3, 1])
    forward = new_forward(**{**WHOLE, "feature_rows": None, "parents": parents})
    both = ["target", "draft"]
    assert listed(forward.part(0, 2))["parents"] == (both, [ZEROS, 0], [0, 4])
    assert listed(forward.part(2, 5))["parents"] == (both, [1, 1, 0], [2, 3, 1])


def test_counts() -> None:
    forward = new_forward(**WHOLE)
    assert (forward.num_new, forward.num_features) == (5, 3)
    plain = new_forward(**{**WHOLE, "feature_rows": None})
    assert (plain.num_new, plain.num_features) == (5, 0)
    parents = new_parents((), [ZEROS] * 5, [0] * 5)
    draft = new_forward(**{**WHOLE, "feature_rows": None, "parents": parents})
    assert draft.num_features == 5  # those of all rows
    assert forward.logit_rows_in(1, 4).tolist() == [False, True, True, True]
