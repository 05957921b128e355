"""Given prompts: pieces and their digests, places, positions, and how many rows are alike."""

import numpy as np
import pytest

from dsbd_forward.forward import num_alike
from dsbd_runtime.errors import BundleError, InputError
from dsbd_runtime.media.given_sound import ChunkedSound
from dsbd_runtime.parts.given.given_prompt import GivenPiece, GivenPrompt
from dsbd_runtime.typed_json import typed

SOUND = ChunkedSound(
    sampling_rate=16_000,
    num_mels=4,
    n_fft=400,
    hop_length=160,
    chunk_frames=100,
    window_frames=200,
    least_samples=8_000,
)
PLACEHOLDER = 9


def piece(value, num_rows):
    return GivenPiece({"values": np.full((2, num_rows), value, np.float32)}, num_rows)


def prompt(ids, *pieces, positions=None):
    places = (np.array(ids) == PLACEHOLDER).nonzero()[0]
    return GivenPrompt(places, pieces, positions)


ROWS = [(1, 1), (8, 1), (9, 2), (37, 5), (100, 13), (101, 14), (200, 26), (437, 57)]


@pytest.mark.parametrize(("num_frames", "num_rows"), ROWS)
def test_rows_of_a_sound_in_windows(num_frames, num_rows):
    features = np.arange(4 * num_frames, dtype=np.float32).reshape(4, -1)
    pieces = SOUND.pieces(features)
    assert SOUND.num_rows(num_frames) == num_rows == sum(each.num_rows for each in pieces)
    chunks = np.concatenate([each.inputs["input_features"] for each in pieces])
    joined = chunks.transpose(1, 0, 2).reshape(4, -1)
    assert np.array_equal(joined[:, :num_frames], features)
    assert not joined[:, num_frames:].any()
    for each in pieces:
        assert np.array_equal(each.inputs["kept_rows"], np.arange(each.num_rows))
        assert len(each.inputs["input_features"]) <= 2


def test_the_values_of_a_piece_are_copied_and_never_written():
    values = np.zeros((2, 3), np.float32)
    made = GivenPiece({"values": values}, 3)
    values[:] = 1
    assert not made.inputs["values"].any()
    with pytest.raises(ValueError, match="read-only"):
        made.inputs["values"][0] = 1


def test_equality_is_of_values_places_and_positions_not_of_later_text():
    ids = [1, 9, 9, 2]
    one = prompt(ids, piece(0, 2))
    assert one == prompt([*ids, 3, 4], piece(0, 2))
    assert hash(one) == hash(prompt([*ids, 3, 4], piece(0, 2)))
    assert one != prompt(ids, piece(1, 2))
    assert one != prompt([1, 1, 9, 9], piece(0, 2))
    assert one != prompt(ids, piece(0, 1), piece(0, 1))
    axes = np.array([[0, 1, 1], [0, 1, 2]])
    assert one != prompt(ids, piece(0, 2), positions=axes)
    assert prompt(ids, piece(0, 2), positions=axes) == prompt(ids, piece(0, 2), positions=axes)
    assert prompt(ids, piece(0, 2), positions=axes) != prompt(ids, piece(0, 2), positions=axes * 0)
    assert one != "a" and one != ids


def test_the_type_and_shape_of_a_piece_are_a_part_of_it():
    zeros = np.zeros((2, 3), np.float32)
    digests = {
        GivenPiece({"a": zeros}, 3).digest,
        GivenPiece({"b": zeros}, 3).digest,
        GivenPiece({"a": zeros}, 2).digest,
        GivenPiece({"a": zeros.reshape(3, 2)}, 3).digest,
        GivenPiece({"a": zeros.astype(np.int32)}, 3).digest,
    }
    assert len(digests) == 5


TWO = [1, 9, 9, 2, 9, 3]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (prompt(TWO, piece(0, 2), piece(1, 1)), None),  # equal
        (None, 1),
        ("a", 1),
        (prompt(TWO, piece(5, 2), piece(1, 1)), 1),
        (prompt(TWO, piece(0, 2), piece(5, 1)), 4),
        (prompt(TWO[:4], piece(0, 2)), 4),
        (prompt([1, 9, 9, 9], piece(0, 2), piece(1, 1)), 3),
        (prompt([9, 9], piece(0, 2)), 0),
        (prompt([1, 1, 1, 9], piece(0, 1)), 1),
    ],
)
def test_rows_that_are_alike_end_before_the_first_piece_that_differs(other, expected):
    one = prompt(TWO, piece(0, 2), piece(1, 1))
    assert num_alike(one, other) == expected
    assert num_alike(other, one) == expected


