"""Cross rows of sources: encoder outputs that are kept, slots of calls, and their memory."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsbd_runtime.errors import CapacityError
from dsbd_runtime.ort.ort_module import import_ort
from dsbd_runtime.parts.attention.attention_rows import places_of_rows
from dsbd_runtime.parts.attention.cache_entries import AttentionRows
from dsbd_runtime.parts.source.cross_slots import CrossSlots
from dsbd_runtime.parts.source.encoder_entry import EncoderEntry, encoder_contract
from dsbd_runtime.parts.source.ort_encoder import HeldSources, OrtEncoder
from tests.runtime.fakes import described
from tests.runtime.test_speech_entry import ENTRY as SPEECH

NUM_HEADS, KEY_WIDTH, VALUE_WIDTH, NUM_LAYERS = 2, 3, 5, 2
BYTES_OF_TOKEN = NUM_LAYERS * NUM_HEADS * (KEY_WIDTH + VALUE_WIDTH) * 4
ENTRY = EncoderEntry(
    vocab_size=1000,
    context_length=64,
    start_token_id=0,
    cross=[
        AttentionRows(
            layer=layer,
            num_heads=NUM_HEADS,
            key_width=KEY_WIDTH,
            value_width=VALUE_WIDTH,
            dtype="fp32",
        )
        for layer in range(NUM_LAYERS)
    ],
)
ORT = import_ort()


def rows_of(source):
    """Cross rows that are a function of the source: (1, H, N, D) by name."""
    rng = np.random.default_rng(list(source))
    return {
        name: rng.standard_normal((1, num_heads, len(source), width), dtype=np.float32)
        for name, (_, num_heads, width) in ENTRY.cross_shapes.items()
    }


class FakeEngine:
    """An engine as ONNX Runtime describes it.

    Attributes:
        read: the sources so far.
    """

    def __init__(self):
        self.read = []

    def get_inputs(self):
        return described(encoder_contract(ENTRY).inputs)

    def get_outputs(self):
        return described(encoder_contract(ENTRY).outputs)

    def run_with_ort_values(self, names, feeds):
        (tokens,) = feeds.values()
        source = tuple(tokens.numpy()[0].tolist())
        self.read.append(source)
        rows = rows_of(source)
        return [ORT.OrtValue.ortvalue_from_numpy(rows[name]) for name in names]


def new_encoder(most_bytes=2**80):
    return OrtEncoder(ORT, Path("encoder.onnx"), ENTRY, lambda _: FakeEngine(), most_bytes)


def num_read(encoder):
    return len(encoder._engine.read)


def new_slots(most_bytes=2**20, entry=ENTRY):
    encoder = new_encoder()
    return encoder, CrossSlots(ORT, encoder, entry, most_bytes)


def source(number, length=5):
    return tuple(range(number, number + length))


def check_rows(call, sources):
    """Each source finds its own rows, and after them finite numbers."""
    assert call.items.dtype == call.lengths.dtype == np.int64
    assert len(set(call.items.tolist())) == len(sources)
    for item, each in zip(call.items.tolist(), sources, strict=True):
        assert call.lengths[item] == len(each)
        for name, wanted in rows_of(each).items():
            found = call.values[name].numpy()
            assert len(found) == len(call.lengths)
            assert np.array_equal(found[item, :, : len(each)], wanted[0])
            assert np.isfinite(found).all()


def read(slots, *sources):
    call = slots.of_call(sources)
    check_rows(call, list(sources))
    return call


def test_a_source_alone_is_read_as_its_encoder_left_it():
    encoder, slots = new_slots()
    for each in (source(1), source(2, 9), source(1)):
        call = read(slots, each)
        assert call.values is encoder._kept[each].values
        assert call.items.tolist() == [0]
    assert num_read(encoder) == 2
    assert slots.capacity == (0, 0)
    assert slots.num_bytes == encoder.num_bytes == 14 * BYTES_OF_TOKEN


def test_sources_of_a_call_lie_side_by_side_and_in_one_place_alone():
    encoder, slots = new_slots()
    first, second, third = source(1, 17), source(2, 3), source(30, 40)
    for each in (first, second, first):
        slots.read(each)  # before its first call
    call = read(slots, first, second)
    slots.read(second)
    assert not encoder._kept and num_read(encoder) == 2
    assert slots.capacity == (2, 32)
    assert slots.num_bytes == 2 * 32 * BYTES_OF_TOKEN
    assert read(slots, first, second).values is call.values  # no copy, nothing to bind
    read(slots, second, third, first)
    assert slots.capacity == (4, 48)  # twice the slots, as long as the longest
    alone = read(slots, third)
    assert (len(alone.lengths), alone.items.tolist()) == (1, [0])
    assert num_read(encoder) == 3
    assert encoder._most_bytes == 2**20 - slots.num_bytes
    slots.forget()
    assert (slots.num_bytes, encoder._most_bytes) == (0, 2**20)
    read(slots, first, second)


def test_a_slot_is_used_again_once_it_is_released_and_not_before():
    encoder, slots = new_slots()
    first, second, third, fourth = (source(number) for number in (1, 2, 3, 4))
    read(slots, first, second)
    slots.release(first)
    read(slots, first, second)  # it was not over after all
    read(slots, second, third)
    assert slots.capacity == (4, 16)  # first is live: a preempted request's
    read(slots, first, second, third)
    assert num_read(encoder) == 3
    slots.release(first)
    read(slots, second, third, fourth)
    assert (slots.capacity, num_read(encoder)) == ((4, 16), 4)
    slots.release(source(77))  # which nobody has read
    read(slots, first, second, third, fourth)
    assert (slots.capacity, num_read(encoder)) == ((4, 16), 5)


def test_slots_become_fewer_and_shorter_once_most_are_unused():
    encoder, slots = new_slots()
    many = [source(number) for number in range(1, 17)]
    long = source(20, 60)
    read(slots, *many, long)
    assert slots.capacity == (32, 64)
    for each in (*many[:15], long):
        slots.release(each)
    read(slots, many[15])
    assert slots.capacity == (1, 16)
    read(slots, many[15], source(30))
    assert slots.capacity == (2, 16)
    assert num_read(encoder) == 18


def test_a_call_reads_no_slots_far_after_its_own():
    _, slots = new_slots()
    many = [source(number) for number in range(1, 9)]
    read(slots, *many)
    assert len(read(slots, many[2], many[4]).lengths) == 3  # those between
    for each in (*many[:2], *many[4:7]):
        slots.release(each)
    assert len(read(slots, many[2], many[7]).lengths) <= 3  # of the three that are left


def test_a_source_that_is_held_is_not_read_again_after_its_release():
    """Its next request begins once the others have made their calls."""
    encoder, slots = new_slots()
    one, two, three = (source(number, 6) for number in (1, 2, 3))
    with slots.held(one):
        read(slots, one, two)
        slots.release(one)
        read(slots, two, three)
        read(slots, one)
        read(slots, two, one)
    assert num_read(encoder) == 3
    slots.release(one)
    read(slots, two, three)
    read(slots, one)
    assert num_read(encoder) == 4


def test_a_source_that_is_held_is_not_forgotten():
    """In slots, released or not, or as its encoder left it."""
    encoder, slots = new_slots()
    one, two, three = (source(number, 6) for number in (1, 2, 3))
    with slots.held(one), slots.held(two), slots.held(three):
        read(slots, three)
        read(slots, one, two, source(4))
        slots.release(one)
        slots.forget()
        assert set(encoder._kept) == {three} and slots.capacity == (4, 16)
        assert encoder._most_bytes == 2**20 - 4 * 16 * BYTES_OF_TOKEN
        read(slots, one)
        read(slots, source(4), two)
        read(slots, one, two, three)
        assert num_read(encoder) == 5  # the fourth twice
    slots.forget()
    assert (slots.num_bytes, slots.capacity, encoder._most_bytes) == (0, (0, 0), 2**20)
    read(slots, one)
    assert num_read(encoder) == 6


def test_a_source_is_held_until_the_last_of_its_holders_has_let_go():
    held = HeldSources()
    with held.held("one"), held.held("two"):
        with held.held("one"):
            assert "one" in held and "three" not in held
        assert "one" in held and "two" in held
    assert "one" not in held and "two" not in held
    with pytest.raises(ValueError), held.held("one"):
        raise ValueError
    assert "one" not in held


def test_a_window_of_sound_has_half_as_many_rows_as_frames():
    size = 64 * BYTES_OF_TOKEN
    speech = replace(ENTRY, context_length=100, speech=SPEECH)
    assert new_slots(2 * size, speech)[1].most_together(["a window"]) == 2
    assert new_slots(2 * size - 1, speech)[1].most_together(["a window"]) == 1


def test_memory_is_bounded_by_sources_that_are_read_again():
    size = 16 * BYTES_OF_TOKEN
    encoder, slots = new_slots(3 * size)
    one, two, three, four = (source(number) for number in (1, 2, 3, 4))
    assert slots.most_together([one, two]) == 3
    assert slots.most_together([one, source(5, 40)]) == 1
    assert slots.most_together(["no tuple of tokens"]) == 1  # as long as any may be
    read(slots, one, two, three)
    assert slots.capacity == (3, 16)
    read(slots, three, four)  # one and two are live, but there is no room
    assert slots.num_bytes == 3 * size
    read(slots, one, three, four)
    assert slots.num_bytes == 3 * size
    assert num_read(encoder) == 5


def test_no_memory_for_slots_is_a_capacity_error_after_which_all_is_read_again():
    encoder = new_encoder()
    wide = replace(ENTRY, cross=[replace(ENTRY.cross[0], value_width=2**45)])
    slots = CrossSlots(ORT, encoder, wide, 2**80)
    with pytest.raises(CapacityError, match=r"rows of 2 sources of up to 16 tokens: .*; run fewer"):
        slots.of_call((source(1), source(2)))
    assert slots.num_bytes == 0
    read(slots, source(1))
    assert num_read(encoder) == 3


def test_random_requests_always_find_their_rows():
    rng = np.random.default_rng(0)
    encoder, slots = new_slots(40 * 16 * BYTES_OF_TOKEN)
    live = []
    for step in range(300):
        if len(live) < 12 and rng.random() < 0.5:
            new = source(step, int(rng.integers(1, 60)))
            live.append(new)
        if live and rng.random() < 0.4:
            slots.release(live.pop(int(rng.integers(len(live)))))
        if live:
            asked = [live[i] for i in rng.permutation(len(live))[: rng.integers(1, 13)]]
            read(slots, *asked[: slots.most_together(asked)])
        assert slots.num_bytes <= (40 * 16 + 60) * BYTES_OF_TOKEN  # the one read last in any case
    assert num_read(encoder) < 300


PLACES = [  # items, number of items, rows, places
    ([0, 0, 0], 1, [[0, 1, 2]], [0, 1, 2]),
    ([1, 0, 1], 2, [[1, 0], [0, 2]], [2, 0, 3]),
    ([0, 0, 1, 0], 2, [[0, 1, 3], [2, 0, 0]], [0, 1, 3, 2]),
    ([2, 0], 3, [[1], [0], [0]], [2, 0]),  # the item between is none of the call's
]


@pytest.mark.parametrize(("items", "num_items", "rows", "places"), PLACES)
def test_rows_of_each_source_and_their_places(items, num_items, rows, places):
    found = places_of_rows(np.array(items), num_items)
    assert [array.tolist() for array in found] == [rows, places]
    assert all(array.dtype == np.int64 and array.flags.c_contiguous for array in found)
    assert np.array_equal(found[0].reshape(-1)[found[1]], np.arange(len(items)))


ONE, TWO, THREE = (source(first) for first in (1, 2, 3))
BYTES = 5 * BYTES_OF_TOKEN


def test_sources_are_kept_until_the_memory_is_full():
    encoder = new_encoder(3 * BYTES)
    for each in (ONE, TWO, THREE, ONE):
        rows = encoder.cross_rows(each).values
        assert all(
            np.array_equal(rows[name].numpy(), array) for name, array in rows_of(each).items()
        )
    assert encoder._engine.read == [ONE, TWO, THREE] and encoder.num_bytes == 3 * BYTES
    encoder.limit(2 * BYTES)  # the second was used longest ago
    for each in (ONE, THREE, TWO):
        encoder.cross_rows(each)
    assert encoder._engine.read == [ONE, TWO, THREE, TWO] and encoder.num_bytes == 2 * BYTES
    encoder.forget()
    assert encoder.num_bytes == 0


def test_what_is_held_is_not_forgotten():
    encoder = new_encoder(3 * BYTES)
    with encoder.held.held(ONE), encoder.held.held(TWO):
        encoder.cross_rows(ONE)
        encoder.cross_rows(THREE)
        rows = encoder.take(TWO)
        encoder.forget()
        assert encoder.num_bytes == BYTES
        encoder.put_back(TWO, rows)
        encoder.forget()
        assert encoder.num_bytes == 2 * BYTES
        assert encoder.cross_rows(TWO) is rows
        encoder.cross_rows(ONE)
        assert encoder._engine.read == [ONE, THREE, TWO]
        encoder.limit(BYTES)  # the memory is bounded all the same
        assert encoder.num_bytes == BYTES
    encoder.forget()
    assert encoder.num_bytes == 0


def test_what_was_let_go_makes_room_for_the_next():
    """A window of an audio for the one after it."""
    encoder = new_encoder(3 * BYTES)
    with encoder.held.held(ONE):
        encoder.cross_rows(ONE)
    encoder.cross_rows(ONE)  # nothing is in the way yet
    assert encoder._engine.read == [ONE]
    encoder.cross_rows(TWO)
    assert encoder.num_bytes == 2 * BYTES  # it was wanted once more, by nobody who holds it
    with encoder.held.held(ONE):
        encoder.cross_rows(ONE)
        encoder.cross_rows(THREE)
        assert encoder.num_bytes == 3 * BYTES
    encoder.limit(9 * BYTES)
    encoder.cross_rows((7, 8, 9, 10, 11))
    assert encoder.num_bytes == 3 * BYTES
    assert encoder.cross_rows(THREE) and encoder._engine.read.count(THREE) == 1
