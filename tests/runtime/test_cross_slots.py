"""Slots of cross rows: what a call reads of its sources, when slots are used again, memory."""

from dataclasses import replace

import numpy as np
import pytest

from dsbd_runtime.errors import CapacityError
from dsbd_runtime.ort.ort_module import import_ort
from dsbd_runtime.parts.attention.attention_rows import places_of_rows
from dsbd_runtime.parts.attention.cache_entries import AttentionRows
from dsbd_runtime.parts.source.cross_slots import CrossSlots
from dsbd_runtime.parts.source.encoder_entry import EncoderEntry
from dsbd_runtime.parts.source.ort_encoder import CrossRows, HeldSources
from tests.runtime.test_speech_entry import ENTRY as SPEECH

NUM_HEADS, KEY_WIDTH, VALUE_WIDTH, NUM_LAYERS = 2, 3, 5, 2
BYTES_OF_TOKEN = NUM_LAYERS * NUM_HEADS * (KEY_WIDTH + VALUE_WIDTH) * 4
ENTRY = EncoderEntry(
    vocab_size=100,
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


class FakeEncoder:
    """Keeps what it has read, as OrtEncoder, and counts what it reads."""

    def __init__(self):
        self.kept = {}
        self.held = HeldSources()
        self.num_read = 0
        self.most_bytes = 2**80

    @property
    def num_bytes(self):
        return sum(rows.num_bytes for rows in self.kept.values())

    def cross_rows(self, source):
        if source not in self.kept:
            self.num_read += 1
            found = rows_of(source)
            values = {
                name: ORT.OrtValue.ortvalue_from_numpy(array) for name, array in found.items()
            }
            self.kept[source] = CrossRows(values, sum(array.nbytes for array in found.values()))
            self.limit(self.most_bytes)
        return self.kept[source]

    def take(self, source):
        self.cross_rows(source)
        return self.kept.pop(source)

    def put_back(self, source, rows):
        self.kept[source] = rows

    def limit(self, most_bytes):
        self.most_bytes = most_bytes
        while len(self.kept) > 1 and self.num_bytes > most_bytes:
            del self.kept[next(iter(self.kept))]

    def forget(self):
        self.kept = {source: rows for source, rows in self.kept.items() if source in self.held}


def new_slots(most_bytes=2**20, entry=ENTRY):
    encoder = FakeEncoder()
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
        assert call.values is encoder.kept[each].values
        assert call.items.tolist() == [0]
    assert encoder.num_read == 2
    assert slots.capacity == (0, 0)
    assert slots.num_bytes == encoder.num_bytes == 14 * BYTES_OF_TOKEN


def test_sources_of_a_call_lie_side_by_side_and_in_one_place_alone():
    encoder, slots = new_slots()
    first, second, third = source(1, 17), source(2, 3), source(30, 40)
    read(slots, first)
    call = read(slots, first, second)
    assert not encoder.kept and encoder.num_read == 2
    assert slots.capacity == (2, 32)
    assert slots.num_bytes == 2 * 32 * BYTES_OF_TOKEN
    assert read(slots, first, second).values is call.values  # no copy, nothing to bind
    read(slots, second, third, first)
    assert slots.capacity == (4, 48)  # twice the slots, as long as the longest
    alone = read(slots, third)
    assert (len(alone.lengths), alone.items.tolist()) == (1, [0])
    assert encoder.num_read == 3
    assert encoder.most_bytes == 2**20 - slots.num_bytes
    slots.forget()
    assert (slots.num_bytes, encoder.most_bytes) == (0, 2**20)
    read(slots, first, second)


def test_a_source_may_be_read_before_its_first_call():
    encoder, slots = new_slots()
    for each in (source(1), source(2), source(1)):
        slots.read(each)
    read(slots, source(1), source(2))
    slots.read(source(2))
    assert encoder.num_read == 2 and not encoder.kept


def test_a_slot_is_used_again_once_it_is_released_and_not_before():
    encoder, slots = new_slots()
    first, second, third, fourth = (source(number) for number in (1, 2, 3, 4))
    read(slots, first, second)
    slots.release(first)
    read(slots, first, second)  # it was not over after all
    read(slots, second, third)
    assert slots.capacity == (4, 16)  # first is live: a preempted request's
    read(slots, first, second, third)
    assert encoder.num_read == 3
    slots.release(first)
    read(slots, second, third, fourth)
    assert (slots.capacity, encoder.num_read) == ((4, 16), 4)
    slots.release(source(77))  # which nobody has read
    read(slots, first, second, third, fourth)
    assert (slots.capacity, encoder.num_read) == ((4, 16), 5)


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
    assert encoder.num_read == 18


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
    assert encoder.num_read == 3
    slots.release(one)
    read(slots, two, three)
    read(slots, one)
    assert encoder.num_read == 4


def test_a_source_that_is_held_is_not_forgotten():
    """In slots, released or not, or as its encoder left it."""
    encoder, slots = new_slots()
    one, two, three = (source(number, 6) for number in (1, 2, 3))
    with slots.held(one), slots.held(two), slots.held(three):
        read(slots, three)
        read(slots, one, two, source(4))
        slots.release(one)
        slots.forget()
        assert set(encoder.kept) == {three} and slots.capacity == (4, 16)
        assert encoder.most_bytes == 2**20 - 4 * 16 * BYTES_OF_TOKEN
        read(slots, one)
        read(slots, source(4), two)
        read(slots, one, two, three)
        assert encoder.num_read == 5  # the fourth twice
    slots.forget()
    assert (slots.num_bytes, slots.capacity, encoder.most_bytes) == (0, (0, 0), 2**20)
    read(slots, one)
    assert encoder.num_read == 6


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
    assert encoder.num_read == 5


def test_no_memory_for_slots_is_a_capacity_error_after_which_all_is_read_again():
    encoder = FakeEncoder()
    wide = replace(ENTRY, cross=[replace(ENTRY.cross[0], value_width=2**45)])
    slots = CrossSlots(ORT, encoder, wide, 2**80)
    with pytest.raises(CapacityError, match=r"rows of 2 sources of up to 16 tokens: .*; run fewer"):
        slots.of_call((source(1), source(2)))
    assert slots.num_bytes == 0
    read(slots, source(1))
    assert encoder.num_read == 3


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
    assert encoder.num_read < 300


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