def test_rows_that_are_alike_end_before_another_position_too():
    def on_axes(*columns):
        return prompt([1, 9, 9, 2], piece(0, 2), positions=np.array(columns).T)

    one = on_axes((0, 0), (1, 1), (1, 2))
    assert num_alike(one, on_axes((0, 0), (1, 1), (2, 1))) == 2
    assert num_alike(one, on_axes((0, 1), (1, 1), (1, 2))) == 0
    assert num_alike(one, None) == 1
    assert num_alike(on_axes((1, 1), (1, 1), (1, 2)), None) == 0
    longer = prompt(
        [1, 9, 9, 2, 9], piece(0, 2), piece(1, 1), positions=np.array([[0, 1, 1, 3, 4]] * 2)
    )
    assert num_alike(one, longer) == 2  # row 2 has [1, 2] and [1, 1]


def test_given_nodes_of_a_call_their_pieces_and_rows():
    one = prompt(TWO, piece(0, 2), piece(1, 1))
    assert one.end == 5
    assert repr(one) == "GivenPrompt(2 pieces, 3 rows from place 1)"
    nodes, pieces, rows = one.given_among(np.array([4, 0, 2, 7, 5, 3, 1]))
    assert [nodes.tolist(), pieces.tolist(), rows.tolist()] == [[0, 2, 6], [1, 0, 0], [0, 1, 0]]


def test_positions_on_axes_go_on_after_the_largest():
    positions = np.array([[0, 1, 1, 1, 1], [0, 1, 1, 2, 2], [0, 1, 2, 1, 2]])
    one = prompt([1, 9, 9, 9, 9], piece(0, 4), positions=positions)
    found = one.on_axes(np.array([0, 3, 4, 5, 6, 6]), 3)
    assert found.tolist() == [[0, 1, 1, 3, 4, 4], [0, 2, 2, 3, 4, 4], [0, 1, 2, 3, 4, 4]]
    assert (
        prompt(TWO, piece(0, 2), piece(1, 1)).on_axes(np.array([5, 2]), 3).tolist() == [[5, 2]] * 3
    )


def test_a_sound_in_a_manifest_is_checked():
    made = typed(ChunkedSound, {**vars(SOUND)}, "sound")
    made.check("sound")
    assert made == SOUND
    for name, value in (("window_frames", 150), ("num_mels", 0), ("least_samples", 10**9)):
        with pytest.raises(BundleError, match=f"sound: {name} is {value}"):
            typed(ChunkedSound, {**vars(SOUND), name: value}, "sound").check("sound")


def placed(places, pieces, positions=None):
    return GivenPrompt(np.array(places, np.int64), pieces, positions)


REFUSED = [  # (what makes it, what is said)
    *(
        (lambda shape=shape: SOUND.pieces(np.zeros(shape, np.float32)), r"expected \(4, number of")
        for shape in ((4, 0), (3, 10), (10,), (1, 4, 10))
    ),
    *(
        (lambda values=values: GivenPiece({"values": values}, 1), "no finite numbers")
        for values in (np.array([np.nan]), np.array([np.inf], np.float32), np.array(["a"]))
    ),
    (lambda: GivenPiece({}, 0), "has 0 rows"),
    (lambda: placed([], ()), "0 places for given rows, but 0 pieces"),
    (lambda: placed([1, 2], (piece(0, 1),)), "2 places for given rows, but 1 pieces with 1 rows"),
    (lambda: placed([2, 1], (piece(0, 2),)), "not increasing"),
    (lambda: placed([1, 1], (piece(0, 2),)), "not increasing"),
    (lambda: placed([-1, 1], (piece(0, 2),)), "not increasing"),
    (lambda: placed([1, 2], (piece(0, 2),), np.zeros((3, 4), int)), r"expected \(axes, 3\)"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_senseless_pieces_and_prompts_are_refused(make, words):
    with pytest.raises(InputError, match=words):
        make()
