"""Device session: padding that nobody sees, counted copies, growth in place, clean failures."""

from dataclasses import replace

import numpy as np
import pytest

from dsbd_runtime.bundle_files.bundle import open_bundle
from dsbd_runtime.errors import CapacityError, DsbdError, InputError
from dsbd_runtime.loading import load_causal_lm
from dsbd_runtime.parts.attention.attention_rows import ATTENTION_MASK, INPUT_IDS
from tests.runtime.fake_device import FakeDevice, open_on_fake
from tests.runtime.model_calls import (
    ONE_THREAD,
    append_chain,
    append_forest,
    assert_same,
    engine_inputs,
)
from tests.runtime.tiny_graph import TinyModel, write_tiny_bundle
from tests.runtime.tiny_tokenizer import VOCAB_SIZE

ROW_BYTES = 2 * 2 * 2 * 8 * 4  # layers, parts, heads, head_dim, fp32
NO_ROWS = np.arange(0)


@pytest.fixture
def on_host(tiny_bundle):
    with load_causal_lm(tiny_bundle, "target", settings=ONE_THREAD) as model:
        yield model


@pytest.fixture
def topk_bundle(tmp_path):
    return open_bundle(write_tiny_bundle(tmp_path / "bundle", target=TinyModel(logits="topk:8")))


MODELS = [
    TinyModel(),
    TinyModel(sliding_window=3),
    TinyModel(logits="topk:5"),
    TinyModel(logits="topk:5", full_logits=False),
]


