"""Given rows of calls: what is bound, which pieces are read and kept, and what is refused."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dsbd_forward.forward import Forward, joined_forward
from dsbd_runtime.errors import BundleError, EngineError, InputError, ProviderError
from dsbd_runtime.ort.ort_module import import_ort
from dsbd_runtime.parts.given.given_encoder import GivenEncoder
from dsbd_runtime.parts.given.given_prompt import GivenPiece, GivenPrompt
from dsbd_runtime.parts.given.given_rows import GivenEntry, GivenRows, GivenRowsEntry, embeddings_of
from dsbd_runtime.parts.part import Call, DevicePlace, GraphContract
from tests.runtime.fakes import RecordingBinder, described
from tests.runtime.test_given_prompt import SOUND

ORT = import_ort()
ENTRY = GivenEntry(placeholder_token_id=9, width=3, levels=1, position_axes=2, medium=SOUND)
CONTRACT = GraphContract(inputs=SOUND.encoder_inputs, outputs=embeddings_of(ENTRY))
BYTES_OF_ROW = 4 * ENTRY.row_width


class FakeEngine:
    """An encoder as ONNX Runtime describes it: row r of a piece is its first value plus r."""

    num_missing = 0

    def get_inputs(self):
        return described(CONTRACT.inputs)

    def get_outputs(self):
        return described(CONTRACT.outputs)

    def run_with_ort_values(self, names, feeds):
        first = float(feeds["input_features"].numpy()[0, 0, 0])
        if first == 13:
            raise RuntimeError("Failed to allocate memory")
        rows = first + np.arange(len(feeds["kept_rows"].numpy()) - self.num_missing)
        found = np.repeat(rows[:, None], ENTRY.row_width, axis=1).astype(np.float32)
        return [ORT.OrtValue.ortvalue_from_numpy(found)]


def pieces_of(value, num_frames):
    return SOUND.pieces(np.full((4, num_frames), value, np.float32))


def part_with(engine, most_rows=10**6):
    ticks = iter(range(1000))
    encoder = GivenEncoder(
        ORT,
        Path("target/encoder.onnx"),
        CONTRACT,
        engine,
        most_rows * BYTES_OF_ROW,
        lambda: next(ticks),
    )
    return GivenRows(ENTRY, encoder)


def bound(part, *forwards):
    call, binder = Call(joined_forward(forwards), 0), RecordingBinder()
    part.bind(call, binder)
    return binder.arrays, call.returned.get("reading")


def forward(positions, source):
    size = len(positions)
    mask = np.tri(size, dtype=np.bool_)
    none = np.arange(0)
    ids = np.full(size, ENTRY.placeholder_token_id)
    return Forward(ids, np.array(positions), mask, none, source=source)


SHORT = pieces_of(100, 17)  # 3 rows
AXES = np.array([[0, 1, 1, 1], [0, 1, 2, 3]])
PROMPT = GivenPrompt(np.arange(1, 4), SHORT, AXES)


def test_rows_and_positions_of_a_call():
    arrays, reading = bound(part_with(FakeEngine()), forward([0, 1, 2, 3, 4, 5], PROMPT))
    assert arrays["given_rows"].tolist() == [1, 2, 3]
    assert arrays["given_embeddings"].tolist() == [[100 + row] * 6 for row in range(3)]
    assert arrays["position_ids"].tolist() == [[0, 1, 1, 1, 4, 5], [0, 1, 2, 3, 4, 5]]
    assert (reading.num_tokens, reading.seconds, reading.own_seconds) == (3, 1, 1)


def test_a_prompt_over_the_border_of_calls_is_read_once():
    part = part_with(FakeEngine())
    first, _ = bound(part, forward([0, 1], PROMPT))
    second, reading = bound(part, forward([2, 3, 4], PROMPT))
    assert first["given_embeddings"][:, 0].tolist() == [100]
    assert (second["given_rows"].tolist(), reading) == ([0, 1], None)
    assert second["given_embeddings"][:, 0].tolist() == [101, 102]
    assert part.encoder.num_read == 1


def test_a_piece_without_rows_in_the_call_is_not_read():
    part = part_with(FakeEngine())
    two = GivenPrompt(np.array([1, 2, 3, 5, 6, 7]), [*SHORT, *pieces_of(200, 17)])
    bound(part, forward([4], two))
    bound(part, forward([8, 9], two))
    assert part.encoder.num_read == 0
    arrays, _ = bound(part, forward([6], two))
    assert arrays["given_embeddings"][:, 0].tolist() == [201]
    assert part.encoder.num_read == 1


def test_rows_of_several_prompts_in_a_call_are_in_the_order_of_its_nodes():
    other = GivenPrompt(np.arange(2), pieces_of(200, 9))
    arrays, reading = bound(
        part_with(FakeEngine()),
        *(forward([1, 2], PROMPT), forward([0, 1], other), forward([1], None)),
        *(forward([3], PROMPT), forward([9], other)),
    )
    assert arrays["given_rows"].tolist() == [0, 1, 2, 3, 5]
    assert arrays["given_embeddings"][:, 0].tolist() == [100, 101, 200, 201, 102]
    assert arrays["position_ids"].tolist() == [[1, 1, 0, 1, 1, 1, 9], [1, 2, 0, 1, 1, 3, 9]]
    assert reading.num_tokens == 5


def test_a_call_after_the_prompt_and_one_of_text_have_no_given_rows():
    part = part_with(FakeEngine())
    for source in (PROMPT, None):
        arrays, reading = bound(part, forward([7, 8], source))
        assert arrays["given_rows"].shape == (0,) and reading is None
        assert arrays["given_embeddings"].shape == (0, 6)
        assert arrays["given_embeddings"].dtype == np.float32
    assert part.encoder.num_read == 0


def test_the_rows_used_last_are_kept_within_the_memory():
    part = part_with(FakeEngine(), most_rows=6)
    prompts = [GivenPrompt(np.arange(3), pieces_of(value, 17)) for value in (1, 2, 3)]
    for number in (0, 1, 0, 2, 0):
        bound(part, forward([0, 1, 2], prompts[number]))
    assert part.encoder.num_read == 3 and part.num_bytes == 6 * BYTES_OF_ROW
    bound(part, forward([1], prompts[1]))  # it was dropped for the third
    assert part.encoder.num_read == 4 and part.num_bytes == 6 * BYTES_OF_ROW
    large = GivenPrompt(np.arange(26), pieces_of(4, 200))
    bound(part, forward([25], large))  # more than the memory: kept for the next call of its prompt
    assert part.num_bytes == 26 * BYTES_OF_ROW
    part.reserve(0, 0)
    assert part.num_bytes == 0
    part.reserve(5, 0)
    bound(part, forward([1], prompts[1]))
    part.reserve(9, 3)
    assert part.num_bytes == 3 * BYTES_OF_ROW


def test_other_sources_are_refused():
    part = part_with(FakeEngine())
    three_axes = GivenPrompt(np.arange(3), SHORT, np.zeros((3, 3), np.int64))
    for source in ((1, 2), "a", three_axes):
        with pytest.raises(InputError, match="expected a GivenPrompt with positions on 2 axes"):
            part.read(source)
        with pytest.raises(InputError, match="expected a GivenPrompt"):
            bound(part, forward([0], source))
    part.read(None)
    another = forward([0, 1, 2], PROMPT)
    another.token_ids = np.array([5, 9, 7])  # the first is not given
    words = "the token 7 at the place of a given row, .* placeholder 9"
    with pytest.raises(InputError, match=words):
        bound(part, another)


WRONG = [
    ({"input_features": np.zeros((1, 4, 100), np.float32)}, "kept_rows is missing"),
    (
        {"input_features": np.zeros((1, 5, 100), np.float32), "kept_rows": np.arange(2)},
        r"input_features is float32 \[1, 5, 100\], the encoder in target expects",
    ),
    (
        {"input_features": np.zeros((1, 4, 100)), "kept_rows": np.arange(2)},
        "input_features is float64",
    ),
    ({**SHORT[0].inputs, "pixels": np.zeros(3)}, "pixels is float64 .* expects no such input"),
]


@pytest.mark.parametrize(("inputs", "words"), WRONG)
def test_pieces_of_another_encoder_are_refused_before_a_call_has_them(inputs, words):
    part, prompt = part_with(FakeEngine()), GivenPrompt(np.arange(2), [GivenPiece(inputs, 2)])
    for refused in (lambda: part.read(prompt), lambda: bound(part, forward([0], prompt))):
        with pytest.raises(InputError, match=words):
            refused()
    assert part.encoder.num_read == part.num_bytes == 0


def test_a_failed_run_of_the_encoder_leaves_the_memory_as_it_was():
    part = part_with(FakeEngine())
    bound(part, forward([1], PROMPT))
    unlucky = GivenPrompt(np.arange(3), pieces_of(13, 17))
    with pytest.raises(Exception, match=r"no memory for a call of .*3 rows.*run fewer requests"):
        bound(part, forward([0], unlucky))
    assert part.num_bytes == 3 * BYTES_OF_ROW
    part.encoder._engine.num_missing = 1
    with pytest.raises(EngineError, match="returned 1 rows of a piece that has 2"):
        bound(part, forward([0], GivenPrompt(np.arange(2), pieces_of(5, 9))))


def test_of_several_prompts_the_one_that_cannot_be_read_is_returned_with_its_error():
    part, unlucky = part_with(FakeEngine()), GivenPrompt(np.arange(3), pieces_of(13, 17))
    joined = joined_forward([forward([0, 1], unlucky), forward([1, 2], PROMPT)])
    call, binder = Call(joined, 0), RecordingBinder()
    part.bind(call, binder)
    assert binder.arrays["given_rows"].tolist() == [2, 3]
    assert binder.arrays["given_embeddings"][:, 0].tolist() == [100, 101]
    ((source, error),) = call.returned["failed"].items()
    assert source == unlucky and "no memory for a call of" in str(error)


def test_devices_refuse_given_rows_in_one_sentence():
    place = DevicePlace(device=SimpleNamespace(name="cuda"), rows=None)
    with pytest.raises(ProviderError, match=r"^cuda reads no prompts with sound or pictures; run"):
        GivenRowsEntry(given=ENTRY).on_device(place)


def test_the_contract_of_the_graph():
    contract = GivenRowsEntry(given=ENTRY).contract()
    shapes = {name: spec.shape for name, spec in contract.inputs.items()}
    assert shapes == {"given_rows": ("E",), "given_embeddings": ("E", 6), "position_ids": (2, "S")}
    one_axis = GivenEntry(**{**vars(ENTRY), "position_axes": 1})
    assert "position_ids" not in GivenRowsEntry(given=one_axis).contract().inputs


WRONG_FIELDS = [("width", 0), ("levels", -1), ("levels", 4), ("position_axes", 4)]


@pytest.mark.parametrize(("field", "value"), [*WRONG_FIELDS, ("placeholder_token_id", 10)])
def test_entries_are_checked(field, value):
    ENTRY.check(10, 4, "given")
    with pytest.raises(BundleError, match=f"given: {field} is {value}"):
        GivenEntry(**{**vars(ENTRY), field: value}).check(10, 4, "given")


def test_the_runtime_alone_knows_every_kind_of_medium():
    """In a process that has imported no front end of dsbd_ort."""
    lines = (
        "from dsbd_runtime.bundle_files import bundle",
        "from dsbd_runtime.parts.given.given_medium import MediumEntry",
        "print(*sorted(kind.kind for kind in MediumEntry.__subclasses__()))",
    )
    command = [sys.executable, "-c", "; ".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    known = "canvas-tiles chunked-sound grid stacked-sound tiles windowed-sound"
    assert done.stdout.split() == known.split()
