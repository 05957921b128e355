"""Engine calls side by side: the rounds, the random calls, the choices."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from dsbd_runtime.bundle import open_bundle
from engine_timing.choices import CHOICES, SHARINGS
from engine_timing.random_calls import RandomCalls, time_in_rounds
from tests.runtime.tiny_graph import write_tiny_bundle


class Work:
    """A clock that only moves while work is done."""

    def __init__(self):
        self.now = 0.0
        self.log = ""

    def takes(self, name, seconds):
        def call():
            self.log += name
            self.now += next(seconds)

        return call


def test_rounds_alternate_and_leave_out_the_first_call():
    work = Work()
    slow_first = [9.0, 0.001, 0.002, 0.003, 9.0, 0.004, 0.004, 0.004]
    calls = {
        "a": work.takes("a", iter(slow_first)),
        "b": work.takes("b", iter([9.0, 0.004, 0.004, 0.004, 9.0, 0.002, 0.002, 0.002])),
    }
    found = time_in_rounds(calls, num_rounds=2, calls_a_round=3, pause_s=0, clock=lambda: work.now)
    assert work.log == "aaaabbbbbbbbaaaa"
    assert found.medians["a"] == pytest.approx([2, 4])
    assert found.medians["b"] == pytest.approx([4, 2])
    assert found.milliseconds("a").median == pytest.approx(3)
    assert found.ratio("b", "a").median == pytest.approx((4 / 2 + 2 / 4) / 2)


def test_random_calls_are_steps_of_that_many_rows_behind_full_caches(tmp_path):
    write_tiny_bundle(tmp_path / "bundle")
    bundle = open_bundle(tmp_path / "bundle")
    path, entry = bundle.model_path("target"), bundle.entry("target")
    calls = RandomCalls(
        path.read_bytes(),
        path.parent,
        entry,
        row_counts=(1, 3),
        capacity=16,
        options=ort.SessionOptions(),
    )
    for rows in (1, 3):
        before = {key: value.numpy().copy() for key, value in calls.caches.items()}
        calls.call_of(rows)()
        for key, value in calls.caches.items():
            is_same = (value.numpy() == before[key]).all(axis=(0, 1, 3))  # (C,)
            np.testing.assert_array_equal(is_same, np.arange(16) < 16 - rows)


FIELDS = ("enable_cpu_mem_arena", "enable_mem_pattern", "graph_optimization_level")
FIELDS += ("intra_op_num_threads", "execution_mode", "inter_op_num_threads")
ENTRIES = ("session.intra_op.allow_spinning", "session.force_spinning_stop")
ENTRIES += ("session.dynamic_block_base", "session.set_denormal_as_zero")


def described(options):
    """What the options say of every field and entry that a choice may touch."""
    entries = {}
    for name in ENTRIES:
        try:
            entries[name] = options.get_session_config_entry(name)
        except RuntimeError:
            entries[name] = None  # never set
    return {name: getattr(options, name) for name in FIELDS} | entries


def test_every_choice_changes_the_options_in_a_way_of_its_own():
    found = [described(ort.SessionOptions())]
    for choice in CHOICES:
        if not choice.is_grouped:  # a choice of the export
            options = ort.SessionOptions()
            choice.change(options)
            found.append(described(options))
    assert all(a != b for index, a in enumerate(found) for b in found[:index])


def test_the_runtime_does_one_thing_for_a_draft_of_each_size():
    kept = [sharing.draft_role for sharing in SHARINGS if sharing.is_kept]
    assert sorted(kept) == ["draft", "target"]
