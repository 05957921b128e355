"""Forwards of several requests made in one, and what each gets of the result."""

import numpy as np
import pytest

from dsbd_forward.errors import ModelError
from dsbd_forward.features import ZEROS, joined_parents
from dsbd_forward.forward import Forward, ForwardResult, joined_forward
from dsbd_forward.logits import DenseLogits, FullLogitsPart, TopLogits
from tests.forward.tables import NamedFeatures, listed, listed_parents, new_forward, new_parents

# Two requests with the rows [0, 1] and [2] add two rows and one; each mask is made for its place.
FIRST = {
    "mask": [[1, 1, 0, 1, 0], [1, 1, 0, 1, 1]],
    "token_ids": [5, 6],
    "positions": [2, 3],
    "logit_rows": [1, 0],
}
SECOND = {
    "mask": [[0, 0, 1, 0, 0, 1]],
    "token_ids": [7],
    "positions": [1],
    "logit_rows": [0],
}
JOINED = {
    "mask": [
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 1, 1, 0],
        [0, 0, 1, 0, 0, 1],
    ],
    "token_ids": [5, 6, 7],
    "positions": [2, 3, 1],
    "logit_rows": [1, 0, 2],
    "feature_rows": None,
    "parents": None,
    "source": None,
}
F, G, H = (NamedFeatures(name) for name in "fgh")


def test_masks_and_logit_rows() -> None:
    joined = joined_forward([new_forward(**FIRST), new_forward(**SECOND)])
    assert listed(joined) == JOINED
    assert joined.parents.tolist() == [1, 3, 2]
    dtypes = [joined.token_ids.dtype, joined.positions.dtype, joined.logit_rows.dtype]
    assert dtypes == [np.int64] * 3 and joined.mask.dtype == np.bool_


def test_one_forward_stays_as_it_is() -> None:
    forward = new_forward(**FIRST)
    assert joined_forward([forward]) is forward


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


def test_forwards_are_the_same_whose_features_are_the_same_object() -> None:
    twins = NamedFeatures("f"), NamedFeatures("f")
    assert twins[0] == twins[1]
    joined = joined_parents([new_parents((twin,), [0], [0]) for twin in twins])
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


def test_the_one_source_of_all_rows() -> None:
    forward = new_forward(**FIRST, source="a")
    assert forward.row_sources.distinct == ("a",)
    assert forward.row_sources.index.tolist() == [0, 0]


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


def test_without_full_logits_no_part_has_them() -> None:
    parts = ForwardResult(TopLogits(VALUES.astype(np.int64), VALUES, SUMS)).parts(calls())
    assert [part.logits.full for part in parts] == [None] * 3


def test_features_are_shared_and_each_knows_where_its_own_begin() -> None:
    parts = ForwardResult(DenseLogits(VALUES), F).parts(calls())
    assert all(part.features is F for part in parts)
    assert [part.first_feature for part in parts] == [0, 1, 3]


def test_the_result_of_one_forward_is_its_own() -> None:
    result = ForwardResult(DenseLogits(VALUES), F)
    assert result.parts(calls()[:1]) == [result]
