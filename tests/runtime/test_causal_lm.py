"""CausalLM over a fake session: rows, chunks, masks, peaks, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest

from dsbd_forward.forward import Forward, RowSources
from dsbd_runtime.engine.causal_lm import CausalLM, SourceReadingLM
from dsbd_runtime.errors import CapacityError, DsbdError, InputError
from dsbd_runtime.parts.attention.attention_rows import ATTENTION_MASK, MAX_FORWARD_ROWS
from dsbd_runtime.parts.source.sources import Sources
from tests.runtime.fakes import BYTES_PER_ROW, FakeSession
from tests.runtime.model_calls import logits_of
from tests.runtime.tiny_graph import TinyModel

VOCAB_SIZE = 2000
ENTRY = TinyModel(vocab_size=VOCAB_SIZE).entry()


def new_model(**changes):
    entry = replace(ENTRY, **changes)
    session = FakeSession(entry)
    return session, CausalLM(session, entry)


def append_chain(model, num_new, logit_rows=None):
    """Append rows whose token id and position are their row number."""
    rows = np.arange(model.num_rows, model.num_rows + num_new)
    mask = np.arange(rows[-1] + 1) <= rows[:, None]
    return logits_of(model, rows, rows, mask, np.array(logit_rows or [], np.int64))


def test_a_long_step_goes_in_chunks_into_caches_reserved_at_once():
    session, model = new_model()
    append_chain(model, 10)
    logits = append_chain(model, 1500, [1499, 0, 255, 256, 256])
    chunks = session.calls[1:]
    assert [call.forward.num_new for call in chunks] == [256] * 5 + [220]
    assert [call.first_row for call in chunks] == [10 + 256 * i for i in range(6)]
    assert {mask.shape[1] for call in chunks for mask in call.masks.values()} == {1536}
    assert max(len(mask) for call in chunks for mask in call.masks.values()) == MAX_FORWARD_ROWS
    assert logits.shape == (5, VOCAB_SIZE)
    assert logits[:, 0].tolist() == [1509, 10, 265, 266, 266]
    assert session.token_rows[: model.num_rows].tolist() == list(range(1510))
    for call in chunks:
        rows = call.first_row + np.arange(call.forward.num_new)
        np.testing.assert_array_equal(call.masks[ATTENTION_MASK], np.arange(1536) <= rows[:, None])


KEEPS = [
    # rows kept of 8, moves asked of the session
    ([0, 1, 2], []),
    ([0, 1, 2, 3, 4, 5, 6, 7], []),
    ([], []),
    ([3], [([3], 0)]),
    ([0, 1, 4, 6], [([4, 6], 2)]),
    ([0, 2, 3, 7], [([2, 3, 7], 1)]),
]


@pytest.mark.parametrize(("rows", "moves"), KEEPS)
def test_keep_moves_only_the_rows_after_the_first_gap(rows, moves):
    session, model = new_model()
    append_chain(model, 8)
    model.keep(np.array(rows, np.int64))
    assert session.moves == moves
    assert model.num_rows == len(rows)
    assert session.token_rows[: len(rows)].tolist() == rows


def test_bytes_and_their_peak():
    session, model = new_model()
    assert model.kv_bytes == model.kv_bytes_peak == 64 * BYTES_PER_ROW
    append_chain(model, 200)
    model.keep(np.arange(70))
    assert model.kv_bytes == 256 * BYTES_PER_ROW  # dropping rows keeps the memory
    model.shrink()
    assert model.kv_bytes == 128 * BYTES_PER_ROW
    append_chain(model, 2, [1])
    assert session.calls[-1].first_row == 70
    assert session.token_rows[:72].tolist() == list(range(72))
    model.keep(np.array([], np.int64))
    assert model.kv_bytes == 64 * BYTES_PER_ROW  # dropping all gives it back
    assert model.kv_bytes_peak == 256 * BYTES_PER_ROW
    model.reset_peak()
    assert model.kv_bytes_peak == 64 * BYTES_PER_ROW
    with model as same:
        assert same is model
    assert session.is_closed
    with pytest.raises(DsbdError, match="closed"):
        append_chain(model, 1)


@pytest.mark.parametrize("num_new", [2, 1000])
def test_a_failing_engine_leaves_the_rows_as_they_were(num_new):
    fail = [False]

    def answer(inputs):
        if fail[0] and inputs.first_row + inputs.forward.num_new == num_new + 4:
            raise RuntimeError("engine")

    session = FakeSession(ENTRY, answer)
    model = CausalLM(session, ENTRY)
    append_chain(model, 4)
    fail[0] = True
    with pytest.raises(RuntimeError, match="engine"):
        append_chain(model, num_new)
    assert model.num_rows == 4
    assert session.token_rows[:4].tolist() == [0, 1, 2, 3]
    fail[0] = False
    append_chain(model, num_new)
    assert model.num_rows == num_new + 4


def test_a_failing_move_leaves_the_rows_before_the_gap():
    class FailingMoves(FakeSession):
        def move_rows(self, src_rows, first_row):
            raise RuntimeError("move")

    model = CausalLM(FailingMoves(ENTRY), ENTRY)
    append_chain(model, 8)
    with pytest.raises(RuntimeError, match="move"):
        model.keep(np.array([0, 1, 5]))
    assert model.num_rows == 2


class FewSources:
    """Slots with room for two sources a call."""

    num_bytes = 0

    def __init__(self):
        self.read_ones = []
        self.released = []

    def most_together(self, sources):
        return 2

    def read(self, source):
        self.read_ones.append(source)

    def release(self, source):
        self.released.append(source)


class BoundNowhere(Sources):
    """The sources of an engine whose calls read none."""

    def bind(self, call, binder):
        pass


def test_a_forward_of_more_sources_than_fit_goes_in_several_calls():
    slots = FewSources()
    session = FakeSession(ENTRY, others=(BoundNowhere(None, slots),))
    model = SourceReadingLM(session, ENTRY)
    index = np.array([0, 0, 1, 0, 2, 1, 1, 2, 0])
    size = len(index)
    rows = np.arange(size)
    forward = Forward(
        rows,
        np.zeros(size, np.int64),
        np.eye(size, dtype=np.bool_),
        np.array([8, 0, 4, 3]),
        sources=RowSources(("a", "b", "c"), index),
    )
    result = model.forward(forward)
    assert result.logits.values[:, 0].tolist() == [8, 0, 4, 3]
    found = [call.forward.row_sources for call in session.calls]
    assert [each.distinct for each in found] == [("a", "b"), ("c", "b"), ("a",)]
    assert [each.index.tolist() for each in found] == [[0, 0, 1, 0], [0, 1, 1, 0], [0]]
    assert session.calls[2].forward.source == "a"
    assert [call.first_row for call in session.calls] == [0, 4, 8]
    model.read_source("a")
    model.release_source("b")
    assert (slots.read_ones, slots.released) == (["a"], ["b"])
    mask = np.eye(size, 2 * size, size, dtype=np.bool_)
    model.forward(replace(forward, mask=mask, source="a", sources=None))
    assert len(session.calls) == 4


ONE = {
    "token_ids": np.array([1]),
    "positions": np.array([4]),
    "mask": np.ones((1, 5), np.bool_),
    "logit_rows": np.array([0]),
}
TWO = {
    "token_ids": np.array([1, 2]),
    "positions": np.array([4, 5]),
    "mask": np.tri(2, 6, 4, dtype=np.bool_),
    "logit_rows": np.array([0]),
}
LONG = {  # in three calls
    "token_ids": np.ones(600, np.int64),
    "positions": np.arange(4, 604),
    "mask": np.tri(600, 604, 4, dtype=np.bool_),
    "logit_rows": np.array([0]),
}
LOOKING_AHEAD = LONG["mask"].copy()
LOOKING_AHEAD[3, 603] = True
BAD_STEPS = [
    (ONE, {"token_ids": [1]}, "token_ids is a list, expected a numpy array"),
    (ONE, {"token_ids": np.array([1], np.int32)}, "token_ids has shape .1,. and type int32"),
    (ONE, {"token_ids": np.array([[1]])}, "token_ids has shape .1, 1."),
    (ONE, {"token_ids": np.array([], np.int64)}, "token_ids is empty"),
    (ONE, {"token_ids": np.array([-1])}, r"token_ids\[0\] is -1, expected 0 to 1999"),
    (TWO, {"token_ids": np.array([0, 2000])}, r"token_ids\[1\] is 2000, expected 0 to 1999"),
    (ONE, {"positions": np.array([1, 2])}, r"positions has shape \(2,\), expected \(1,\)"),
    (ONE, {"positions": np.array([-1])}, r"positions\[0\] is -1"),
    (ONE, {"mask": np.ones((1, 5), np.int64)}, "mask has shape .1, 5. and type int64"),
    (ONE, {"mask": np.ones((1, 4), np.bool_)}, r"mask has shape \(1, 4\), expected \(1, 5\)"),
    (TWO, {"mask": np.ones((2, 6), np.bool_)}, "mask lets a row see a later row"),
    (LONG, {"mask": LOOKING_AHEAD}, "mask lets a row see a later row"),
    (ONE, {"logit_rows": np.array([1])}, r"logit_rows\[0\] is 1, expected 0 to 0"),
    (ONE, {"logit_rows": np.array([0.0])}, "logit_rows has shape .1,. and type float64"),
]


@pytest.mark.parametrize(("good", "changes", "message"), BAD_STEPS)
def test_a_bad_step_is_refused_and_changes_nothing(good, changes, message):
    session, model = new_model()
    append_chain(model, 4)
    with pytest.raises(InputError, match=message):
        logits_of(model, **{**good, **changes})
    assert model.num_rows == 4
    assert len(session.calls) == 1
    logits_of(model, **good)


def test_a_position_beyond_the_context_is_a_capacity_error():
    _, model = new_model(context_length=10)
    append_chain(model, 10)
    with pytest.raises(CapacityError, match=r"position 10 does not fit.* 10 positions \(0 to 9\)"):
        append_chain(model, 1)
    sibling = np.tri(1, 11, 10, dtype=np.bool_)
    logits_of(model, np.array([3]), np.array([9]), sibling, np.array([0]))
    assert model.num_rows == 11  # rows may outnumber positions


BAD_KEEPS = [
    ([0, 1], "rows is a list"),
    (np.array([0, 1], np.int32), "type int32"),
    (np.array([[0, 1]]), "has shape .1, 2."),
    (np.array([1, 1]), r"rows\[1\] is 1 after 1, expected strictly increasing"),
    (np.array([2, 1]), r"rows\[1\] is 1 after 2, expected strictly increasing"),
    (np.array([0, 4]), r"rows\[1\] is 4, expected 0 to 3"),
    (np.array([-1, 2]), r"rows\[0\] is -1"),
]


@pytest.mark.parametrize(("rows", "message"), BAD_KEEPS)
def test_a_bad_keep_is_refused_and_changes_nothing(rows, message):
    _, model = new_model()
    append_chain(model, 4)
    with pytest.raises(InputError, match=message):
        model.keep(rows)
    assert model.num_rows == 4
