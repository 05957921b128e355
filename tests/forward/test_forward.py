"""Forwards: parents that a mask implies, parts, forwards of several requests, and their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from dsbd_forward.errors import ModelError
from dsbd_forward.features import ZEROS, ParentFeatures, joined_parents
from dsbd_forward.forward import NO_ROW, Forward, ForwardResult, Source, joined_forward
from dsbd_forward.logits import DenseLogits, FullLogitsPart, TopLogits


@dataclass(frozen=True)
class NamedFeatures:
    """Features without values, compared by name."""

    name: str
    role: str = "target"

    def __len__(self) -> int:
        return 9

    def copied(self, row: int) -> NamedFeatures:
        raise AssertionError("no test copies them")


def new_forward(
    mask: list[list[int]],
    *,
    token_ids: list[int],
    positions: list[int],
    logit_rows: list[int],
    feature_rows: list[int] | None = None,
    parents: ParentFeatures | None = None,
    source: Source = None,
) -> Forward:
    """Return a forward."""
    return Forward(
        np.array(token_ids, np.int64),
        np.array(positions, np.int64),
        np.array(mask, np.bool_),
        np.array(logit_rows, np.int64),
        None if feature_rows is None else np.array(feature_rows, np.int64),
        parents,
        source,
    )


def new_parents(
    forwards: tuple[NamedFeatures, ...], sources: list[int], rows: list[int]
) -> ParentFeatures:
    return ParentFeatures(forwards, np.array(sources, np.int64), np.array(rows, np.int64))


def listed(forward: Forward) -> dict[str, Any]:
    """Return the arguments of ``new_forward`` that make this forward."""
    features, parents = forward.feature_rows, forward.parent_features
    return {
        "mask": forward.mask.astype(int).tolist(),
        "token_ids": forward.token_ids.tolist(),
        "positions": forward.positions.tolist(),
        "logit_rows": forward.logit_rows.tolist(),
        "feature_rows": None if features is None else features.tolist(),
        "parents": None if parents is None else listed_parents(parents),
        "source": forward.source,
    }


def listed_parents(parents: ParentFeatures) -> tuple[list[str], list[int], list[int]]:
    names = [features.name for features in parents.forwards]  # type: ignore[attr-defined]
    return names, parents.sources.tolist(), parents.rows.tolist()


NONE = np.arange(0)

PARENTS = {  # (mask, the parents' cache rows)
    "a prompt": ([[1, 0, 0], [1, 1, 0], [1, 1, 1]], [NO_ROW, 0, 1]),
    "a chain below two rows": ([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], [1, 2, 3]),
    "a node below each of two rows": ([[1, 1, 1, 0], [1, 0, 0, 1]], [1, 0]),
    "siblings and a child of each": (
        [[1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0], [1, 1, 1, 0, 1, 0], [1, 1, 0, 1, 0, 1]],
        [1, 1, 2, 3],
    ),
    "two prompts": (
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]],
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
PARTS = {  # by first row and end
    (0, 2): {
        "mask": [[1, 1, 1, 0], [1, 1, 0, 1]],
        "token_ids": [5, 6],
        "positions": [2, 2],
        "logit_rows": [1, 1],
        "feature_rows": [0],
    },
    (2, 5): {
        "mask": [[1, 1, 1, 0, 1, 0, 0], [1, 1, 1, 0, 1, 1, 0], [1, 1, 0, 1, 0, 0, 1]],
        "token_ids": [7, 8, 9],
        "positions": [3, 4, 3],
        "logit_rows": [2, 1],
        "feature_rows": [1, 2],
    },
    (2, 3): {
        "mask": [[1, 1, 1, 0, 1]],
        "token_ids": [7],
        "positions": [3],
        "logit_rows": [],
        "feature_rows": [],
    },
    (0, 5): WHOLE,
}


@pytest.mark.parametrize(("rows", "part"), PARTS.items())
def test_a_part_is_a_forward_of_its_own(rows: tuple[int, int], part: dict) -> None:
    found = new_forward(**WHOLE).part(*rows)
    assert listed(found) == {**part, "source": "a picture", "parents": None}
    found = new_forward(**{**WHOLE, "feature_rows": None}).part(*rows)
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


# Two requests with the rows [0, 1] and [2] add two rows and one; each mask is made for its place.
FIRST = {
    "mask": [[1, 1, 0, 1, 0], [1, 1, 0, 1, 1]],
    "token_ids": [5, 6],
    "positions": [2, 3],
    "logit_rows": [1, 0],
}
SECOND = {"mask": [[0, 0, 1, 0, 0, 1]], "token_ids": [7], "positions": [1], "logit_rows": [0]}
JOINED = {
    "mask": [[1, 1, 0, 1, 0, 0], [1, 1, 0, 1, 1, 0], [0, 0, 1, 0, 0, 1]],
    "token_ids": [5, 6, 7],
    "positions": [2, 3, 1],
    "logit_rows": [1, 0, 2],
    "feature_rows": None,
    "parents": None,
    "source": None,
}
F, G, H = (NamedFeatures(name) for name in "fgh")


def test_masks_and_logit_rows() -> None:
    first = new_forward(**FIRST)
    assert joined_forward([first]) is first
    joined = joined_forward([first, new_forward(**SECOND)])
    assert listed(joined) == JOINED
    assert joined.parents.tolist() == [1, 3, 2]
    dtypes = [joined.token_ids.dtype, joined.positions.dtype, joined.logit_rows.dtype]
    assert dtypes == [np.int64] * 3 and joined.mask.dtype == np.bool_


WANTED = [  # (of the first, of the second, of both)
    ({"logit_rows": []}, {}, {"logit_rows": [2]}),
    ({}, {"logit_rows": []}, {"logit_rows": [1, 0]}),
    ({"feature_rows": [0, 1]}, {"feature_rows": [0]}, {"feature_rows": [0, 1, 2]}),
    ({"feature_rows": [1]}, {}, {"feature_rows": [1]}),
    ({}, {"feature_rows": [0]}, {"feature_rows": [2]}),
    ({"feature_rows": []}, {"feature_rows": []}, {"feature_rows": []}),
    (
        {"parents": new_parents((F, G), [1, ZEROS], [4, 0])},
        {"parents": new_parents((G,), [0], [2])},
        {"parents": (["f", "g"], [1, ZEROS, 1], [4, 0, 2])},
    ),
    ({"source": "a picture"}, {"source": "a picture"}, {"source": "a picture"}),
]


@pytest.mark.parametrize(("first", "second", "both"), WANTED)
def test_what_is_wanted_of_either(first: dict, second: dict, both: dict) -> None:
    joined = joined_forward([new_forward(**FIRST | first), new_forward(**SECOND | second)])
    assert listed(joined) == JOINED | both


def test_requests_share_the_forwards_that_their_parents_features_lie_in() -> None:
    parts = [
        new_parents((F, G), [1, ZEROS, 0], [4, 0, 1]),
        new_parents((), [ZEROS], [0]),
        new_parents((H, G), [1, 0, ZEROS], [2, 3, 0]),
    ]
    forwards, sources, rows = listed_parents(joined_parents(parts))
    assert forwards == ["f", "g", "h"]
    assert sources == [1, ZEROS, 0, ZEROS, 1, 2, ZEROS]
    assert rows == [4, 0, 1, 0, 2, 3, 0]
    assert joined_parents(parts[:1]) is parts[0]
    equal = NamedFeatures("f"), NamedFeatures("f")  # the same forward is the same object
    joined = joined_parents([new_parents((features,), [0], [0]) for features in equal])
    assert joined.sources.tolist() == [0, 1]


def test_the_parts_of_a_joined_forward_are_the_forwards() -> None:
    first = new_forward(**FIRST, feature_rows=[1])
    second = new_forward(**SECOND, feature_rows=[0])
    joined = joined_forward([first, second])
    assert [listed(joined.part(0, 2)), listed(joined.part(2, 3))] == [listed(first), listed(second)]


def test_rows_keep_their_sources_where_they_have_several() -> None:
    """Of the three requests the first and the last have one source."""
    given = [(FIRST, "a"), (SECOND, "b"), (SECOND, "a")]
    joined = joined_forward([new_forward(**rows, source=source) for rows, source in given])
    assert joined.source is None
    assert joined.row_sources.distinct == ("a", "b")
    assert joined.row_sources.index.tolist() == [0, 0, 1, 0]
    assert joined.row_sources.index.dtype == np.int64
    one, two = joined.part(0, 2), joined.part(2, 4)
    assert (one.source, one.sources) == ("a", None)
    assert (two.source, two.row_sources.distinct) == (None, ("b", "a"))
    assert two.row_sources.index.tolist() == [0, 1]
    again = joined_forward([two, one])
    assert again.row_sources.distinct == ("b", "a")
    assert again.row_sources.index.tolist() == [0, 1, 1, 1]
    with_none = joined_forward([new_forward(**FIRST), new_forward(**SECOND, source="a")])
    assert with_none.row_sources.distinct == (None, "a")


def calls() -> list[Forward]:
    """Three calls with 2, 0 and 1 logit rows, 3, 0 and 1 pairs, 1, 2 and 1 features."""
    no_logits = {"mask": np.tri(2), "token_ids": [1, 2], "positions": [0, 1], "logit_rows": []}
    return [
        new_forward(**FIRST, feature_rows=[1]),
        new_forward(**no_logits, feature_rows=[0, 1]),
        new_forward(**SECOND, feature_rows=[0]),
    ]


VALUES = np.arange(6, dtype=np.float32).reshape(3, 2)
SUMS = np.array([0.5, 1.5, 2.5], np.float32)


def test_each_gets_its_rows_of_all_logits() -> None:
    parts = ForwardResult(DenseLogits(VALUES)).parts(calls())
    assert [part.logits.values.tolist() for part in parts] == [[[0, 1], [2, 3]], [], [[4, 5]]]
    assert [len(part.logits) for part in parts] == [2, 0, 1]
    assert parts[2].logits.full.read(np.array([0])).tolist() == [[4, 5]]
    assert [part.features for part in parts] == [None] * 3


class Kept:
    """Full logits of three rows."""

    def read(self, rows: np.ndarray) -> np.ndarray:
        return VALUES[rows]

    def read_tokens(self, rows: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        return VALUES[rows, token_ids]


def test_each_gets_its_rows_of_the_largest_logits_and_reads_no_others() -> None:
    ids = np.array([[3, 4], [5, 6], [7, 8]])
    parts = ForwardResult(TopLogits(ids, VALUES, SUMS, Kept())).parts(calls())
    first, none, last = [part.logits for part in parts]
    assert (first.top_ids.tolist(), last.top_ids.tolist()) == ([[3, 4], [5, 6]], [[7, 8]])
    assert (first.top_logits.tolist(), last.top_logits.tolist()) == ([[0, 1], [2, 3]], [[4, 5]])
    assert (first.logsumexp.tolist(), last.logsumexp.tolist()) == ([0.5, 1.5], [2.5])
    assert [len(logits) for logits in (first, none, last)] == [2, 0, 1]
    assert isinstance(first.full, FullLogitsPart)
    assert first.full.read(np.array([1, 1])).tolist() == [[2, 3], [2, 3]]
    assert last.full.read(np.array([0])).tolist() == [[4, 5]]
    assert last.full.read_tokens(np.array([0, 0]), np.array([1, 0])).tolist() == [5, 4]
    for logits, row in ((first, -1), (first, 2), (none, 0), (last, 1), (last, -1)):
        with pytest.raises(ModelError, match=rf"full logits of rows \[{row}\] are read, expected"):
            logits.full.read(np.array([row]))
        with pytest.raises(ModelError, match=rf"full logits of rows \[{row}\] are read, expected"):
            logits.full.read_tokens(np.array([row]), np.array([0]))
    without = ForwardResult(TopLogits(ids, VALUES, SUMS)).parts(calls())
    assert [part.logits.full for part in without] == [None] * 3


def test_features_are_shared_and_each_knows_where_its_own_begin() -> None:
    result = ForwardResult(DenseLogits(VALUES), F)
    assert result.parts(calls()[:1]) == [result]
    parts = result.parts(calls())
    assert all(part.features is F for part in parts)
    assert [part.first_feature for part in parts] == [0, 1, 3]