@pytest.mark.parametrize("tiny", MODELS, ids=["dense", "sliding", "topk", "topk alone"])
@pytest.mark.parametrize("most_recorded", [0, 2, 64])
def test_every_output_is_that_of_the_host_session_whatever_lies_in_unused_rows(
    tmp_path, tiny, most_recorded
):
    bundle = open_bundle(write_tiny_bundle(tmp_path / "bundle", target=tiny))
    machine = open_on_fake(bundle, is_poisoned=True, most_recorded=most_recorded)
    with machine.model as model, load_causal_lm(bundle, "target", settings=ONE_THREAD) as on_host:
        for num_new in (1, 100, 5, 33, 300):
            for parents in ([-1], [-1, -1, 0], [-1, 0, 0, 2, 1], [-1, 0, 1, 2, 3, 4, 5, 6, 7]):
                assert_same(append_forest(model, parents), append_forest(on_host, parents))
                rows = np.delete(np.arange(on_host.num_rows), [0, on_host.num_rows - 2])
                model.keep(rows)
                on_host.keep(rows)
            asked = np.array([num_new - 1, 0, num_new // 2])
            assert_same(append_chain(model, num_new, asked), append_chain(on_host, num_new, asked))
        assert model.num_rows == on_host.num_rows > 400


def test_the_poison_would_be_seen(tiny_bundle):
    """Proves that the test above says something: a mask that looks too far changes the logits."""
    rows = np.arange(3)
    logits = []
    for machine in (open_on_fake(tiny_bundle), open_on_fake(tiny_bundle, is_poisoned=True)):
        mask = np.tri(3, machine.session.rows.capacity, dtype=np.bool_)
        for last_seen in (0, 100):
            mask[2, last_seen] = True
            inputs = engine_inputs(rows, rows, {ATTENTION_MASK: mask}, 0, rows)
            machine.session.run(inputs)
            logits.append(inputs.returned["logits"].values[2])
    np.testing.assert_array_equal(logits[0], logits[2])
    assert not np.allclose(logits[1], logits[3], atol=1)


@pytest.mark.parametrize("logits", ["full", "topk:8"])
def test_bytes_of_a_step_are_its_small_inputs_and_the_asked_rows(tiny_bundle, topk_bundle, logits):
    machine = open_on_fake(tiny_bundle if logits == "full" else topk_bundle)
    for num_new, asked in ((5, [4, 1, 0]), (5, [4, 1, 0]), (16, [3]), (1, [])):
        machine.device.traffic.clear()
        append_chain(machine.model, num_new, np.array(asked, np.int64))
        padded = 1 << (num_new - 1).bit_length()
        padded_asked = 1 << max(len(asked) - 1, 0).bit_length()
        numbers = 8 * (1 + 2 * padded + padded_asked)  # write index, ids, positions, logit rows
        uploaded = machine.device.traffic.num_bytes["upload"]
        assert 0 <= uploaded - numbers - padded * machine.session.rows.capacity < 5 * 256
        downloaded = machine.device.traffic.num_bytes["download"]
        if logits == "full":
            assert downloaded == len(asked) * VOCAB_SIZE * 4
        else:
            assert downloaded <= padded_asked * (8 * 4 + 8 * 8 + 4) + 2 * 256
            assert (downloaded == 0) == (not asked)


FULL_ROW_BYTES = 4 * VOCAB_SIZE


def test_full_logits_cross_when_they_are_read(topk_bundle):
    machine = open_on_fake(topk_bundle)
    traffic = machine.device.traffic
    full = append_chain(machine.model, 20, np.arange(20)).full
    assert traffic.num_bytes["download"] < 4 * FULL_ROW_BYTES  # top logits, ids and sums
    for num_rows in (1, 20, 3):
        traffic.clear()
        full.read(np.arange(num_rows))
        assert traffic.num_bytes["download"] == num_rows * FULL_ROW_BYTES
        assert traffic.counts["synchronize"] == -(-num_rows // 8)
    assert traffic.num_bytes["allocate_pinned"] == 0  # the first read took room for eight rows
    assert full.read(NO_ROWS).shape == (0, VOCAB_SIZE)


def test_rows_that_repeat_are_read_as_the_caller_counts_them(topk_bundle):
    machine = open_on_fake(topk_bundle)
    found = append_chain(machine.model, 2, np.array([1, 0, 1, 1, 0]))
    full = found.full.read(np.arange(5))
    np.testing.assert_array_equal(full.max(axis=1), found.top_logits[:, 0])
    np.testing.assert_array_equal(full[[0, 1]], full[[2, 4]])
    again = append_chain(machine.model, 2, np.array([1, 0]))
    np.testing.assert_array_equal(again.full.read(np.arange(2)).max(axis=1), again.top_logits[:, 0])


@pytest.mark.parametrize("most_recorded", [0, 2, 64])
def test_full_logits_outlast_the_caches(topk_bundle, most_recorded):
    machine = open_on_fake(topk_bundle, most_recorded=most_recorded)
    full = append_chain(machine.model, 300, np.array([299])).full
    wanted = full.read(np.array([0]))
    machine.model.keep(np.arange(4, 10))
    machine.model.shrink()
    machine.model.keep(NO_ROWS)
    np.testing.assert_array_equal(full.read(np.array([0])), wanted)
    assert np.abs(wanted).max() > 0


def test_the_room_for_full_logits_is_bounded(topk_bundle):
    machine = open_on_fake(topk_bundle, capacity=300)
    for num_new in (1, 200, 1, 7, 33, 20, 9, 13, 11, 5):  # the last without room for padding
        append_chain(machine.model, num_new, np.arange(num_new))
    sizes = sorted(
        memory.nbytes // FULL_ROW_BYTES
        for memory in machine.device.live.values()
        if memory.nbytes % FULL_ROW_BYTES == 0
    )
    assert sizes == [1, 8, 16, 24, 40, 256]
    with pytest.raises(CapacityError):
        append_chain(machine.model, 1, NO_ROWS)


def test_a_move_copies_its_row_numbers_and_waits_only_before_they_are_overwritten(tiny_bundle):
    machine = open_on_fake(tiny_bundle)
    append_chain(machine.model, 60, np.array([59]))
    machine.device.traffic.clear()
    machine.model.keep(np.arange(20, 60))
    assert machine.device.traffic.counts == {"upload": 1, "call": 1}
    machine.device.traffic.clear()
    machine.model.keep(np.arange(5, 40))
    assert machine.device.traffic.counts == {"upload": 1, "call": 1, "synchronize": 1}
    assert machine.device.traffic.num_bytes["upload"] <= 8 * 64 + 256
    append_chain(machine.model, 1, np.array([0]))
    assert machine.device.traffic.counts["synchronize"] == 2


def test_growth_copies_the_used_rows_on_the_device_alone(tiny_bundle):
    machine = open_on_fake(tiny_bundle)
    append_chain(machine.model, 100, NO_ROWS)
    machine.device.traffic.clear()
    machine.session.rows.reserve(300, 100)
    traffic = machine.device.traffic
    assert machine.session.rows.capacity == 384
    assert traffic.num_bytes["copy_rows"] == 100 * ROW_BYTES
    assert not {"upload", "download"} & set(traffic.counts)
    assert len(machine.device.live) == 8 - 4 + 2  # four caches, two input buffers, no outputs yet
    machine.device.traffic.clear()
    machine.session.rows.shrink(90)
    assert machine.session.rows.capacity == 128
    assert traffic.num_bytes["copy_rows"] == 90 * ROW_BYTES


def test_the_reserved_room_holds_the_padding(tiny_bundle):
    machine = open_on_fake(tiny_bundle)
    append_chain(machine.model, 120, NO_ROWS)
    append_chain(machine.model, 5, NO_ROWS)
    assert machine.session.rows.capacity == 128
    append_chain(machine.model, 2, NO_ROWS)  # 125 + 2
    assert machine.session.rows.capacity == 128
    append_chain(machine.model, 1, NO_ROWS)
    append_chain(machine.model, 129, NO_ROWS)  # 128 + 192 padded
    assert machine.session.rows.capacity == 320
    sizes = [arrays[INPUT_IDS].shape[1] for arrays in machine.engine.bound]
    assert sizes == [128, 8, 2, 1, 192]


def test_a_fresh_start_forgets(tiny_bundle):
    machine = open_on_fake(tiny_bundle)
    for num_rows in (100, 300):
        append_chain(machine.model, num_rows, NO_ROWS)
        machine.model.keep(NO_ROWS)
        assert machine.session.rows.capacity == 128
        assert not any(cache.any() for cache in caches_of(machine))


def caches_of(machine):
    arrays = machine.session.caches.bound.caches.inputs.values()
    return [machine.device.memory_of(array) for array in arrays]


def test_where_calls_are_recorded_addresses_last(tiny_bundle):
    machine = open_on_fake(tiny_bundle, most_recorded=64)
    append_chain(machine.model, 100, NO_ROWS)
    append_chain(machine.model, 200, NO_ROWS)
    num_bound = len(machine.engine.bound)
    machine.model.keep(NO_ROWS)
    machine.model.shrink()
    assert machine.session.rows.capacity == 384
    assert not any(cache.any() for cache in caches_of(machine))
    append_chain(machine.model, 200, NO_ROWS)
    assert len(machine.engine.bound) == num_bound
    assert machine.engine.num_released == num_bound - 1  # the one of the smaller caches


def test_a_static_capacity_is_used_to_the_last_row(tiny_bundle, on_host):
    machine = open_on_fake(tiny_bundle, capacity=40)
    with machine.model as model:
        for num_new in (35, 3, 2):
            asked = np.array([num_new - 1])
            assert_same(append_chain(model, num_new, asked), append_chain(on_host, num_new, asked))
        with pytest.raises(CapacityError, match="41 rows, the engine holds 40"):
            append_chain(model, 1, NO_ROWS)
        assert model.num_rows == 40
        for each in (model, on_host):
            each.keep(np.delete(np.arange(40), 2))
        asked = np.array([0])
        assert_same(append_chain(model, 1, asked), append_chain(on_host, 1, asked))
    assert machine.session.rows.capacity == 0


def test_without_memory_for_growth_all_is_as_before(tiny_bundle):
    machine = open_on_fake(tiny_bundle)
    append_chain(machine.model, 100, np.array([99]))
    live, pinned = len(machine.device.live), len(machine.device.pinned)
    wanted = [cache.copy() for cache in caches_of(machine)]
    for room in (0, 300 * ROW_BYTES, 384 * ROW_BYTES, 384 * ROW_BYTES + 105_000):
        machine.device.room = room
        with pytest.raises(CapacityError, match=r"fake:0 has no memory .* cache of 384 rows .*128"):
            append_chain(machine.model, 200, NO_ROWS)
        assert machine.device.room == room
    assert (machine.session.rows.capacity, machine.model.num_rows) == (128, 100)
    assert (len(machine.device.live), len(machine.device.pinned)) == (live, pinned)
    for found, cache in zip(caches_of(machine), wanted, strict=True):
        np.testing.assert_array_equal(found, cache)
    append_chain(machine.model, 1, np.array([0]))


@pytest.mark.parametrize("num_rows_of_room", [1, 6])  # 6: enough for top logits alone
def test_without_memory_for_outputs_the_rows_are_as_before(
    tiny_bundle, topk_bundle, num_rows_of_room
):
    machine = open_on_fake(tiny_bundle if num_rows_of_room == 1 else topk_bundle)
    append_chain(machine.model, 10, np.array([9]))
    machine.device.room = num_rows_of_room * FULL_ROW_BYTES
    with pytest.raises(CapacityError, match=r"no memory for the outputs of 8 rows.*topk:K"):
        append_chain(machine.model, 8, np.arange(8))
    assert machine.model.num_rows == 10
    last = append_chain(machine.model, 8, np.array([7]))
    if num_rows_of_room > 1:
        machine.device.room = 9 * FULL_ROW_BYTES  # a read copies at most eight rows at a time
        last.full.read(np.array([0]))


def test_without_memory_at_the_start_everything_is_closed(tiny_bundle):
    device = FakeDevice(room=100 * ROW_BYTES)
    with pytest.raises(CapacityError, match="no memory for a key/value cache of 128 rows"):
        open_on_fake(tiny_bundle, device=device)
    assert (device.live, device.pinned, device.is_closed) == ({}, {}, True)


def test_closing_frees_everything(topk_bundle):
    machine = open_on_fake(topk_bundle)
    append_forest(machine.model, [-1, 0, 0, 2, 1])
    machine.model.keep(np.arange(1, 4))
    append_chain(machine.model, 300, np.array([299])).full.read(np.array([0]))
    machine.model.close()
    machine.model.close()
    assert (machine.device.live, machine.device.pinned) == ({}, {})
    for engine in (machine.engine, machine.prune_engine):
        assert engine.num_released == len(engine.bound) > 0
        assert engine.is_closed
    assert machine.device.is_closed
    assert (machine.session.rows.capacity, machine.session.rows.num_bytes) == (0, 0)
    with pytest.raises(DsbdError, match="the engine on fake:0 is closed"):
        append_chain(machine.model, 1, NO_ROWS)


def test_a_step_beyond_the_largest_is_refused(tiny_bundle):
    session = open_on_fake(tiny_bundle, max_forward_rows=4).session
    rows = np.arange(5)
    inputs = engine_inputs(rows, rows, {ATTENTION_MASK: np.tri(5, 128, dtype=bool)}, 0, rows)
    with pytest.raises(InputError, match="a forward of 5 rows, the session takes 4"):
        session.run(inputs)


def test_half_precision_engines_return_float32_arrays_of_the_callers(tmp_path):
    half = replace(TinyModel(), dtype="fp16")
    bundle = open_bundle(write_tiny_bundle(tmp_path / "bundle", target=half, draft=half))
    machine = open_on_fake(bundle)
    on_host = load_causal_lm(bundle, "target", settings=ONE_THREAD)
    found, wanted = (append_chain(m, 9, np.arange(9)) for m in (machine.model, on_host))
    assert found.dtype == np.float32
    append_chain(machine.model, 9, np.arange(9))
    np.testing.assert_array_equal(found, wanted)
    assert machine.session.rows.num_bytes == 128 * ROW_BYTES // 2


def test_a_size_that_returns_is_replayed_and_the_number_of_recordings_is_bounded(tiny_bundle):
    machine = open_on_fake(tiny_bundle, most_recorded=2)
    for num_new in (1, 2, 4):  # the first run takes memory, the second is recorded, then it replays
        for num_replays in (0, 0, 1):
            machine.device.traffic.clear()
            append_chain(machine.model, num_new, np.array([0]))
            assert machine.device.traffic.counts["call"] == 1
            assert machine.device.traffic.counts["replay"] == (num_replays if num_new < 4 else 0)
    assert len(machine.session.caches.recorded) == len(machine.device.recorded) == 2
    append_chain(machine.model, 200, NO_ROWS)  # the caches grow
    assert len(machine.session.caches.recorded) == len(machine.device.recorded) == 0
    for _ in range(3):
        append_chain(machine.model, 1, np.array([0]))
    assert len(machine.session.caches.recorded) == 1
    machine.model.close()
    assert machine.device.recorded == []


def test_a_call_that_cannot_be_recorded_goes_on_piece_by_piece(tiny_bundle, on_host):
    machine = open_on_fake(tiny_bundle, most_recorded=64)
    tried = []

    def record(work):
        tried.append(work)
        raise CapacityError("no memory for the intermediate results of a call")

    machine.device.record = record
    for _ in range(8):
        found, wanted = (append_chain(m, 3, np.array([2])) for m in (machine.model, on_host))
        assert_same(found, wanted)
    assert len(tried) == 3
