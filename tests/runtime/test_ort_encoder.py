"""Encoder outputs that are kept for sources: how long, and while a caller holds one."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dsbd_runtime.ort.ort_module import import_ort
from dsbd_runtime.parts.source.encoder_entry import encoder_contract
from dsbd_runtime.parts.source.ort_encoder import OrtEncoder
from tests.runtime.test_cross_slots import BYTES_OF_TOKEN, ENTRY, rows_of

ORT = import_ort()
ONE, TWO, THREE = (tuple(range(first, first + 5)) for first in (1, 2, 3))
BYTES = 5 * BYTES_OF_TOKEN


class FakeEngine:
    """An engine as ONNX Runtime describes it.

    Attributes:
        read: the sources so far.
    """

    def __init__(self):
        self.read = []

    def get_inputs(self):
        return _described(encoder_contract(ENTRY).inputs)

    def get_outputs(self):
        return _described(encoder_contract(ENTRY).outputs)

    def run_with_ort_values(self, names, feeds):
        (tokens,) = feeds.values()
        source = tuple(tokens.numpy()[0].tolist())
        self.read.append(source)
        rows = rows_of(source)
        return [ORT.OrtValue.ortvalue_from_numpy(rows[name]) for name in names]


def _described(specs):
    return [SimpleNamespace(name=name, **vars(spec)) for name, spec in specs.items()]


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def encoder(engine):
    return OrtEncoder(ORT, Path("encoder.onnx"), ENTRY, lambda _: engine, 3 * BYTES)


def test_sources_are_kept_until_the_memory_is_full(encoder, engine):
    for each in (ONE, TWO, THREE, ONE):
        rows = encoder.cross_rows(each).values
        assert all(
            np.array_equal(rows[name].numpy(), array) for name, array in rows_of(each).items()
        )
    assert engine.read == [ONE, TWO, THREE] and encoder.num_bytes == 3 * BYTES
    encoder.limit(2 * BYTES)  # the second was used longest ago
    for each in (ONE, THREE, TWO):
        encoder.cross_rows(each)
    assert engine.read == [ONE, TWO, THREE, TWO] and encoder.num_bytes == 2 * BYTES
    encoder.forget()
    assert encoder.num_bytes == 0


def test_what_is_held_is_not_forgotten(encoder, engine):
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
        assert engine.read == [ONE, THREE, TWO]
        encoder.limit(BYTES)  # the memory is bounded all the same
        assert encoder.num_bytes == BYTES
    encoder.forget()
    assert encoder.num_bytes == 0


def test_what_was_let_go_makes_room_for_the_next(encoder, engine):
    """A window of an audio for the one after it."""
    with encoder.held.held(ONE):
        encoder.cross_rows(ONE)
    encoder.cross_rows(ONE)  # nothing is in the way yet
    assert engine.read == [ONE]
    encoder.cross_rows(TWO)
    assert encoder.num_bytes == 2 * BYTES  # it was wanted once more, by nobody who holds it
    with encoder.held.held(ONE):
        encoder.cross_rows(ONE)
        encoder.cross_rows(THREE)
        assert encoder.num_bytes == 3 * BYTES
    encoder.limit(9 * BYTES)
    encoder.cross_rows((7, 8, 9, 10, 11))
    assert encoder.num_bytes == 3 * BYTES
    assert encoder.cross_rows(THREE) and engine.read.count(THREE) == 1
